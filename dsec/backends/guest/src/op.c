/* The table of operations. An operation is one command under one supervisor (chronus.c), known by an id that the caller
 * chose; it stays in the table for a while after its end, so that a restarted Edge can ask before it runs anything again. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static struct op *ops; /* newest first */
static int running_n, finished_n;
static bool retention_due;

struct op *op_find(const uint8_t *id) {
    for (struct op *op = ops; op; op = op->next)
        if (!memcmp(op->id, id, 16)) return op;
    return NULL;
}
struct op *door_of(const struct op *guest) {
    for (struct op *op = ops; op; op = op->next)
        if (op->flags & S_DOOR && op->running && !memcmp(op->id, guest->id, 8)) return op;
    return NULL;
}
void op_drop(struct op *op) {
    free(op->out[0]), free(op->out[1]), free(op->session);
    free(op);
}
struct op *op_of_reader(uint32_t serial, uint32_t request, struct reader **reader) {
    for (struct op *op = ops; op; op = op->next)
        for (int i = -1; i < MAX_VIEWERS; i++) {
            *reader = i < 0 ? &op->reader : &op->viewer[i];
            if ((*reader)->serial == serial && (*reader)->request == request) return op;
        }
    return NULL;
}
struct op *op_of_supervisor(struct watch *w) { return (struct op *)((char *)w - offsetof(struct op, sup)); }

static void put_status(struct wr *w, const struct op *op) {
    bool signalled = !op->running && WIFSIGNALED(op->wstatus);
    wr_bytes(w, op->id, 16);
    wr_u8(w, op->running ? 0 : 1);
    wr_u8(w, (op->timed_out ? 1 : 0) | (signalled ? 4 : 0) | (op->session ? 8 : 0) | (op->flags & S_TTY ? 16 : 0) | (op->flags & S_RUN ? 32 : 0));
    wr_u16(w, 0);
    wr_u32(w, (uint32_t)(op->running ? -1 : signalled ? WTERMSIG(op->wstatus) : WEXITSTATUS(op->wstatus)));
    wr_u32(w, (uint32_t)op->pid);
    wr_u64(w, (uint64_t)((op->running ? now_us() : op->ended) - op->started));
    for (int i = 0; i < 2; i++) wr_u64(w, op->out[i] ? op->out[i]->total : 0);
}

static void send_status(struct conn *c, uint32_t request, const struct op *op) {
    uint8_t body[64];
    struct wr w = {body, 0, sizeof body, false};
    put_status(&w, op);
    send_frame(c, F_STATUS, request, &(struct iovec){body, w.n}, 1);
}

static size_t head_len(const struct stream *s) {
    return s && s->head ? (s->total < s->head_cap ? (size_t)s->total : s->head_cap) : 0;
}

/* One step of giving a waiter the result. True when it is complete. The parts are one virtual string:
 * stdout head, stdout tail, stderr head, stderr tail; `cursor` is the position in it. */
static bool deliver_step(struct op *op, struct conn *c, struct waiter *w) {
    size_t part[4];
    for (int i = 0; i < 4; i++) part[i] = i % 2 ? stream_tail(op->out[i / 2]) : head_len(op->out[i / 2]);
    size_t all = part[0] + part[1] + part[2] + part[3];
    uint64_t base = 0;
    bool inline_all = w->cursor == 0 && all <= 32 << 10; /* the common case is one frame */
    uint8_t body[80];
    struct wr wr = {body, 0, sizeof body, false};
    struct iovec v[7] = {{body, 0}};
    int count = 1;
    for (int i = 0; i < 4; i++) {
        struct stream *s = op->out[i / 2];
        uint64_t from = i % 2 && s ? s->total - part[i] : 0;
        uint64_t at = w->cursor > base ? w->cursor - base : 0;
        while (at < part[i]) {
            uint64_t offset = from + at;
            struct iovec piece;
            size_t n = stream_at(s, &offset, offset + (MAX_CHUNK < part[i] - at ? MAX_CHUNK : part[i] - at), &piece);
            if (!n) break;
            if (!inline_all) {
                uint8_t head[2] = {(uint8_t)(i / 2 + 1), (uint8_t)(i % 2)};
                w->cursor = base + at + n;
                send_frame(c, F_CAPTURE, w->request, (struct iovec[]){{head, 2}, piece}, 2);
                return false;
            }
            v[count++] = piece;
            at += n;
        }
        base += part[i];
    }
    put_status(&wr, op);
    for (int i = 0; i < 4; i++) wr_u32(&wr, inline_all ? (uint32_t)part[i] : 0);
    v[0].iov_len = wr.n;
    send_frame(c, F_DONE, w->request, v, count);
    return true;
}

