/* Output of operations: the first bytes and the last bytes of each stream are kept; a reader that holds the stream gets all.
 *
 * A stream's bytes have absolute offsets. [0, head_cap) lives in `head`; the last ring_cap bytes after it live in `ring`.
 * While a reader holds the stream the pipe is read only as far as the ring keeps what the reader was not given yet, so the
 * command blocks on its pipe; with no reader old ring bytes are overwritten, and a later reader sees a jump in offsets. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

static struct stream *orphans; /* pipes of forgotten operations, only drained */
static int orphans_n;
static struct stream *resting;

static uint8_t *pages(size_t n) {
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, n, MADV_DONTFORK); /* cheap forks, and no child sees another operation's output */
    return p;
}

struct stream *stream_new(int fd, struct op *op, uint32_t head, uint32_t tail, bool tty) {
    struct stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->w = (struct watch){K_STREAM, fd, 0};
    s->op = op;
    s->tty = tty;
    s->limit = UINT64_MAX;
    s->head_cap = head;
    s->tail_cap = tail;
    s->ring_cap = tail < (64 << 10) ? 64 << 10 : tail;
    if (op && op->flags & S_SERVICE) s->ring_cap = MAX_DATA;
    return s;
}

static bool held(const struct op *op) { return op && (op->reader.serial || now_ms() < op->hold_until); }

static int which(const struct stream *s) { return s->op && s->op->out[1] == s; }

/* How many bytes may be read without overwriting what a reader is still to get. */
static size_t room(const struct stream *s);
static size_t own_room(const struct stream *s) {
    uint64_t left = s->limit - s->total, most = left < MAX_DATA ? left : MAX_DATA;
    if (!held(s->op)) return (size_t)most;
    uint64_t sent = s->op->reader.serial ? s->op->reader.sent[which(s)] : s->op->delivered[which(s)];
    if (sent > s->total) sent = s->total;
    if (sent < s->head_cap) sent = s->head_cap;
    uint64_t end = sent + s->ring_cap;
    uint64_t n = end > s->total ? end - s->total : 0;
    return n > most ? (size_t)most : (size_t)n;
}
static size_t room(const struct stream *s) {
    size_t n = own_room(s), more;
    struct op *run = s->op && s->op->session ? s->op->session->run : NULL;
    if (run && run->out[which(s)] && (more = own_room(run->out[which(s)])) < n) n = more;
    return n;
}

/* A command that writes line by line wakes this process for each of them, tens of thousands of times a second. Each such wake-up
 * changes how many of the sandbox's tasks run, so the kernel weighs its group anew, and what a neighbour then waits for the
 * processor was measured as up to 0.17 s (Linux 6.18). After REST_AFTER small reads close together such a stream is left alone for
 * a millisecond or two, and then read in one go. What answers somebody (a service, a command that was just given input) is not. */
enum { REST_AFTER = 4, REST_MS = 2, SMALL = 4 << 10 };

static void rest(struct stream *s, ssize_t got) {
    int64_t now = now_ms();
    bool close = now - s->read_at <= 2 * REST_MS;
    s->read_at = now;
    if (got >= SMALL || !close || (s->op && s->op->flags & S_SERVICE)) s->small = 0;
    else if (++s->small >= REST_AFTER && !s->rest_until) {
        s->rest_until = now + REST_MS;
        s->next_resting = resting;
        resting = s;
    }
}

static void wake(struct stream *s) {
    if (!s->rest_until) return;
    for (struct stream **p = &resting; *p; p = &(*p)->next_resting)
        if (*p == s) {
            *p = s->next_resting;
            break;
        }
    s->rest_until = 0;
}

void stream_timers(int64_t now, int64_t *next) {
    for (struct stream *s = resting, *after; s; s = after) {
        after = s->next_resting;
        if (now >= s->rest_until) {
            wake(s);
            stream_interest(s);
        } else if (s->rest_until < *next) *next = s->rest_until;
    }
}

void stream_interest(struct stream *s) {
    if (s && s->op && s->op->shell) s = s->op->shell->out[which(s)]; /* a run's bytes come through its shell's pipe */
    if (!s || s->eof || s->w.fd < 0) return;
    watch_set(&s->w, !s->rest_until && room(s) ? EPOLLIN : 0);
}

/* What it says next may be an answer: it is read at once. */
void stream_attend(struct stream *s) {
    if (s && s->op && s->op->shell) s = s->op->shell->out[which(s)];
    if (!s) return;
    s->small = 0;
    wake(s);
    stream_interest(s);
}

