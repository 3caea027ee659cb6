/* Services: operations that Aether's own code performs instead of a command, in a process that has become the user. They
 * have what commands have: an id, stdin and output with absolute offsets and credit, a signal that ends them. A service whose
 * reader stays away is ended (op.c): nobody would take what it makes. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int open_beneath(int root, const char *path, int flags, mode_t mode) {
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .mode = flags & O_CREAT ? mode : 0,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* ---- input and output, buffered; static, since a service is a process of its own */
static uint8_t in_buffer[64 << 10], out_buffer[64 << 10];
static size_t in_at, in_n, out_n;

/* Up to n bytes; 0 at the end. */
size_t svc_read(void *to, size_t n) {
    if (in_at == in_n) {
        in_at = in_n = 0;
        ssize_t got;
        do got = read(0, in_buffer, sizeof in_buffer);
        while (got < 0 && errno == EINTR);
        if (got <= 0) return 0;
        in_n = (size_t)got;
    }
    size_t k = in_n - in_at < n ? in_n - in_at : n;
    memcpy(to, in_buffer + in_at, k);
    in_at += k;
    return k;
}

bool svc_read_all(void *to, size_t n) {
    for (size_t at = 0, k; at < n; at += k)
        if (!(k = svc_read((uint8_t *)to + at, n - at))) return false;
    return true;
}

void svc_drain(void) {
    while (read(0, in_buffer, sizeof in_buffer) > 0) {}
}

static void write_out(int fd, const uint8_t *p, size_t n) {
    while (n) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) _exit(1); /* nobody reads any more */
        p += k;
        n -= (size_t)k;
    }
}

void svc_flush(void) {
    write_out(1, out_buffer, out_n);
    out_n = 0;
}

void svc_write(const void *p, size_t n) {
    if (n > sizeof out_buffer - out_n) svc_flush();
    if (n > sizeof out_buffer) {
        write_out(1, p, n);
        return;
    }
    memcpy(out_buffer + out_n, p, n);
    out_n += n;
}

/* Room for n bytes (at most the buffer's size) to be filled by the caller, then given with svc_filled: no copy of file content. */
uint8_t *svc_room(size_t *n) {
    if (out_n == sizeof out_buffer) svc_flush();
    *n = sizeof out_buffer - out_n;
    return out_buffer + out_n;
}
void svc_filled(size_t n) { out_n += n; }

/* What was written must be read before the end: what is left in a pipe then has no owner (stream.c). */
static void linger(void) {
    unsigned pause = 200;
    for (int fd = 1; fd <= 2; fd++)
        for (int left; !ioctl(fd, FIONREAD, &left) && left > 0; pause = pause < 20000 ? pause * 2 : pause) usleep(pause);
}

/* What went wrong, for the node: errno (0: the caller's data is at fault), what it was about, in words. */
int svc_fail(int error, const char *about, const char *message) {
    char line[5000];
    if (!message) message = strerror(error);
    int n = snprintf(line, sizeof line, "error\t%d\t%.*s\t%s", error, 4200, about, message);
    if (n > 0) write_out(2, (uint8_t *)line, (size_t)n + 1 < sizeof line ? (size_t)n + 1 : sizeof line);
    return 1;
}

void svc_note(const char *text) {
    char line[256];
    int n = snprintf(line, sizeof line, "note\t%s", text);
    if (n > 0 && n < (int)sizeof line) write_out(2, (uint8_t *)line, (size_t)n + 1);
}

static int run(const char *const *argv, uint32_t argc) {
    if (!strcmp(argv[0], "dsec:unpack") && argc == 3) return unpack_main(argv[1], argv[2]);
    if (!strcmp(argv[0], "dsec:pack") && argc >= 4) return pack_main(argv[1], argv[2], argv + 3, argc - 3);
    if (!strcmp(argv[0], "dsec:watch") && argc == 3) return watch_main(argv[1], argv[2]);
    if (!strcmp(argv[0], "dsec:connect") && argc == 3 && !strcmp(argv[1], "unix")) return relay_main(argv[2]);
    return svc_fail(0, argv[0], "no such service");
}

bool service_known(const struct start *s) {
    struct rd r = {s->strings, s->strings_end, false};
    return !strncmp(rd_text(&r).p, "dsec:", 5);
}

/* Becomes the user. The supervisor of a service is the service itself: any order from Aether, and Aether's end, is a SIGIO that
 * ends it. 0 or errno, with the stage. */
int service_enter(int sock, const int fds[3], const struct cred *cred, int *stage) {
    for (int i = 0; i < 3; i++)
        if (dup2(fds[i], i) < 0) return *stage = AT_FORK, errno;
    for (int i = 0; i < 3; i++) close(fds[i]);
    workdir_make(cred);
    int e = cred_apply(cred);
    if (e) return *stage = AT_USER, e;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* a change of user resets it, and this memory is Aether's */
    prctl(PR_SET_NAME, "aether-service", 0, 0, 0);
    umask(0);
    sigset_t order;
    sigemptyset(&order);
    sigaddset(&order, SIGIO);
    fcntl(sock, F_SETOWN, getpid());
    fcntl(sock, F_SETFL, O_ASYNC);
    sigprocmask(SIG_UNBLOCK, &order, NULL);
    return 0;
}

/* Its exit code. */
int service_run(const struct start *s) {
    static const char *argv[256];
    struct rd r = {s->strings, s->strings_end, false};
    if (s->argc > 256) return svc_fail(0, "argv", "too many arguments");
    for (uint32_t i = 0; i < s->argc; i++) argv[i] = rd_text(&r).p;
    int code = run(argv, s->argc);
    linger();
    return code;
}
