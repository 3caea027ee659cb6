/* Connections: who may speak, framing in both directions, bounded buffers. */
#include "aether.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static struct conn conns[MAX_CONNS];
static uint32_t last_serial;
static uint64_t highest_generation;

struct conn *conn_by_serial(uint32_t serial) {
    for (int i = 0; serial && i < MAX_CONNS; i++)
        if (conns[i].serial == serial && !conns[i].closing) return &conns[i];
    return NULL;
}

bool conn_idle(const struct conn *c) { return c->out_n == c->out_at; }

static void conn_close(struct conn *c) {
    if (!c->serial) return;
    uint32_t serial = c->serial;
    watch_close(&c->w);
    if (c->passed >= 0) close(c->passed);
    if (c->in != c->small) free(c->in);
    free(c->out);
    memset(c, 0, sizeof *c);
    op_conn_lost(serial);
    pool_conn_lost(serial);
}

void conn_accept(bool trust_any_peer) {
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    struct ucred peer;
    socklen_t size = sizeof peer;
    /* A peer outside of our pid namespace has no pid in it: the kernel says 0. Anybody else is inside the sandbox. */
    bool outside = !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.pid == 0;
    struct conn *c = NULL;
    for (int i = 0; i < MAX_CONNS && !c; i++)
        if (!conns[i].serial) c = &conns[i];
    if (!c || (!outside && !trust_any_peer)) {
        close(fd);
        return;
    }
    int room = 1 << 20;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    memset(c, 0, sizeof *c);
    if (!++last_serial) last_serial = 1;
    c->serial = last_serial;
    c->w = (struct watch){K_CONN, fd, 0};
    c->passed = -1;
    c->in = c->small;
    c->in_cap = sizeof c->small;
    c->born = now_ms();
    if (!watch_set(&c->w, EPOLLIN)) conn_close(c);
}

static void conn_interest(struct conn *c) {
    size_t unsent = c->out_n - c->out_at;
    watch_set(&c->w, (unsent ? EPOLLOUT : 0) | (unsent > OUT_PAUSE || c->closing ? 0 : EPOLLIN) | EPOLLRDHUP);
}

static bool conn_flush(struct conn *c) {
    while (c->out_at < c->out_n) {
        ssize_t n = send(c->w.fd, c->out + c->out_at, c->out_n - c->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) return errno == EAGAIN || errno == EINTR;
        c->out_at += (size_t)n;
    }
    c->out_n = c->out_at = 0;
    if (c->out_cap > 4096) { /* an idle agent is small */
        free(c->out);
        c->out = NULL;
        c->out_cap = 0;
    }
    return true;
}

static bool out_append(struct conn *c, const uint8_t *p, size_t n) {
    if (c->out_at && c->out_n + n > c->out_cap) {
        memmove(c->out, c->out + c->out_at, c->out_n - c->out_at);
        c->out_n -= c->out_at;
        c->out_at = 0;
    }
    if (c->out_n + n > c->out_cap) {
        size_t cap = c->out_cap ? c->out_cap : 4096;
        while (cap < c->out_n + n) cap *= 2;
        /* One reply of a megabyte on top of what pauses reading: more cannot be asked for. */
        uint8_t *grown = cap > 8u * MAX_FRAME ? NULL : realloc(c->out, cap);
        if (!grown) return false;
        c->out = grown;
        c->out_cap = cap;
    }
    memcpy(c->out + c->out_n, p, n);
    c->out_n += n;
    return true;
}

