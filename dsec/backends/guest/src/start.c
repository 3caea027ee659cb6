/* START: how an operation's descriptors are made and its supervisor is started. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

static bool make_pipe(int p[2], bool ours_reads) {
    if (pipe2(p, O_CLOEXEC)) return false;
    fcntl(p[ours_reads ? 0 : 1], F_SETFL, O_NONBLOCK);
    return true;
}

static void close_all(int *fds, int n) {
    for (int i = 0; i < n; i++)
        if (fds[i] >= 0) close(fds[i]);
}

/* Descriptors: 0/1 socket ours/theirs, 2/3 stdin ours/theirs, 4/5 stdout, 6/7 stderr. */
static bool make_channels(const struct start *s, int fd[8]) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fd)) return false;
    if (s->flags & S_TTY) {
        fd[4] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        int off = 0;
        if (fd[4] < 0 || ioctl(fd[4], TIOCSPTLCK, &off)) return false;
        fd[5] = ioctl(fd[4], TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
        struct winsize size = {.ws_row = s->rows, .ws_col = s->cols};
        ioctl(fd[4], TIOCSWINSZ, &size);
        fd[2] = fcntl(fd[4], F_DUPFD_CLOEXEC, 3);
        return fd[5] >= 0 && fd[2] >= 0;
    }
    int p[2];
    if (s->flags & S_SESSION) {
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p)) return false;
        fcntl(p[1], F_SETFL, O_NONBLOCK);
        fd[3] = p[0];
        fd[2] = p[1];
    } else if (s->flags & S_STDIN) {
        if (!make_pipe(p, false)) return false;
        if (s->flags & S_SERVICE) fcntl(p[0], F_SETPIPE_SZ, MAX_DATA);
        fd[3] = p[0];
        fd[2] = p[1];
    } else if ((fd[3] = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0) return false;
    for (int i = 0; i < 2; i++) {
        if (!make_pipe(p, true)) return false;
        if (s->flags & S_STREAM) fcntl(p[0], F_SETPIPE_SZ, MAX_DATA);
        fd[4 + 2 * i] = p[0];
        fd[5 + 2 * i] = p[1];
    }
    return true;
}

void op_start(struct conn *c, uint32_t request, const uint8_t *body, size_t n) {
    struct start s;
    const char *field;
    if (!parse_start(body, n, &s, &field)) {
        send_error(c, request, E_INVALID, 0, field, "malformed request");
        return;
    }
    s.digest = digest(body, n);
    struct op *op = op_find(s.op);
    if (op && op->digest != s.digest) {
        send_error(c, request, E_REUSED, 0, "op", "this id was used for another command");
        return;
    }
    if (op) {
        op_again(op, c, request, s.flags & S_NOTIFY);
        return;
    }
    s.flags &= S_KNOWN;
    if (s.flags & S_RUN) {
        s.flags &= S_RUN | S_BACKGROUND | S_STREAM | S_NOTIFY; /* its terminal and stdin would be the shell's */
        session_run(c, request, &s);
        return;
    }
    if (s.flags & S_SESSION && s.flags & (S_TTY | S_STDIN | S_SERVICE)) {
        send_error(c, request, E_INVALID, 0, "start", "a session has no terminal and no stdin of its own");
        return;
    }
    int fd[8] = {-1, -1, -1, -1, -1, -1, -1, -1}, port = s.flags & S_SERVICE ? service_port(&s, "dsec:connect") : 0;
    int door = s.flags & S_SERVICE ? service_port(&s, "dsec:listen") : 0;
    if (door > 0) {
        door_start(c, request, &s, door);
        return;
    }
    if (door < 0) port = door;
    if (port < 0 || (s.flags & S_SERVICE && !service_known(&s))) {
        send_error(c, request, E_INVALID, 0, "argv", port < 0 ? "not a port" : "no such service");
        return;
    }
    if (port) s.flags |= S_SOCKET | S_STDIN; /* a connection needs no process: the socket stands in for the pipes */
    op = op_new(c, request, &s);
    if (!op) return;
    pid_t pid = -1;
    if (port) {
        fd[4] = connect_loopback(port);
        fd[2] = fd[4] < 0 ? -1 : fcntl(fd[4], F_DUPFD_CLOEXEC, 3);
        if (fd[2] >= 0) pid = 0;
    } else if (make_channels(&s, fd)) {
        struct core core;
        core_keep(&core);
        pid = fork();
        core_free(&core);
        if (pid == 0) chronus_main(&s, fd[1], fd[3] < 0 ? fd[5] : fd[3], fd[5], fd[7] < 0 ? fd[5] : fd[7]);
    }
    int err = errno;
    if (pid < 0) {
        op_drop(op);
        close_all(fd, 8);
        if (port) send_error(c, request, E_SANDBOX, err, "port", "cannot connect");
        else send_error(c, request, err == EAGAIN || err == ENOMEM ? E_BUSY : E_SANDBOX, err, s.flags & S_TTY && fd[5] < 0 ? "tty" : "op",
                        "no process could be made");
        return;
    }
    for (int i = 1; i < 8; i += 2)
        if (fd[i] >= 0) close(fd[i]);
    op->supervisor = pid;
    op->sup.fd = fd[0];
    op->in.fd = fd[2];
    op->out[0]->w.fd = fd[4];
    if (op->out[1]) op->out[1]->w.fd = fd[6];
    op->starter.serial = port ? 0 : c->serial;
    op->starter.request = request;
    op_enlist(op, c, request);
    watch_set(&op->sup, EPOLLIN);
    if (op->session) watch_set(&op->in, EPOLLIN);
    for (int i = 0; i < 2; i++) stream_interest(op->out[i]);
}