static void deliver(struct op *op, uint32_t only) {
    if (op->running) return;
    for (struct waiter **p = &op->waiters; *p;) {
        struct waiter *w = *p;
        struct conn *c = conn_by_serial(w->serial);
        bool done = !c;
        if (c && (!only || only == w->serial))
            while (!done && conn_idle(c) && !c->closing) done = deliver_step(op, c, w);
        if (done) {
            *p = w->next;
            free(w);
        } else p = &w->next;
    }
}

static void add_waiter(struct op *op, uint32_t serial, uint32_t request) {
    int n = 0;
    for (struct waiter *w = op->waiters; w; w = w->next) n++;
    struct waiter *w = n < 64 ? calloc(1, sizeof *w) : NULL;
    if (!w) {
        send_error(conn_by_serial(serial), request, E_BUSY, 0, "op", "too many wait for this operation");
        return;
    }
    w->serial = serial;
    w->request = request;
    w->next = op->waiters;
    op->waiters = w;
}

static void op_free(struct op *op) {
    for (struct op **p = &ops; *p; p = &(*p)->next)
        if (*p == op) {
            *p = op->next;
            break;
        }
    for (int i = -1; i < MAX_VIEWERS; i++) {
        struct reader *r = i < 0 ? &op->reader : &op->viewer[i];
        if (r->serial) send_error(conn_by_serial(r->serial), r->request, E_NOT_FOUND, 0, "op", "no longer kept");
    }
    for (struct waiter *w = op->waiters, *next; w; w = next) {
        next = w->next;
        send_error(conn_by_serial(w->serial), w->request, E_NOT_FOUND, 0, "op", "no longer kept");
        free(w);
    }
    watch_close(&op->sup);
    watch_close(&op->in);
    free(op->in_rest);
    for (int i = 0; i < 2; i++) stream_forget(op->out[i]);
    if (op->session) free(op->session->queue);
    free(op->session);
    free(op);
}

static size_t kept(const struct op *op) { return stream_kept(op->out[0]) + stream_kept(op->out[1]); }

static struct op *oldest(bool with_output, uint32_t flags) {
    struct op *found = NULL;
    for (struct op *op = ops; op; op = op->next)
        if (!op->running && (op->flags & flags) == flags && (!with_output || (kept(op) && !op->waiters && !op->reader.serial)) &&
            (!found || op->ended < found->ended))
            found = op;
    return found;
}

static void retain(void) {
    struct op *op;
    retention_due = false;
    int services = 0;
    for (op = ops; op; op = op->next) services += !op->running && op->flags & S_SERVICE;
    /* Connections come and go by the hundred: they do not displace what commands have said. */
    while (finished_n > MAX_FINISHED && (op = oldest(false, services > MAX_FINISHED / 4 ? S_SERVICE : 0))) {
        services -= op->flags & S_SERVICE ? 1 : 0;
        finished_n--;
        op_free(op);
    }
    size_t bytes = 0;
    for (op = ops; op; op = op->next) bytes += op->running ? 0 : kept(op);
    /* The result's numbers stay; only the text goes, oldest first. */
    while (bytes > KEEP_BYTES && (op = oldest(true, 0))) {
        bytes -= kept(op);
        for (int i = 0; i < 2; i++) stream_shed(op->out[i]);
    }
}

void op_finish(struct op *op) {
    if (op->session) session_over(op);
    op->running = false;
    running_n--;
    finished_n++;
    watch_close(&op->sup);
    watch_close(&op->in);
    watch_close(&op->door);
    if (op->flags & S_DOOR) op->out[0]->eof = true;
    if (op->flags & S_GUEST) door_left(op);
    if (op->in_wait.serial) send_error(conn_by_serial(op->in_wait.serial), op->in_wait.request, E_CONFLICT, 0, "op", "the operation has ended");
    op->in_wait.serial = 0;
    free(op->in_rest);
    op->in_rest = NULL;
    op->in_rest_n = op->in_rest_at = 0;
    for (int i = 0; i < 2; i++) stream_finish(op->out[i]);
    output_pump(op);
    deliver(op, 0);
    retention_due = true;
}