void send_frame(struct conn *c, uint16_t type, uint32_t request, const struct iovec *parts, int count) {
    if (!c || !c->serial || c->closing) return;
    struct iovec v[8];
    uint8_t head[HEADER];
    uint32_t length = 0;
    for (int i = 0; i < count; i++) length += (uint32_t)parts[i].iov_len, v[i + 1] = parts[i];
    struct wr w = {head, 0, sizeof head, false};
    wr_u32(&w, length);
    wr_u16(&w, type);
    wr_u16(&w, 0);
    wr_u32(&w, request);
    v[0] = (struct iovec){head, sizeof head};
    size_t sent = 0;
    if (conn_idle(c)) {
        struct msghdr m = {.msg_iov = v, .msg_iovlen = (size_t)count + 1};
        ssize_t n = sendmsg(c->w.fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            c->closing = true; /* closed by conn_timers: our caller may hold pointers */
            return;
        }
        sent = n > 0 ? (size_t)n : 0;
    }
    for (int i = 0; i <= count; i++) {
        size_t skip = sent < v[i].iov_len ? sent : v[i].iov_len;
        sent -= skip;
        if (skip < v[i].iov_len && !out_append(c, (uint8_t *)v[i].iov_base + skip, v[i].iov_len - skip)) c->closing = true;
    }
    if (!conn_idle(c)) conn_interest(c);
}

void send_error(struct conn *c, uint32_t request, int code, int err, const char *field, const char *message) {
    uint8_t body[512];
    struct wr w = {body, 0, sizeof body, false};
    wr_u16(&w, (uint16_t)code);
    wr_u32(&w, (uint32_t)err);
    wr_text(&w, field, strnlen(field, 64));
    wr_text(&w, message, strnlen(message, 400));
    send_frame(c, F_ERROR, request, &(struct iovec){body, w.n}, 1);
}

void send_ok(struct conn *c, uint32_t request) { send_frame(c, F_OKAY, request, NULL, 0); }

static bool hello(struct conn *c, uint32_t request, const uint8_t *body, size_t n) {
    struct rd r = {body, body + n, false};
    uint16_t proto = rd_u16(&r), proto_min = rd_u16(&r);
    rd_u32(&r);
    uint64_t generation = rd_u64(&r);
    if (r.bad || proto < PROTO_MIN || proto_min > PROTO) {
        send_error(c, request, E_UNSUPPORTED, 0, "proto", "this guest speaks protocol 1");
        return false;
    }
    if (generation < highest_generation) {
        send_error(c, request, E_STALE, 0, "generation", "a newer Edge has taken this sandbox over");
        return false;
    }
    highest_generation = generation;
    c->generation = generation;
    c->hello = true;
    for (int i = 0; i < MAX_CONNS; i++)
        if (conns[i].serial && &conns[i] != c && conns[i].hello && conns[i].generation < generation) conns[i].closing = true;
    uint8_t reply[20];
    struct wr w = {reply, 0, sizeof reply, false};
    wr_u16(&w, PROTO);
    wr_u16(&w, PROTO_MIN);
    wr_u32(&w, 0);
    wr_u64(&w, highest_generation);
    wr_u32(&w, (uint32_t)getpid());
    send_frame(c, F_HELLO, request, &(struct iovec){reply, w.n}, 1);
    return true;
}

static void stop(struct conn *c, uint32_t request) {
    send_ok(c, request);
    if (is_init) kill(-1, SIGKILL); /* in a pid namespace of its own, never otherwise */
    _exit(0);
}

/* The node calls at another socket from now on, and nobody is on the line: a checkpoint of these processes holds no end of a connection
 * of the node's. The asker's own connection ends last: once that is closed the others are. */
static void move_house(struct conn *c, uint32_t request) {
    int fd = c->passed, listening = 0;
    socklen_t size = sizeof listening;
    c->passed = -1;
    if (fd < 0 || getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) || !listening || !listen_at(fd)) {
        if (fd >= 0) close(fd);
        send_error(c, request, E_INVALID, 0, "listener", "no listening socket came along");
        return;
    }
    send_ok(c, request);
    for (int i = 0; i < MAX_CONNS; i++)
        if (conns[i].serial && &conns[i] != c) conn_close(&conns[i]);
    c->closing = true;
}

