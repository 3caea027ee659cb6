/* Workers for file operations: children that have become the user whose files they touch. Aether itself never opens a path of
 * the sandbox, so a slow disk, a FIFO or a hostile file system blocks a worker at most. */
#include "aether.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WORKERS = 8, IDLE_MS = 3000, REPLY = MAX_DATA + (16 << 10) };

static struct worker {
    struct watch w;
    pid_t pid;
    char user[128];
    uint32_t serial, request; /* serial 0: idle */
    int64_t idle_since;
} workers[WORKERS];

static uint8_t *reply; /* exists while workers do */

/* A message on the socketpair: u32 length, u16 type, then the body; sent and received whole. */
struct message { uint32_t length; uint16_t type, zero; };

static bool whole(int fd, uint8_t *p, size_t n, bool in) {
    while (n) {
        ssize_t k = in ? recv(fd, p, n, 0) : send(fd, p, n, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

static _Noreturn void worker_main(int fd, const char *user) {
    int sock = dup2(fd, 3);
    child_clean(3);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "aether-files", 0, 0, 0);
    struct cred cred;
    int lookup = user_lookup(user, &cred) ? 0 : ENOENT;
    if (!lookup) {
        workdir_make(&cred);
        lookup = cred_apply(&cred);
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* a change of user resets it */
    }
    umask(0);
    uint8_t *in = malloc(MAX_FRAME), *out = malloc(sizeof(struct message) + REPLY);
    for (struct message m; in && out && whole(sock, (uint8_t *)&m, sizeof m, true) && whole(sock, in, m.length, true);) {
        uint16_t type = F_ERROR;
        size_t n;
        if (lookup) {
            struct wr w = {out + sizeof m, 0, REPLY, false};
            wr_u16(&w, lookup == ENOENT ? E_NOT_FOUND : E_DENIED);
            wr_u32(&w, (uint32_t)lookup);
            wr_text(&w, "user", 4);
            wr_text(&w, "no such user", 12);
            n = w.n;
        } else n = file_handle(in, m.length, out + sizeof m, REPLY, &type);
        m = (struct message){(uint32_t)n, type, 0};
        memcpy(out, &m, sizeof m);
        if (!whole(sock, out, sizeof m + n, false)) break;
    }
    _exit(0);
}

static void retire(struct worker *w) {
    watch_close(&w->w); /* it reads the end and leaves */
    if (w->serial) send_error(conn_by_serial(w->serial), w->request, E_SANDBOX, EIO, "path", "the file worker was killed");
    memset(w, 0, sizeof *w);
}

static struct worker *pick(const char *user) {
    struct worker *spare = NULL;
    for (int i = 0; i < WORKERS; i++) {
        struct worker *w = &workers[i];
        if (w->pid && !w->serial && !strcmp(w->user, user)) return w;
        if (!w->pid) spare = w;
        else if (!w->serial && (!spare || (spare->pid && w->idle_since < spare->idle_since))) spare = w;
    }
    if (!spare) return NULL;
    if (spare->pid) retire(spare);
    int pair[2], room = 1 << 20;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return NULL;
    for (int i = 0; i < 2; i++) setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    pid_t pid = fork();
    if (pid == 0) worker_main(pair[1], user);
    close(pair[1]);
    if (pid < 0) {
        close(pair[0]);
        return NULL;
    }
    spare->w = (struct watch){K_WORKER, pair[0], 0};
    spare->pid = pid;
    memcpy(spare->user, user, strlen(user) + 1);
    watch_set(&spare->w, EPOLLIN);
    return spare;
}

void pool_request(struct conn *c, uint32_t request, const uint8_t *body, size_t n) {
    struct file f;
    const char *field;
    if (!parse_file(body, n, &f, &field)) {
        send_error(c, request, E_INVALID, 0, field, "malformed request");
        return;
    }
    const char *user = f.user.n ? f.user.p : default_user;
    struct worker *w = strlen(user) < sizeof w->user ? pick(user) : NULL;
    if (!w) {
        send_error(c, request, E_BUSY, EAGAIN, "path", "all file workers are busy, or no process could be made");
        return;
    }
    struct message m = {(uint32_t)n, F_FILE, 0};
    struct iovec v[2] = {{&m, sizeof m}, {(void *)body, n}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    w->serial = c->serial;
    w->request = request;
    /* An idle worker's socket is empty and larger than any request, so this is one whole write. */
    if (sendmsg(w->w.fd, &h, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)(sizeof m + n)) retire(w);
}

void pool_event(struct watch *watch) {
    struct worker *w = (struct worker *)watch;
    if (!reply && !(reply = malloc(REPLY))) {
        retire(w);
        return;
    }
    struct message m;
    /* The worker runs with the sandbox's rights and could be taken over: what it says is checked as a stranger's. A reply that is
     * not whole at once is waited for by looking again: level-triggered, and nothing is consumed until it is complete. */
    ssize_t n = w->serial ? recv(w->w.fd, &m, sizeof m, MSG_PEEK | MSG_DONTWAIT) : 0;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n != sizeof m || m.length > REPLY || (m.type != F_FILE && m.type != F_ERROR)) {
        retire(w);
        return;
    }
    int there = 0; /* a large reply comes as several buffers of the kernel's, one after the other */
    if (!ioctl(w->w.fd, FIONREAD, &there) && there < (int)(sizeof m + m.length)) return;
    struct iovec v[2] = {{&m, sizeof m}, {reply, m.length}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    n = recvmsg(w->w.fd, &h, MSG_DONTWAIT);
    if (n != (ssize_t)(sizeof m + m.length)) {
        retire(w);
        return;
    }
    struct conn *c = conn_by_serial(w->serial);
    if (c) send_frame(c, m.type, w->request, &(struct iovec){reply, m.length}, 1);
    w->serial = 0;
    w->idle_since = now_ms();
}

void pool_timers(int64_t now, int64_t *next) {
    bool any = false;
    for (int i = 0; i < WORKERS; i++) {
        struct worker *w = &workers[i];
        any |= w->pid != 0;
        if (!w->pid || w->serial) continue;
        if (now >= w->idle_since + IDLE_MS) retire(w);
        else if (w->idle_since + IDLE_MS < *next) *next = w->idle_since + IDLE_MS;
    }
    if (!any && reply) {
        free(reply);
        reply = NULL;
    }
}

void pool_conn_lost(uint32_t serial) {
    for (int i = 0; i < WORKERS; i++) {
        struct worker *w = &workers[i];
        if (!w->pid || w->serial != serial) continue;
        w->serial = 0; /* its answer has no addressee, and what it does may take long: take it away */
        kill(w->pid, SIGKILL);
        retire(w);
    }
}
