/* Sessions: a shell that is kept, and the commands that run in it one after another.
 *
 * The shell is an operation of its own (S_SESSION) whose stdin is a socket. A run (S_RUN) is an operation too, with streams, a
 * result, a time-out and retention like any other, but without a process: its text goes into the shell, and while it is the
 * current run what the shell's pipes bring is also its own. Its end is told on that same socket, which the shell's commands
 * never hold (the text that is sent gives them /dev/null, and the shell keeps the socket close-on-exec meanwhile), with the
 * run's random id. So nothing that a command prints, reads, closes or redirects can be taken for an end. */
#include "aether.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum { SOFT_MS = 500, HARD_MS = 1500, MAX_QUEUE = 2 << 20 };

static void hex(const uint8_t *id, char *out) {
    for (int i = 0; i < 16; i++) {
        out[2 * i] = "0123456789abcdef"[id[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[id[i] & 15];
    }
    out[32] = 0;
}

static int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

static struct op *shell_by_name(struct text name) {
    uint8_t id[16];
    if (name.n != 32) return NULL;
    for (int i = 0; i < 16; i++) {
        int high = digit(name.p[2 * i]), low = digit(name.p[2 * i + 1]);
        if (high < 0 || low < 0) return NULL;
        id[i] = (uint8_t)(high << 4 | low);
    }
    struct op *op = op_find(id);
    return op && op->session ? op : NULL;
}

static void flush(struct op *shell) {
    struct session *ses = shell->session;
    while (ses->queue_at < ses->queue_n) {
        ssize_t n = send(shell->in.fd, ses->queue + ses->queue_at, ses->queue_n - ses->queue_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) ses->queue_at = ses->queue_n; /* the shell reads no more: it is ending, or became something else */
        else ses->queue_at += (size_t)n;
    }
    bool more = ses->queue_at < ses->queue_n;
    if (!more) {
        free(ses->queue);
        ses->queue = NULL;
        ses->queue_n = ses->queue_at = 0;
    }
    watch_set(&shell->in, shell->in.events & EPOLLIN ? EPOLLIN | (more ? EPOLLOUT : 0) : 0);
}

static bool say(struct op *shell, const char *p, size_t n) {
    struct session *ses = shell->session;
    if (n > MAX_QUEUE - ses->queue_n) return false;
    uint8_t *grown = realloc(ses->queue, ses->queue_n + n);
    if (!grown) return false;
    memcpy(grown + ses->queue_n, p, n);
    ses->queue = grown;
    ses->queue_n += n;
    return true;
}

/* The line that makes the shell tell that a run is over. `set -e`, `set -u` and a prompt end with the run that made them, and so
 * does what brought an interrupted bash here (libdsec/session.py). The group keeps a trace (`set -x`) of this out of the output. */
static bool say_mark(struct op *shell, const struct op *run) {
    char name[33], line[320];
    hex(run->id, name);
    int n = snprintf(line, sizeof line,
                     "{ __dsec_code=${__dsec_code:-$?}; set +eu; command trap - DEBUG; command shopt -u extdebug; command set +T; "
                     "command printf '%%s %%d\n' %s \"$__dsec_code\" >&0; unset __dsec_code; PS1=; } 2>/dev/null\n",
                     name);
    return say(shell, line, (size_t)n);
}

void session_run(struct conn *c, uint32_t request, const struct start *s) {
    struct op *shell = shell_by_name(s->cwd);
    if (!shell) {
        send_error(c, request, E_NOT_FOUND, 0, "session", "no such session");
        return;
    }
    if (!shell->running || shell->exited || shell->killing) {
        send_error(c, request, E_CONFLICT, 0, "session", "the session has ended");
        return;
    }
    if (shell->session->run) {
        send_error(c, request, E_BUSY, 0, "session", "another command runs in this session");
        return;
    }
    struct rd r = {s->strings, s->strings_end, false};
    struct text text = rd_text(&r);
    struct op *run = op_new(c, request, s);
    if (!run) return;
    if (!say(shell, text.p, text.n) || !say_mark(shell, run)) {
        free(run->out[0]), free(run->out[1]);
        free(run);
        send_error(c, request, E_BUSY, ENOMEM, "argv", "no room for the command");
        return;
    }
    run->shell = shell;
    run->pid = shell->pid;
    shell->session->run = run;
    op_enlist(run, c, request);
    flush(shell);
}

static void finish(struct op *shell, int wstatus) {
    struct op *run = shell->session->run;
    shell->session->run = NULL;
    run->shell = NULL;
    run->wstatus = wstatus;
    run->ended = now_us();
    run->exited = true;
    for (int i = 0; i < 2; i++)
        if (run->out[i]) run->out[i]->eof = true;
    op_finish(run);
    for (int i = 0; i < 2; i++) stream_interest(shell->out[i]); /* no reader of the run holds the shell back any more */
}

void session_tap(struct stream *s, size_t n) {
    struct op *run = s->op->session->run;
    if (!run) return;
    int i = s->op->out[1] == s;
    uint64_t at = s->total - n, end = s->total;
    if (run->marked && end > run->until[i]) end = run->until[i]; /* the rest is a background process's, after the run */
    while (at < end) {
        struct iovec piece;
        uint64_t from = at;
        size_t k = stream_at(s, &from, end, &piece);
        if (!k || from != at) { /* no memory: not kept */
            run->out[i]->lost = true;
            run->out[i]->total += end - at;
            break;
        }
        stream_put(run->out[i], piece.iov_base, k);
        at += k;
    }
    output_pump(run);
}

void session_check(struct op *shell) {
    struct op *run = shell->session->run;
    if (!run || !run->marked || !run->remembered) return;
    for (int i = 0; i < 2; i++) {
        struct stream *s = shell->out[i];
        if (!s->eof && s->total < run->until[i]) return;
    }
    finish(shell, run->wstatus);
}

void session_remembered(struct op *shell) {
    struct op *run = shell->session->run;
    if (!run || !run->marked) return;
    run->remembered = true;
    session_check(shell);
}

static void marked(struct op *shell) {
    struct session *ses = shell->session;
    struct op *run = ses->run;
    char name[33];
    if (!run || run->marked || ses->line_n < 34 || ses->line[32] != ' ') return; /* a repeat, or nothing of ours */
    hex(run->id, name);
    if (memcmp(ses->line, name, 32)) return;
    ses->line[ses->line_n] = 0;
    run->wstatus = (atoi(ses->line + 33) & 0xff) << 8;
    run->marked = true;
    for (int i = 0; i < 2; i++) { /* what was written before the mark is in the pipes by now */
        int waiting = 0;
        if (!shell->out[i]->eof) ioctl(shell->out[i]->w.fd, FIONREAD, &waiting);
        run->until[i] = shell->out[i]->total + (uint64_t)waiting;
    }
    if (run->killing) { /* interrupted for good: nothing of it stays, in the background neither */
        op_order(shell, SIGKILL, TO_RUN);
        run->killing = 2;
        run->kill_by = now_ms() + HARD_MS;
    }
    op_order(shell, 0, TO_MEMORY);
    for (int i = 0; i < 2; i++) stream_drain(shell->out[i]);
    session_check(shell);
}

void session_event(struct op *shell, uint32_t events) {
    struct session *ses = shell->session;
    char text[256];
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t n = recv(shell->in.fd, text, sizeof text, MSG_DONTWAIT);
        if (!n || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            watch_set(&shell->in, 0); /* its stdin is closed: the supervisor tells when it ends */
            return;
        }
        for (ssize_t i = 0; i < n; i++) {
            if (text[i] != '\n') {
                if (ses->line_n < sizeof ses->line - 1) ses->line[ses->line_n++] = text[i];
                continue;
            }
            marked(shell);
            ses->line_n = 0;
        }
    }
    flush(shell);
}

/* SIGINT goes to the shell's group, as from a terminal: the shell gives the command up and goes on. Any other signal is for
 * what the command has started. An interrupted shell may have thrown away the lines that it had read: the mark is said again. */
void session_signal(struct op *run, int signum) {
    struct op *shell = run->shell;
    op_order(shell, signum, signum == SIGINT ? TO_GROUP : TO_RUN);
    if (signum != SIGINT && signum != SIGKILL) return;
    say_mark(shell, run);
    flush(shell);
    if (signum == SIGKILL && run->killing < 2) {
        run->killing = 2;
        run->kill_by = now_ms() + HARD_MS;
    }
}

/* A run out of time is interrupted, then what it started is killed, and only a shell that is busy itself is ended at last. */
void session_timer(struct op *run, int64_t now, int64_t *next) {
    if (run->marked && run->killing != 2) return;
    if (!run->killing && run->deadline && now >= run->deadline) {
        run->timed_out = true;
        run->killing = 1;
        run->kill_by = now + SOFT_MS;
        session_signal(run, SIGINT);
    } else if (run->killing == 1 && now >= run->kill_by) {
        session_signal(run, SIGKILL);
    } else if (run->killing == 2 && now >= run->kill_by) {
        run->killing = 3;
        op_order(run->shell, SIGKILL, TO_TREE);
    }
    int64_t when = run->killing ? run->kill_by : run->deadline ? run->deadline : INT64_MAX;
    if (run->killing < 3 && when < *next) *next = when;
    if (run->deadline && now + 1000 < *next) *next = now + 1000; /* looked at each second, so that a freeze is seen as a freeze */
}

void session_over(struct op *shell) {
    struct op *run = shell->session->run;
    if (!run) return;
    if (!run->marked) run->wstatus = shell->wstatus;
    finish(shell, run->wstatus);
}
