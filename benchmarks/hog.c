/* Takes all that it may have of one thing, and takes it again for ever: hog pty|fd|inotify. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

enum { MOST = 1 << 20 };
static int taken[MOST];

static int take(const char *what) {
    if (!strcmp(what, "pty")) return open("/dev/ptmx", O_RDWR | O_NOCTTY);
    if (!strcmp(what, "fd")) return open("/dev/null", O_RDONLY);
    int fd = inotify_init1(IN_CLOEXEC);
    if (fd >= 0) inotify_add_watch(fd, "/", IN_ALL_EVENTS);
    return fd;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    for (;;) {
        int n = 0;
        while (n < MOST && (taken[n] = take(argv[1])) >= 0) n++;
        if (!n) usleep(1000);
        while (n) close(taken[--n]);
    }
}
