/* Forwarding: connections to what listens inside the sandbox, in its own network namespace. A TCP connection is made by Aether
 * (loopback only, never a name to resolve) and needs no process; one to a Unix path is a service, since paths are the user's. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int dial(int family, int port) {
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    bool six = family == AF_INET6;
    int e = connect(fd, six ? (void *)&v6 : (void *)&v4, six ? sizeof v6 : sizeof v4) ? errno : 0;
    if (e == EINPROGRESS) { /* on loopback the answer is there by now, but when the listener's queue is full: then bytes go once it
                             * is connected, and a failure is the stream's end */
        struct pollfd p = {fd, POLLOUT, 0};
        socklen_t size = sizeof e;
        e = 0;
        if (poll(&p, 1, 0) > 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &size);
    }
    if (!e) return fd;
    close(fd);
    errno = e;
    return -1;
}

int connect_loopback(int port) {
    int fd = dial(AF_INET, port);
    if (fd >= 0 || errno == EMFILE || errno == ENFILE || errno == ENOMEM) return fd;
    fd = dial(AF_INET6, port);
    if (fd < 0 && errno != EMFILE) errno = ECONNREFUSED; /* a kernel without IPv6 says other things */
    return fd;
}

int listen_loopback(int port) {
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* who is accepted has it too */
    if (!bind(fd, (void *)&v4, sizeof v4) && !listen(fd, MAX_DOOR)) return fd;
    int e = errno;
    close(fd);
    errno = e;
    return -1;
}

static void copy(int from, int to) {
    static uint8_t buffer[64 << 10];
    for (ssize_t n; (n = read(from, buffer, sizeof buffer)) > 0;)
        for (ssize_t at = 0, k; at < n; at += k)
            if ((k = write(to, buffer + at, (size_t)(n - at))) < 0) return;
}

int relay_main(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int top = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), at = open_beneath(top, path, O_PATH, 0);
    if (at < 0) return svc_fail(errno, path, NULL);
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d", at); /* a path of any length */
    int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (sock < 0 || connect(sock, (struct sockaddr *)&address, sizeof address)) return svc_fail(errno, path, NULL);
    pid_t child = fork();
    if (child < 0) return svc_fail(errno, path, NULL);
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        copy(sock, 1);
        shutdown(sock, SHUT_RD);
        _exit(0);
    }
    close(1);
    copy(0, sock);
    shutdown(sock, SHUT_WR);
    waitpid(child, NULL, 0);
    return 0;
}
