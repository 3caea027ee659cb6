/* Fuzz target for the frame parser. Each body ends at the edge of an unmapped page, so reading one byte too far is a crash
 * even without a sanitizer. With -DLIBFUZZER it is a plain libFuzzer target; otherwise it mutates valid frames by itself:
 *
 *   frames SECONDS SEED     run; prints the number of inputs
 *   frames -                one input from stdin (to look at a crash): first byte the parser, the rest the body */
#include "aether.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 1 << 16 };
static uint8_t *edge; /* first byte that may not be read */
static volatile uint64_t sink;

static void touch(const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) sink += ((const uint8_t *)p)[i];
}
static void touch_text(struct text t) {
    if (strlen(t.p) != t.n) abort();
    touch(t.p, (size_t)t.n + 1);
}

static void one(uint8_t which, const uint8_t *data, size_t n) {
    if (n > ROOM) n = ROOM;
    uint8_t *body = edge - n;
    memcpy(body, data, n);
    const char *field = NULL;
    switch (which % 6) {
    case 0: {
        struct start s;
        if (!parse_start(body, n, &s, &field)) break;
        touch(s.op, 16);
        touch_text(s.user);
        touch_text(s.cwd);
        struct rd r = {s.strings, s.strings_end, false};
        for (uint32_t i = 0; i < s.argc + s.envc; i++) touch_text(rd_text(&r));
        int port = service_port(&s, "dsec:connect");
        if (port < -1 || port > 65535) abort();
        if (r.bad || s.argc == 0 || s.head > MAX_CAPTURE || s.tail > MAX_CAPTURE) abort();
        break;
    }
    case 1: {
        struct output o;
        if (parse_output(body, n, &o)) touch(o.op, 16);
        break;
    }
    case 2: {
        struct input i;
        if (parse_input(body, n, &i)) touch(i.op, 16), touch(i.data, i.n);
        break;
    }
    case 3: {
        struct file f;
        if (!parse_file(body, n, &f, &field)) break;
        touch_text(f.path);
        touch_text(f.target);
        touch_text(f.user);
        touch(f.data, f.n);
        if (f.length > MAX_DATA || f.path.n >= 4096 || f.target.n >= 4096 || f.user.n >= 128) abort();
        break;
    }
    case 4: {
        struct header h;
        if (n >= HEADER && parse_header(body, &h) && h.length > MAX_FRAME) abort();
        break;
    }
    case 5: {
        struct rd r = {body, body + n, false};
        for (int i = 0; i < 64 && !r.bad; i++) sink += rd_u8(&r) + rd_u16(&r) + rd_u32(&r) + rd_u64(&r) + rd_text(&r).n;
        break;
    }
    }
}

static void set_up(void) {
    uint8_t *p = mmap(NULL, ROOM + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + ROOM, 4096, PROT_NONE)) exit(3);
    edge = p + ROOM;
}

#ifdef LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (!edge) set_up();
    if (n) one(data[0], data + 1, n - 1);
    return 0;
}
#else
static uint64_t state;
static uint32_t dice(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 20) % below : 0;
}

static size_t valid(uint8_t which, uint8_t *out) {
    struct wr w = {out, 0, ROOM, false};
    const char *words[] = {"", "/bin/sh", "A=b", "dsec:connect", "/tmp/x", "tcp", "PATH=/bin:/usr/bin", "8000"};
    if (which == 0) {
        wr_bytes(&w, "0123456789abcdef", 16);
        wr_u32(&w, dice(64));
        wr_u32(&w, dice(1000));
        wr_u32(&w, dice(MAX_CAPTURE + 2));
        wr_u32(&w, dice(MAX_CAPTURE + 2));
        wr_u32(&w, dice(1 << 20));
        wr_text(&w, "nobody", 6);
        wr_text(&w, "/", 1);
        uint32_t argc = 1 + dice(5), envc = dice(5);
        wr_u32(&w, argc);
        wr_u32(&w, envc);
        for (uint32_t i = 0; i < argc + envc; i++) {
            const char *word = i < argc ? words[1 + dice(7)] : words[dice(2) ? 2 : 6];
            wr_text(&w, word, strlen(word));
        }
    } else if (which == 3) {
        wr_u8(&w, (uint8_t)(1 + dice(12)));
        wr_u8(&w, (uint8_t)dice(8));
        wr_u16(&w, 0);
        wr_u32(&w, 0644);
        wr_u64(&w, dice(1 << 30));
        wr_u32(&w, dice(MAX_DATA));
        wr_text(&w, "/tmp/x", 6);
        wr_text(&w, "/tmp/y", 6);
        wr_text(&w, "root", 4);
        if (w.p[0] == V_WRITE) wr_bytes(&w, "data", dice(5));
    } else {
        wr_bytes(&w, "0123456789abcdef", 16);
        for (uint32_t i = 0, n = dice(6); i < n; i++) wr_u64(&w, dice(100));
        if (dice(2)) wr_u8(&w, 1);
    }
    return w.n;
}

int main(int argc, char **argv) {
    static uint8_t body[ROOM + 64];
    set_up();
    if (argc == 2 && !strcmp(argv[1], "-")) {
        ssize_t n = read(0, body, ROOM);
        if (n > 0) one(body[0], body + 1, (size_t)n - 1);
        return 0;
    }
    if (argc != 3) return 2;
    time_t end = time(NULL) + atoi(argv[1]);
    state = strtoull(argv[2], NULL, 10) * 2654435761u + 88172645463325252ull;
    uint64_t count = 0;
    for (; (count & 4095) || time(NULL) < end; count++) {
        uint8_t which = (uint8_t)dice(6);
        size_t n = valid(which, body);
        for (uint32_t i = 0, k = dice(5); i < k && n; i++) {
            uint32_t at = dice((uint32_t)n);
            switch (dice(5)) {
            case 0: body[at] = (uint8_t)dice(256); break;
            case 1: body[at] ^= (uint8_t)(1u << dice(8)); break;
            case 2: n = at; break;
            case 3: {
                static const uint32_t odd[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffffb, MAX_FRAME, MAX_FRAME - 1, ROOM};
                if (at + 4 <= n) memcpy(body + at, &odd[dice(9)], 4);
                break;
            }
            case 4: memmove(body + at, body + at + (n - at) / 2, n - at - (n - at) / 2); break;
            }
        }
        one(which, body, n);
    }
    printf("%llu inputs\n", (unsigned long long)count);
    return 0;
}
#endif