static void over(struct op *op, int wstatus) {
    op->wstatus = wstatus;
    op->ended = now_us();
    op->exited = true;
}

void op_exited_check(struct op *op) {
    if (op->running && !op->exited && op->flags & S_SOCKET && op->in_eof && op->out[0]->eof) over(op, 0); /* both sides said their end */
    if (!op->running || !op->exited) return;
    int64_t now = now_ms();
    bool tty = op->out[0] && op->out[0]->tty;
    for (int i = 0; i < 2 && now < op->drain_by; i++) {
        struct stream *s = op->out[i];
        if (!s || s->eof) continue;
        int waiting = 0;
        if (!ioctl(s->w.fd, FIONREAD, &waiting) && waiting > 0) return; /* a slow reader holds it: until drain_by */
        if (tty) return; /* the line discipline hands over a moment later */
    }
    op_finish(op);
}

void op_report(struct op *op) {
    struct report r;
    ssize_t n = recv(op->sup.fd, &r, sizeof r, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    struct conn *c = conn_by_serial(op->starter.serial);
    if (n == sizeof r && r.kind == R_STARTED) {
        op->pid = r.a;
        if (c) send_status(c, op->starter.request, op);
        op->starter.serial = 0;
        return;
    }
    if (n == sizeof r && r.kind == R_FAILED) {
        static const char *const fields[] = {"", "argv", "user", "cwd", "argv", "tty"};
        const char *field = r.a >= AT_FORK && r.a <= AT_TTY ? fields[r.a] : "";
        int code = r.b == ENOENT || r.b == ENOTDIR || r.b == ELIBACC ? E_NOT_FOUND : r.b == EACCES || r.b == EPERM ? E_DENIED
                 : r.b == E2BIG || r.b == ENOEXEC || r.b == EINVAL || r.b == ELOOP || r.b == ENAMETOOLONG || r.b == EISDIR ? E_INVALID
                 : r.b == EAGAIN || r.b == ENOMEM ? E_BUSY : E_SANDBOX;
        static const char *const what[] = {"", "no process could be made", "no such user", "cannot enter the directory", "cannot run the command",
                                           "no terminal could be made"};
        const char *message = r.b == ELIBACC ? "the command's interpreter or loader is missing" : what[field[0] ? r.a : 0];
        if (c) send_error(c, op->starter.request, code, r.b, field, message);
        op->reader.serial = 0;
        for (struct waiter *w = op->waiters; w; w = w->next)
            if (w->serial != op->starter.serial || w->request != op->starter.request)
                send_error(conn_by_serial(w->serial), w->request, code, r.b, field, message);
        for (struct waiter *w = op->waiters; w; w = w->next) w->serial = 0; /* all were told just now */
        running_n--;
        for (int i = 0; i < 2; i++)
            if (op->out[i]) op->out[i]->eof = true, watch_close(&op->out[i]->w);
        op_free(op); /* nothing ran: the same id may be used again */
        return;
    }
    if (n == sizeof r && r.kind == R_REMEMBERED) {
        session_remembered(op);
        return;
    }
    /* Its exit, or the supervisor was killed from inside: then its command counts as killed too. */
    over(op, n == sizeof r && r.kind == R_EXITED ? r.a : SIGKILL);
    if (c) send_status(c, op->starter.request, op);
    op->starter.serial = 0;
    watch_close(&op->sup);
    op->drain_by = now_ms() + (op->out[0] && op->out[0]->tty ? 60 : 250);
    for (int i = 0; i < 2; i++) stream_drain(op->out[i]);
    op_exited_check(op);
}

/* A record with its streams; the pipes are the caller's to give. */
struct op *op_new(struct conn *c, uint32_t request, const struct start *s) {
    if (running_n >= MAX_RUNNING) {
        send_error(c, request, E_BUSY, 0, "op", "512 operations run in this sandbox already");
        return NULL;
    }
    struct op *op = calloc(1, sizeof *op);
    bool session = s->flags & S_SESSION;
    if (op) op->session = session ? calloc(1, sizeof *op->session) : NULL;
    bool one = s->flags & (S_TTY | S_SOCKET); /* a socket's end is as a terminal's: a hang-up */
    for (int i = 0; op && i < (one ? 1 : 2); i++) op->out[i] = stream_new(-1, op, s->head, s->tail, one);
    if (!op || !op->out[0] || (!op->out[1] && !one) || (session && !op->session)) {
        if (op) op_drop(op);
        send_error(c, request, E_BUSY, ENOMEM, "op", "no process could be made");
        return NULL;
    }
    memcpy(op->id, s->op, 16);
    op->digest = s->digest;
    op->flags = s->flags;
    op->running = true;
    op->started = now_us();
    op->deadline = s->timeout_ms ? now_ms() + s->timeout_ms : 0;
    op->hold_until = s->flags & S_STREAM ? now_ms() + HOLD_MS : 0;
    op->sup = (struct watch){K_SUPERVISOR, -1, 0};
    op->in = (struct watch){session ? K_SESSION : K_STDIN, -1, 0};
    op->door = (struct watch){K_DOOR, -1, 0};
    return op;
}

void op_enlist(struct op *op, struct conn *c, uint32_t request) {
    op->next = ops;
    ops = op;
    running_n++;
    if (op->shell || op->flags & S_SOCKET) send_status(c, request, op); /* any other is answered when its exec is known to have worked */
    if (op->flags & S_NOTIFY) add_waiter(op, c->serial, request);
}

void op_again(struct op *op, struct conn *c, uint32_t request, bool notify) {
    if (notify) add_waiter(op, c->serial, request);
    send_status(c, request, op);
    deliver(op, 0);
}

void op_wait(struct conn *c, uint32_t request, const uint8_t *id) {
    struct op *op = op_find(id);
    if (!op) {
        send_error(c, request, E_NOT_FOUND, 0, "op", "no such operation");
        return;
    }
    add_waiter(op, c->serial, request);
    deliver(op, 0);
}

void op_reaped(pid_t pid) {
    for (struct op *op = ops; op; op = op->next)
        if (op->supervisor == pid) op->supervisor = 0;
}

void op_order(struct op *op, int signum, enum aim aim) {
    struct order o = {signum, aim};
    if (op->flags & S_SOCKET) { /* nobody to tell: it is ours */
        if (!signum || op->exited) return;
        over(op, signum);
        op_finish(op);
        return;
    }
    send(op->sup.fd, &o, sizeof o, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (op->supervisor) kill(op->supervisor, SIGCONT); /* root inside may have stopped it, to outlive a time-out */
    if (signum == SIGKILL && aim == TO_TREE && !op->killing) {
        op->killing = 1;
        op->kill_by = now_ms() + KILL_MS;
    }
}

struct op *op_live(struct conn *c, uint32_t request, const uint8_t *id) {
    struct op *op = op_find(id);
    if (!op) send_error(c, request, E_NOT_FOUND, 0, "op", "no such operation");
    else if (!op->running || op->exited) {
        send_error(c, request, E_CONFLICT, 0, "op", "the operation has ended");
        return NULL;
    }
    return op;
}

void op_signal(struct conn *c, uint32_t request, const uint8_t *id, int signum, bool tree) {
    if (signum < 0 || signum > 64) {
        send_error(c, request, E_INVALID, 0, "signum", "signals are 0 to 64");
        return;
    }
    struct op *op = op_live(c, request, id);
    if (!op) return;
    if (op->shell) session_signal(op, signum);
    else op_order(op, signum, tree ? TO_TREE : TO_COMMAND);
    send_ok(c, request);
}

void op_resize(struct conn *c, uint32_t request, const uint8_t *id, int rows, int cols) {
    struct op *op = op_live(c, request, id);
    if (!op) return;
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    if (!(op->flags & S_TTY)) send_error(c, request, E_INVALID, 0, "op", "the operation has no terminal");
    else if (ioctl(op->in.fd, TIOCSWINSZ, &size)) send_error(c, request, E_SANDBOX, errno, "op", "the terminal is gone");
    else send_ok(c, request);
}

void op_list(struct conn *c, uint32_t request) {
    enum { ONE = 52 };
    size_t cap = 4 + (size_t)(running_n + finished_n) * ONE;
    uint8_t *body = malloc(cap);
    if (!body) return;
    struct wr w = {body, 0, cap, false};
    wr_u32(&w, (uint32_t)(running_n + finished_n));
    for (struct op *op = ops; op; op = op->next) put_status(&w, op);
    send_frame(c, F_OPS, request, &(struct iovec){body, w.n}, 1);
    free(body);
}

static void at(int64_t when, int64_t *next) {
    if (when < *next) *next = when;
}

void op_timers(int64_t now, int64_t *next) {
    for (struct op *op = ops, *after; op; op = after) {
        after = op->next;
        if (!op->running) {
            if (now >= op->ended / 1000 + KEEP_FINISHED_MS) {
                finished_n--;
                op_free(op);
            }
            else if (op->flags & S_SERVICE && !op->reader.serial && kept(op)) { /* its stream is for nobody else */
                if (now >= op->ended / 1000 + KEEP_STREAM_MS)
                    for (int i = 0; i < 2; i++) stream_shed(op->out[i]);
                else at(op->ended / 1000 + KEEP_STREAM_MS, next);
            }
            continue; /* what is kept too long is dropped at the next wake-up: an idle agent sets no timer */
        }
        if (op->hold_until && now >= op->hold_until) {
            op->hold_until = 0;
            if (op->flags & S_SERVICE && !(op->flags & S_DOOR) && !op->reader.serial && !op->exited) op_order(op, SIGKILL, TO_TREE); /* its reader has left for good */
            if (!op->running) continue;
            for (int i = 0; i < 2; i++) stream_interest(op->out[i]);
        }
        if (op->hold_until && !op->reader.serial) at(op->hold_until, next);
        if (op->shell) {
            session_timer(op, now, next);
            continue;
        }
        if (op->in_wait.serial && now >= op->in_wait.until) op_input_late(op);
        if (op->in_wait.serial) at(op->in_wait.until, next);
        if (op->exited) {
            if (now >= op->drain_by) op_exited_check(op);
            else at(op->drain_by, next);
            continue;
        }
        if (op->killing && now >= op->kill_by) { /* something cannot die now (a disk that does not answer) */
            op->killing = 0;
            over(op, SIGKILL);
            op->drain_by = now;
            op_exited_check(op);
            continue;
        }
        if (op->killing) at(op->kill_by, next);
        else if (op->deadline && now >= op->deadline) {
            op->timed_out = true;
            op_order(op, SIGKILL, TO_TREE);
            at(op->kill_by, next);
        } else if (op->deadline) {
            at(op->deadline, next);
            at(now + 1000, next); /* looked at each second, so that a freeze is seen as a freeze */
        }
    }
    if (retention_due) retain();
}

void op_shift(int64_t by) {
    for (struct op *op = ops; op; op = op->next) {
        if (op->deadline && !(op->flags & S_WALL)) op->deadline += by;
        if (op->kill_by) op->kill_by += by;
        if (op->hold_until) op->hold_until += by;
    }
}

void op_conn_lost(uint32_t serial) {
    for (struct op *op = ops; op; op = op->next) {
        if (op->in_wait.serial == serial) op->in_wait.serial = 0;
        if (op->starter.serial == serial) op->starter.serial = 0;
        if (output_lost(op, serial)) {
            /* Its reader may come back with a cursor (a restarted Edge): hold what it was not given for a while. */
            if (op->flags & S_STREAM && op->running) op->hold_until = now_ms() + HOLD_MS;
            for (int i = 0; i < 2; i++) stream_interest(op->out[i]);
        }
        for (struct waiter **p = &op->waiters; *p;) {
            struct waiter *w = *p;
            if (w->serial != serial) {
                p = &w->next;
                continue;
            }
            *p = w->next;
            free(w);
        }
    }
}

void op_pump_conn(struct conn *c) {
    uint32_t serial = c->serial;
    for (struct op *op = ops; op && conn_idle(c) && !c->closing; op = op->next) {
        if (op->waiters) deliver(op, serial);
        if (output_pump(op))
            for (int i = 0; i < 2; i++) stream_interest(op->out[i]);
    }
}