static void stream_end(struct stream *s) {
    s->eof = true;
    wake(s);
    watch_close(&s->w);
    if (s->op) return;
    for (struct stream **p = &orphans; *p; p = &(*p)->next_orphan)
        if (*p == s) {
            *p = s->next_orphan;
            orphans_n--;
            break;
        }
    free(s);
}

/* One read into where the bytes belong. Returns bytes read, 0 at the end, -1 when there is nothing now. */
static ssize_t take_bytes(struct stream *s, size_t n) {
    static uint8_t waste[16 << 10];
    if (!s->op || s->lost) {
        ssize_t got = read(s->w.fd, waste, sizeof waste < n ? sizeof waste : n);
        if (got > 0) s->total += (uint64_t)got;
        return got < 0 && errno != EAGAIN && errno != EINTR ? 0 : got;
    }
    bool to_head = s->total < s->head_cap;
    ssize_t first = 0;
    if (!s->total) { /* most streams stay empty, and those need no pages of their own */
        first = read(s->w.fd, waste, n < sizeof waste ? n : sizeof waste);
        if (first <= 0) return first < 0 && errno != EAGAIN && errno != EINTR ? 0 : first;
    }
    if (to_head ? !s->head && !(s->head = pages(s->head_cap)) : !s->ring && !(s->ring = pages(s->ring_cap))) {
        stream_shed(s); /* no memory: the command goes on, its output is only counted */
        s->lost = true;
        s->total += (uint64_t)first;
        return first ? first : -1;
    }
    if (first) {
        size_t k = to_head ? (size_t)first < s->head_cap ? (size_t)first : s->head_cap : 0;
        if (k) memcpy(s->head, waste, k);
        if (k < (size_t)first) {
            if (!s->ring && !(s->ring = pages(s->ring_cap))) s->lost = true;
            else memcpy(s->ring, waste + k, (size_t)first - k); /* the ring holds four times what this buffer does */
        }
        s->total += (uint64_t)first;
        return first;
    }
    struct iovec v[3];
    int count = 0;
    if (s->total < s->head_cap) {
        size_t k = s->head_cap - s->total;
        v[count++] = (struct iovec){s->head + s->total, k < n ? k : n};
        n -= v[0].iov_len;
    }
    /* The ring is made when the head is full: a short read of the head must not touch it. */
    if (!count && n) {
        size_t at = (size_t)((s->total - s->head_cap) % s->ring_cap), first = s->ring_cap - at;
        if (n > s->ring_cap) n = s->ring_cap;
        v[count++] = (struct iovec){s->ring + at, first < n ? first : n};
        if (n > first) v[count++] = (struct iovec){s->ring, n - first};
    }
    ssize_t got = readv(s->w.fd, v, count);
    if (got > 0) s->total += (uint64_t)got;
    if (got < 0 && errno != EAGAIN && errno != EINTR) return 0; /* EIO: the PTY's last slave is closed */
    return got;
}

static ssize_t take(struct stream *s, size_t n) {
    ssize_t got = take_bytes(s, n);
    if (got > 0 && s->op && s->op->session) session_tap(s, (size_t)got);
    return got;
}

void stream_put(struct stream *s, const uint8_t *p, size_t n) {
    while (n) {
        bool head = s->total < s->head_cap;
        if (!s->lost && (head ? !s->head && !(s->head = pages(s->head_cap)) : !s->ring && !(s->ring = pages(s->ring_cap)))) {
            stream_shed(s);
            s->lost = true;
        }
        if (s->lost) {
            s->total += n;
            return;
        }
        size_t at = head ? (size_t)s->total : (size_t)((s->total - s->head_cap) % s->ring_cap);
        size_t k = (head ? s->head_cap : s->ring_cap) - at;
        if (k > n) k = n;
        memcpy((head ? s->head : s->ring) + at, p, k);
        s->total += k;
        p += k;
        n -= k;
    }
}

/* The operation has ended, its pipe has not: from here on a background process writes into the void, but never blocks. */
static void stream_orphan(struct stream *s) {
    struct stream *drained = stream_new(s->w.fd, NULL, 0, 0, s->tty);
    wake(s);
    watch_set(&s->w, 0);
    if (!drained) close(s->w.fd);
    s->w.fd = -1;
    s->eof = true;
    if (drained) stream_forget(drained);
}

void stream_event(struct stream *s) {
    struct op *op = s->op;
    for (int turn = 0; turn < 4; turn++) { /* then others have their turn */
        size_t n = room(s);
        if (!n) break;
        ssize_t got = take(s, n);
        if (got == 0) {
            stream_end(s); /* frees an orphan */
            if (op) {
                output_pump(op);
                if (op->session) session_check(op);
                op_exited_check(op);
            }
            return;
        }
        if (got > 0) rest(s, got);
        if (s->total >= s->limit) stream_orphan(s);
        if (op) output_pump(op);
        if (s->eof || got < (ssize_t)(n < 4096 ? n : 4096)) break;
    }
    stream_interest(s);
    if (op && op->session) session_check(op);
    if (op) op_exited_check(op);
}