/* False: the connection broke the protocol and ends. */
static bool dispatch(struct conn *c, const struct header *h, const uint8_t *body) {
    size_t n = h->length;
    uint32_t request = h->request;
    if (!c->hello) return h->type == F_HELLO && hello(c, request, body, n);
    struct rd r = {body, body + n, false};
    const uint8_t *id;
    switch (h->type) {
    case F_START: op_start(c, request, body, n); return true;
    case F_WAIT:
        id = rd_bytes(&r, 16);
        if (!r.bad) op_wait(c, request, id);
        return !r.bad;
    case F_OUTPUT: output_attach(c, request, body, n); return true;
    case F_CREDIT: output_credit(c, request, body, n); return true;
    case F_DETACH: output_detach(c, request); return true;
    case F_INPUT: op_input(c, request, body, n); return true;
    case F_SIGNAL: {
        id = rd_bytes(&r, 16);
        uint32_t signum = rd_u32(&r);
        bool tree = rd_u8(&r) != 0;
        if (!r.bad) op_signal(c, request, id, (int)signum, tree);
        return !r.bad;
    }
    case F_RESIZE: {
        id = rd_bytes(&r, 16);
        uint16_t rows = rd_u16(&r), cols = rd_u16(&r);
        if (!r.bad) op_resize(c, request, id, rows, cols);
        return !r.bad;
    }
    case F_OPS: op_list(c, request); return true;
    case F_FILE: pool_request(c, request, body, n); return true;
    case F_STOP: stop(c, request); return true;
    case F_LISTEN: move_house(c, request); return true;
    default: return false;
    }
}

/* Bytes, and a descriptor that may come along with them: there is room for one, and the kernel closes any other. */
static ssize_t receive(struct conn *c) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec piece = {c->in + c->in_n, c->in_cap - c->in_n};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))}; /* not SPACE: its padding is room for another */
    ssize_t n = recvmsg(c->w.fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *h = n < 0 ? NULL : CMSG_FIRSTHDR(&m);
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(sizeof(int))) {
        if (c->passed >= 0) close(c->passed);
        memcpy(&c->passed, CMSG_DATA(h), sizeof(int));
    }
    return n;
}

static bool conn_read(struct conn *c) {
    if (c->in_n == c->in_cap) return false; /* cannot be: room for the frame is made below */
    ssize_t n = receive(c);
    if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
    c->in_n += (size_t)n;
    size_t at = 0;
    struct header h;
    while (c->in_n - at >= HEADER) {
        if (!parse_header(c->in + at, &h) || (!c->hello && h.length > 64)) return false;
        size_t whole = HEADER + (size_t)h.length;
        if (c->in_n - at < whole) {
            if (whole > c->in_cap) {
                uint8_t *big = malloc(whole);
                if (!big) return false;
                memcpy(big, c->in + at, c->in_n - at);
                if (c->in != c->small) free(c->in);
                c->in = big;
                c->in_cap = whole;
                c->in_n -= at;
                return true;
            }
            break;
        }
        if (!dispatch(c, &h, c->in + at + HEADER)) return false;
        if (c->closing) return false;
        at += whole;
    }
    memmove(c->in, c->in + at, c->in_n - at);
    c->in_n -= at;
    if (c->in != c->small && c->in_n < sizeof c->small) {
        memcpy(c->small, c->in, c->in_n);
        free(c->in);
        c->in = c->small;
        c->in_cap = sizeof c->small;
    }
    return true;
}

void conn_event(struct conn *c, uint32_t events) {
    bool alive = !c->closing && !(events & (EPOLLERR | EPOLLHUP));
    if (alive && events & EPOLLOUT) {
        alive = conn_flush(c);
        if (alive && conn_idle(c)) op_pump_conn(c);
    }
    if (alive && events & (EPOLLIN | EPOLLRDHUP)) alive = conn_read(c);
    if (!alive || c->closing) {
        conn_flush(c); /* the error that explains it, if it fits */
        conn_close(c);
        return;
    }
    conn_interest(c);
}

void conn_timers(int64_t now, int64_t *next) {
    for (int i = 0; i < MAX_CONNS; i++) {
        struct conn *c = &conns[i];
        if (!c->serial) continue;
        if (c->closing || (!c->hello && now >= c->born + HELLO_MS)) conn_close(c);
        else if (!c->hello && c->born + HELLO_MS < *next) *next = c->born + HELLO_MS;
    }
}
