/* Aether's entry: harden first, then one epoll loop until STOP.
 *
 *   aether --fd N [--upper N] [--user USER] [--workdir DIR] [--nofile N] [--fsize BYTES] [--trust-any-peer]
 *
 * N is a listening Unix stream socket inherited from outside the sandbox. Its environment is the sandbox's environment.
 * `--upper` is a descriptor that is only held, for the node to find it in /proc/<pid>/fd: the sandbox's upper directory.
 * Root inside must not get at that socket: it is close-on-exec, and the process is not dumpable, so neither pidfd_getfd nor
 * ptrace nor /proc/1/fd works without CAP_SYS_PTRACE. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int epoll_fd, listen_fd = -1;
bool is_init;
const char *default_user = "", *default_workdir = "/";
uint64_t limit_nofile, limit_fsize;

int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}
int64_t now_ms(void) { return now_us() / 1000; }

bool watch_set(struct watch *w, uint32_t events) {
    if (w->fd < 0 || w->events == events) return true;
    struct epoll_event e = {.events = events, .data.ptr = w};
    int how = !w->events ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    if (epoll_ctl(epoll_fd, how, w->fd, &e)) return false;
    w->events = events;
    return true;
}

void watch_close(struct watch *w) {
    if (w->fd < 0) return;
    watch_set(w, 0); /* a forked child may still hold the file, then close alone would not end the watch */
    close(w->fd);
    w->fd = -1;
}

static void reap(int fd) {
    struct signalfd_siginfo info[8];
    while (read(fd, info, sizeof info) > 0) {}
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;) op_reaped(pid); /* who it was is told by the sockets */
}

static struct watch listener = {.kind = K_LISTEN, .fd = -1};

bool listen_at(int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &listener};
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e)) return false; /* and the former one serves on */
    watch_close(&listener);
    listener = (struct watch){K_LISTEN, fd, EPOLLIN};
    listen_fd = fd;
    return true;
}

static int usage(void) {
    static const char text[] = "usage: aether --fd N [--upper N] [--user USER] [--workdir DIR] [--nofile N] [--fsize BYTES] [--trust-any-peer]\n";
    return write(2, text, sizeof text - 1) < 0 ? 3 : 2;
}

static void loop(struct watch *signals, bool trust_any_peer) {
    for (;;) {
        int64_t now = now_ms(), next = INT64_MAX;
        conn_timers(now, &next);
        op_timers(now, &next);
        stream_timers(now, &next);
        pool_timers(now, &next);
        int wait = next == INT64_MAX ? -1 : next <= now ? 0 : next - now > 60000 ? 60000 : (int)(next - now);
        struct epoll_event e;
        /* One event a call: an event handler may free what a later event of the same batch points to. */
        int n = epoll_wait(epoll_fd, &e, 1, wait);
        /* A wake-up far behind its time means that the sandbox was frozen: the clocks of operations stood still. */
        int64_t late = now_ms() - (now + wait);
        if (wait >= 0 && late > 1500) op_shift(late);
        if (n <= 0) continue;
        struct watch *w = e.data.ptr;
        switch (w->kind) {
        case K_LISTEN: conn_accept(trust_any_peer); break;
        case K_SIGNAL: reap(signals->fd); break;
        case K_CONN: conn_event((struct conn *)w, e.events); break;
        case K_STREAM: stream_event((struct stream *)w); break;
        case K_STDIN: op_input_ready(op_of_stdin(w)); break;
        case K_SESSION: session_event(op_of_stdin(w), e.events); break;
        case K_SUPERVISOR: op_report(op_of_supervisor(w)); break;
        case K_WORKER: pool_event(w); break;
        case K_DOOR: door_event(op_of_door(w)); break;
        }
    }
}

/* Commands inherit what is ignored here. glibc's posix_spawn leaves 32 and 33 ignored, which sigaction(3) refuses to touch. */
static void default_signals(void) {
    static const unsigned char zeros[64]; /* struct kernel_sigaction: SIG_DFL, no flags, empty mask */
    for (int signum = 1; signum <= 64; signum++) syscall(SYS_rt_sigaction, signum, zeros, NULL, 8);
}

/* We do little at a time and somebody waits for it: no waiting for the slices of those who compute (Linux 6.12; older kernels take no
 * notice). Our share of the core stays what it is, and what we start has the usual slice. */
static void be_short(void) {
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } a = {0};
    enum { RESET_ON_FORK = 1, SLICE_NS = 100000 };
    if (syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) || a.policy) return;
    a.flags |= RESET_ON_FORK;
    a.runtime = SLICE_NS;
    syscall(SYS_sched_setattr, 0, &a, 0);
}

int main(int argc, char **argv) {
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    default_signals();
    bool trust_any_peer = false;
    for (int i = 1; i < argc; i++) {
        bool value = i + 1 < argc;
        if (!strcmp(argv[i], "--fd") && value) listen_fd = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--upper") && value) fcntl(atoi(argv[++i]), F_SETFD, FD_CLOEXEC);
        else if (!strcmp(argv[i], "--user") && value) default_user = argv[++i];
        else if (!strcmp(argv[i], "--workdir") && value) default_workdir = argv[++i];
        else if (!strcmp(argv[i], "--nofile") && value) limit_nofile = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--fsize") && value) limit_fsize = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--trust-any-peer")) trust_any_peer = true;
#ifdef AETHER_NEGATIVE_CONTROL /* shows that the attacks of the test-suite do succeed without the hardening */
        else if (!strcmp(argv[i], "--dumpable")) prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
#endif
        else return usage();
    }
    int listening = 0;
    socklen_t size = sizeof listening;
    if (listen_fd < 0 || getsockopt(listen_fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) || !listening) return usage();
    if (!default_workdir[0]) default_workdir = "/";
    is_init = getpid() == 1;
    if (!is_init) prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);

    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    be_short();
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    static struct watch signals = {.kind = K_SIGNAL};
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    signals.fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (epoll_fd < 0 || signals.fd < 0 || !watch_set(&signals, EPOLLIN) || !listen_at(listen_fd)) return 4;
    loop(&signals, trust_any_peer);
}