/* What is in the pipe now still belongs to the result; nothing that comes later does. */
void stream_finish(struct stream *s) {
    int waiting = 0;
    if (!s || s->eof) return;
    if (s->tty) {
        stream_end(s); /* as a terminal that is closed: what still holds it gets a hang-up */
        return;
    }
    ioctl(s->w.fd, FIONREAD, &waiting);
    s->limit = s->total + (uint64_t)waiting;
    if (!waiting || !s->op->reader.serial) stream_orphan(s);
}

/* After the main process has ended: what it wrote is in the pipe already, so reading until there is nothing takes it all. */
void stream_drain(struct stream *s) {
    if (!s || s->eof) return;
    for (;;) {
        size_t n = room(s);
        if (!n) break;
        ssize_t got = take(s, n);
        if (got == 0) {
            stream_end(s);
            return;
        }
        if (got < 0) break;
        if (s->op) output_pump(s->op);
    }
    stream_interest(s);
}

size_t stream_tail(const struct stream *s) {
    if (!s || !s->ring || s->total <= s->head_cap) return 0;
    uint64_t n = s->total - s->head_cap;
    return n < s->tail_cap ? (size_t)n : s->tail_cap;
}

size_t stream_kept(const struct stream *s) {
    if (!s) return 0;
    size_t n = s->head ? (s->total < s->head_cap ? (size_t)s->total : s->head_cap) : 0;
    uint64_t ring = s->ring ? s->total - s->head_cap : 0;
    return n + (ring < s->ring_cap ? (size_t)ring : s->ring_cap);
}

/* The contiguous piece at *offset that ends by `end`; *offset jumps over what is gone. 0: nothing there. */
size_t stream_at(const struct stream *s, uint64_t *offset, uint64_t end, struct iovec *out) {
    if (end > s->total) end = s->total;
    uint64_t head = s->head ? (s->total < s->head_cap ? s->total : s->head_cap) : 0;
    if (*offset < head) {
        uint64_t stop = end < head ? end : head;
        if (stop <= *offset) return 0;
        *out = (struct iovec){s->head + *offset, (size_t)(stop - *offset)};
        return out->iov_len;
    }
    uint64_t in_ring = s->ring ? s->total - s->head_cap : 0;
    uint64_t first = s->total - (in_ring < s->ring_cap ? in_ring : s->ring_cap);
    if (*offset < first) *offset = first;
    if (*offset >= end) return 0;
    size_t at = (size_t)((*offset - s->head_cap) % s->ring_cap);
    uint64_t n = end - *offset;
    if (n > s->ring_cap - at) n = s->ring_cap - at;
    *out = (struct iovec){s->ring + at, (size_t)n};
    return out->iov_len;
}

void stream_shed(struct stream *s) {
    if (!s) return;
    if (s->head) munmap(s->head, s->head_cap);
    if (s->ring) munmap(s->ring, s->ring_cap);
    s->head = s->ring = NULL;
    s->head_cap = 0; /* nothing is kept any more: offsets below total are a gap */
}

/* The operation is dropped from the table. A background process may still write: keep reading, keep nothing. */
void stream_forget(struct stream *s) {
    if (!s) return;
    stream_shed(s);
    s->op = NULL;
    if (s->eof || s->tty || orphans_n >= MAX_ORPHAN_PIPES) {
        wake(s);
        watch_close(&s->w);
        free(s);
        return;
    }
    s->next_orphan = orphans;
    orphans = s;
    orphans_n++;
    stream_interest(s);
}

static bool finished(const struct op *op, int i) {
    const struct stream *s = op->out[i];
    return !s || s->eof;
}

