/* Frame bodies: every read is bounded by the frame, every field is checked before anything acts on it. */
#include "aether.h"
#include <string.h>

const uint8_t *rd_bytes(struct rd *r, size_t n) {
    if (r->bad || (size_t)(r->end - r->p) < n) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *at = r->p;
    r->p += n;
    return at;
}

#define READER(name, type)                                   \
    type name(struct rd *r) {                                \
        type v = 0;                                          \
        const uint8_t *p = rd_bytes(r, sizeof v);            \
        if (p) memcpy(&v, p, sizeof v); /* little-endian machines only, as both targets are */ \
        return v;                                            \
    }
READER(rd_u8, uint8_t)
READER(rd_u16, uint16_t)
READER(rd_u32, uint32_t)
READER(rd_u64, uint64_t)

struct text rd_text(struct rd *r) {
    struct text t = {"", 0};
    uint32_t n = rd_u32(r);
    if (r->bad || n >= MAX_FRAME) {
        r->bad = true;
        return t;
    }
    const uint8_t *p = rd_bytes(r, (size_t)n + 1);
    if (!p) return t;
    if (p[n] != 0 || memchr(p, 0, n)) { /* a NUL inside would make two readers see two strings */
        r->bad = true;
        return t;
    }
    t.p = (const char *)p;
    t.n = n;
    return t;
}

void wr_bytes(struct wr *w, const void *p, size_t n) {
    if (w->full || w->cap - w->n < n) {
        w->full = true;
        return;
    }
    if (n) memcpy(w->p + w->n, p, n);
    w->n += n;
}
void wr_u8(struct wr *w, uint8_t v) { wr_bytes(w, &v, sizeof v); }
void wr_u16(struct wr *w, uint16_t v) { wr_bytes(w, &v, sizeof v); }
void wr_u32(struct wr *w, uint32_t v) { wr_bytes(w, &v, sizeof v); }
void wr_u64(struct wr *w, uint64_t v) { wr_bytes(w, &v, sizeof v); }
void wr_text(struct wr *w, const char *p, size_t n) {
    wr_u32(w, (uint32_t)n);
    wr_bytes(w, p, n);
    wr_u8(w, 0);
}

/* FNV-1a: tells orders apart that one caller made by mistake; nobody gains from a collision with an order of his own. */
uint64_t digest(const uint8_t *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3;
    return h;
}

bool parse_header(const uint8_t *p, struct header *h) {
    struct rd r = {p, p + HEADER, false};
    h->length = rd_u32(&r);
    h->type = rd_u16(&r);
    h->zero = rd_u16(&r);
    h->request = rd_u32(&r);
    return h->length <= MAX_FRAME && h->type >= F_HELLO && h->type <= F_LISTEN && h->zero == 0;
}

bool parse_start(const uint8_t *body, size_t n, struct start *s, const char **field) {
    struct rd r = {body, body + n, false};
    *field = "start";
    s->op = rd_bytes(&r, 16);
    s->flags = rd_u32(&r);
    s->timeout_ms = rd_u32(&r);
    s->head = rd_u32(&r);
    s->tail = rd_u32(&r);
    s->rows = rd_u16(&r);
    s->cols = rd_u16(&r);
    s->user = rd_text(&r);
    s->cwd = rd_text(&r);
    s->argc = rd_u32(&r);
    s->envc = rd_u32(&r);
    if (r.bad) return false;
    *field = "argv";
    /* Each text takes five bytes at least, so the counts are bounded by the frame itself. */
    if (s->argc == 0 || s->argc > n / 5 || s->envc > n / 5) return false;
    s->strings = r.p;
    for (uint32_t i = 0; i < s->argc; i++) {
        struct text t = rd_text(&r);
        if (i == 0 && t.n == 0) return false;
    }
    if (r.bad) return false;
    *field = "env";
    for (uint32_t i = 0; i < s->envc; i++) {
        struct text t = rd_text(&r);
        const char *eq = r.bad ? NULL : memchr(t.p, '=', t.n);
        if (!eq || eq == t.p) return false;
    }
    s->strings_end = r.p;
    if (r.bad || r.p != r.end) return false;
    *field = "head";
    if (s->head > MAX_CAPTURE) return false;
    *field = "tail";
    return s->tail <= MAX_CAPTURE;
}

bool parse_output(const uint8_t *body, size_t n, struct output *o) {
    struct rd r = {body, body + n, false};
    o->op = rd_bytes(&r, 16);
    for (int i = 0; i < 2; i++) o->offset[i] = rd_u64(&r);
    for (int i = 0; i < 2; i++) o->credit[i] = rd_u64(&r);
    o->view = !r.bad && r.p < r.end && rd_u8(&r); /* may be left out */
    return !r.bad && r.p == r.end;
}

bool parse_input(const uint8_t *body, size_t n, struct input *in) {
    struct rd r = {body, body + n, false};
    in->op = rd_bytes(&r, 16);
    in->offset = rd_u64(&r);
    uint8_t eof = rd_u8(&r);
    in->eof = eof != 0;
    in->data = r.p;
    in->n = r.bad ? 0 : (size_t)(r.end - r.p);
    return !r.bad && eof <= 1 && in->n <= MAX_DATA && in->offset <= UINT64_MAX - in->n;
}

static bool needs_target(int verb) { return verb == V_RENAME || verb == V_CHOWN || verb == V_SYMLINK || verb == V_LINK; }

bool parse_file(const uint8_t *body, size_t n, struct file *f, const char **field) {
    struct rd r = {body, body + n, false};
    *field = "verb";
    f->verb = rd_u8(&r);
    f->flags = rd_u8(&r);
    rd_u16(&r);
    f->mode = rd_u32(&r);
    f->offset = rd_u64(&r);
    f->length = rd_u32(&r);
    if (r.bad || f->verb < V_READ || f->verb > V_TOUCH) return false;
    *field = "path";
    f->path = rd_text(&r);
    if (r.bad || f->path.n == 0 || f->path.n >= 4096) return false;
    *field = "target";
    f->target = rd_text(&r);
    if (r.bad || f->target.n >= 4096 || (needs_target(f->verb) && f->target.n == 0)) return false;
    *field = "user";
    f->user = rd_text(&r);
    if (r.bad || f->user.n >= 128) return false;
    *field = "data";
    f->data = r.p;
    f->n = (size_t)(r.end - r.p);
    if (f->n > MAX_DATA || (f->n && f->verb != V_WRITE)) return false;
    *field = "offset";
    if (f->offset > INT64_MAX - MAX_DATA) return false;
    *field = "length";
    return f->length <= MAX_DATA;
}

/* The port of `SERVICE tcp PORT`; 0: it is something else, -1: it is no port. */
int service_port(const struct start *s, const char *service) {
    struct rd r = {s->strings, s->strings_end, false};
    if (strcmp(rd_text(&r).p, service) || s->argc < 2 || strcmp(rd_text(&r).p, "tcp")) return 0;
    struct text t = s->argc == 3 ? rd_text(&r) : (struct text){"", 0};
    int port = 0;
    for (uint32_t i = 0; i < t.n; i++) {
        if (t.p[i] < '0' || t.p[i] > '9' || port > 65535) return -1;
        port = port * 10 + (t.p[i] - '0');
    }
    return port >= 1 && port <= 65535 ? port : -1;
}
