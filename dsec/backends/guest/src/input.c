/* Input of operations: bytes at absolute offsets into a pipe, a terminal or a socket, so that a repeat changes nothing. */
#include "aether.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct op *op_of_stdin(struct watch *w) { return (struct op *)((char *)w - offsetof(struct op, in)); }

static void accepted(struct conn *c, uint32_t request, uint64_t offset) {
    send_frame(c, F_ACCEPTED, request, &(struct iovec){&offset, 8}, 1);
}

/* Answered once the pipe takes bytes again; who waited before sends again from what it is told. */
static void wait_for_room(struct op *op, struct conn *c, uint32_t request) {
    if (op->in_wait.serial) accepted(conn_by_serial(op->in_wait.serial), op->in_wait.request, op->in_offset);
    op->in_wait.serial = c->serial;
    op->in_wait.request = request;
    op->in_wait.until = now_ms() + IN_WAIT_MS;
    watch_set(&op->in, EPOLLOUT);
}

static void end(struct op *op) {
    if (op->flags & S_TTY) {
        if (write(op->in.fd, "\4", 1) < 0) { /* a full terminal queue: its reader sees the end by the hang-up */ }
        return;
    }
    op->in_eof = true;
    if (op->flags & S_SOCKET) shutdown(op->in.fd, SHUT_WR);
    watch_close(&op->in);
}

void op_input(struct conn *c, uint32_t request, const uint8_t *body, size_t n) {
    struct input in;
    if (!parse_input(body, n, &in)) {
        send_error(c, request, E_INVALID, 0, "data", "malformed request");
        return;
    }
    struct op *op = op_live(c, request, in.op);
    if (!op) return;
    if (!(op->flags & (S_STDIN | S_TTY))) {
        send_error(c, request, E_INVALID, 0, "stdin", "the operation was started without stdin");
        return;
    }
    if (in.offset > op->in_offset) { /* something before it is missing: say from where */
        accepted(c, request, op->in_offset);
        return;
    }
    for (int i = 0; i < 2; i++) stream_attend(op->out[i]);
    uint64_t skip = op->in_offset - in.offset; /* a repeat: already accepted */
    if (skip > in.n) skip = in.n;
    in.data += skip;
    in.n -= skip;
    if (in.n && op->in_eof) {
        send_error(c, request, E_CONFLICT, 0, "eof", "stdin was closed before");
        return;
    }
    size_t left = in.n;
    while (left && !op->in_rest) {
        ssize_t k = write(op->in.fd, in.data + (in.n - left), left);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && errno == EAGAIN) break;
        if (k < 0) {
            send_error(c, request, E_SANDBOX, errno, "stdin", "the command does not read its stdin any more");
            return;
        }
        left -= (size_t)k;
        op->in_offset += (uint64_t)k;
    }
    /* A service takes a piece as a whole and answers when its pipe has it, so that nothing is sent twice. */
    if (op->flags & S_SERVICE && left && !op->in_rest && (op->in_rest = malloc(left))) {
        memcpy(op->in_rest, in.data + (in.n - left), left);
        op->in_rest_n = left;
        op->in_rest_at = 0;
        op->in_offset += left;
        left = in.n = 0;
    }
    if (op->in_rest) {
        if (in.eof && !left) op->in_end = true;
        wait_for_room(op, c, request);
        return;
    }
    if (left && left == in.n) { /* the pipe is full: answer when it is not, the caller then sends again */
        wait_for_room(op, c, request);
        return;
    }
    if (!left && in.eof && !op->in_eof) end(op);
    accepted(c, request, op->in_offset);
    op_exited_check(op);
}

/* A reader that does not read is no silence of ours: the caller hears how far it is, and asks again. */
void op_input_late(struct op *op) {
    accepted(conn_by_serial(op->in_wait.serial), op->in_wait.request, op->in_offset);
    op->in_wait.serial = 0;
}

void op_input_ready(struct op *op) {
    while (op->in_rest_at < op->in_rest_n) {
        ssize_t k = write(op->in.fd, op->in_rest + op->in_rest_at, op->in_rest_n - op->in_rest_at);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && errno == EAGAIN) return;
        if (k < 0) break; /* nobody reads it any more: the next piece is told so */
        op->in_rest_at += (size_t)k;
    }
    free(op->in_rest);
    op->in_rest = NULL;
    op->in_rest_n = op->in_rest_at = 0;
    watch_set(&op->in, 0);
    if (op->in_end) end(op);
    op->in_end = false;
    accepted(conn_by_serial(op->in_wait.serial), op->in_wait.request, op->in_offset);
    op->in_wait.serial = 0;
    op_exited_check(op);
}