/* Give one reader what it may get. True while it might get more as soon as its connection has room. */
static bool pump_one(struct op *op, struct reader *to) {
    struct conn *c = conn_by_serial(to->serial);
    if (!c) return false;
    for (int i = 0; i < 2; i++) {
        struct stream *s = op->out[i];
        if (!s) continue;
        bool moved = false;
        while (conn_idle(c) && !c->closing) {
            uint64_t at = to->sent[i], end = at + MAX_CHUNK;
            if (end > to->credit[i]) end = to->credit[i];
            struct iovec piece;
            size_t n = at < end ? stream_at(s, &at, end, &piece) : 0;
            if (!n && at > to->sent[i]) { /* the bytes there are gone: go on behind the gap */
                to->sent[i] = at;
                moved = true;
                if (at < to->credit[i]) continue;
                piece = (struct iovec){NULL, 0}; /* an empty chunk says where that is, so that credit can follow */
            } else if (!n) break;
            uint8_t head[16] = {(uint8_t)(i + 1)};
            memcpy(head + 8, &at, 8);
            to->sent[i] = at + piece.iov_len;
            if (to == &op->reader) op->delivered[i] = to->sent[i];
            send_frame(c, F_CHUNK, to->request, (struct iovec[]){{head, sizeof head}, piece}, 2);
            moved = true;
        }
        if (moved && to == &op->reader) stream_interest(s);
    }
    for (int i = 0; i < 2; i++)
        if (!finished(op, i) || (op->out[i] && to->sent[i] < op->out[i]->total)) return true;
    uint64_t totals[2] = {op->out[0] ? op->out[0]->total : 0, op->out[1] ? op->out[1]->total : 0};
    send_frame(c, F_END, to->request, &(struct iovec){totals, sizeof totals}, 1);
    to->serial = 0;
    if (to == &op->reader && op->flags & S_SERVICE && op->running) op->hold_until = now_ms() + HALF_CLOSED_MS;
    return false;
}

bool output_pump(struct op *op) {
    bool more = op->reader.serial && pump_one(op, &op->reader);
    for (int i = 0; i < MAX_VIEWERS; i++)
        if (op->viewer[i].serial && pump_one(op, &op->viewer[i])) more = true;
    return more;
}

static struct reader *free_seat(struct op *op) {
    for (int i = 0; i < MAX_VIEWERS; i++)
        if (!conn_by_serial(op->viewer[i].serial)) return &op->viewer[i];
    return NULL;
}

void output_attach(struct conn *c, uint32_t request, const uint8_t *body, size_t n) {
    struct output o;
    if (!parse_output(body, n, &o)) {
        send_error(c, request, E_INVALID, 0, "output", "malformed request");
        return;
    }
    struct op *op = op_find(o.op);
    if (!op) {
        send_error(c, request, E_NOT_FOUND, 0, "op", "no such operation");
        return;
    }
    for (int i = 0; i < 2; i++)
        if (o.offset[i] > (op->out[i] ? op->out[i]->total : 0)) {
            send_error(c, request, E_INVALID, 0, "offsets", "beyond what was written so far");
            return;
        }
    struct reader *seat = o.view ? free_seat(op) : &op->reader;
    if (!seat) {
        send_error(c, request, E_BUSY, 0, "op", "seven look on already");
        return;
    }
    struct conn *old = o.view ? NULL : conn_by_serial(op->reader.serial);
    if (old) { /* the newest holds the streams; the one before looks on from where it was */
        struct reader *next = free_seat(op);
        if (next) *next = op->reader;
        else send_error(old, op->reader.request, E_CONFLICT, 0, "op", "another reader took the stream over");
    }
    seat->serial = c->serial;
    seat->request = request;
    for (int i = 0; i < 2; i++) {
        seat->sent[i] = o.offset[i];
        if (!o.view) op->delivered[i] = o.offset[i];
        seat->credit[i] = o.credit[i];
    }
    output_pump(op);
    for (int i = 0; i < 2; i++) stream_interest(op->out[i]);
}

void output_credit(struct conn *c, uint32_t request, const uint8_t *body, size_t n) {
    struct reader *reader;
    struct op *op = op_of_reader(c->serial, request, &reader);
    struct rd r = {body, body + n, false};
    for (int i = 0; i < 2 && op; i++) {
        uint64_t credit = rd_u64(&r);
        if (!r.bad && credit > reader->credit[i]) reader->credit[i] = credit;
    }
    if (op) output_pump(op);
}

void output_detach(struct conn *c, uint32_t request) {
    struct reader *reader;
    struct op *op = op_of_reader(c->serial, request, &reader);
    if (!op) return;
    reader->serial = 0;
    if (reader != &op->reader) return;
    /* Closed on purpose: nothing is held for a successor. A service does without a reader for a moment only. */
    op->hold_until = op->flags & S_SERVICE && op->running ? now_ms() + HOLD_MS : 0;
    for (int i = 0; i < 2; i++) stream_interest(op->out[i]);
}

bool output_lost(struct op *op, uint32_t serial) {
    for (int i = 0; i < MAX_VIEWERS; i++)
        if (op->viewer[i].serial == serial) op->viewer[i].serial = 0;
    if (op->reader.serial != serial) return false;
    op->reader.serial = 0;
    return true;
}
