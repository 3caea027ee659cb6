/* The service `watch`: changes below a directory by inotify, as the user, as records on stdout until it is ended.
 *
 * A record is `kind TAB d|f TAB path NUL`; kinds: ready created changed attributes removed moved_from moved_to overflow. Option `r`
 * watches directories below, also those made later (what is in such a one already is told as created). */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_WATCHES = 8192, MAX_DEPTH = 100, MAX_PATH = 4096 };

struct dirent_raw { uint64_t ino; int64_t off; unsigned short reclen; unsigned char type; char name[]; };
static struct { int wd; char *path; } *seen; /* sorted by nothing: bounded, and looked up from the end */
static int seen_n, inotify = -1;
static bool recursive, full_noted;

static const char *path_of(int wd) {
    for (int i = seen_n; i-- > 0;)
        if (seen[i].wd == wd) return seen[i].path;
    return NULL;
}

static void forget(int i) {
    free(seen[i].path);
    seen[i] = seen[--seen_n];
}

static void say(const char *kind, bool dir, const char *path) {
    char line[MAX_PATH + 300];
    int n = snprintf(line, sizeof line, "%s\t%c\t%s", kind, dir ? 'd' : 'f', path);
    if (n > 0 && n < (int)sizeof line) svc_write(line, (size_t)n + 1);
}

/* `by`: an open descriptor of the directory, so that no name is resolved twice. */
static int add(int by, const char *path) {
    static const uint32_t mask = IN_CREATE | IN_CLOSE_WRITE | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_ONLYDIR;
    char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", by);
    if (seen_n == MAX_WATCHES) return errno = ENOSPC, -1;
    int wd = inotify_add_watch(inotify, name, mask);
    if (wd < 0) return -1;
    for (int i = 0; i < seen_n; i++)
        if (seen[i].wd == wd) forget(i--);
    char *copy = strdup(path);
    if (!copy) return -1;
    seen[seen_n].wd = wd;
    seen[seen_n++].path = copy;
    return 0;
}

/* Watches the directory and, where asked, those below it; with `tell`, says what is there. Takes the descriptor. */
static int add_tree(int fd, const char *path, bool tell, int depth) {
    int e = add(fd, path) ? errno : 0;
    if ((e == ENOSPC || e == ENOMEM) && depth) {
        if (!full_noted) svc_note("some directories are not watched: there are too many");
        full_noted = true;
        e = 0;
    }
    if (e || (!recursive && !tell) || depth > MAX_DEPTH) {
        close(fd);
        return e;
    }
    struct { char b[8 << 10]; } buffer;
    for (long got; (got = syscall(SYS_getdents64, fd, &buffer, sizeof buffer)) > 0;)
        for (long at = 0; at < got;) {
            struct dirent_raw *d = (struct dirent_raw *)(buffer.b + at);
            at += d->reclen;
            char below[MAX_PATH];
            if (!strcmp(d->name, ".") || !strcmp(d->name, "..")) continue;
            if (snprintf(below, sizeof below, "%s/%s", strcmp(path, "/") ? path : "", d->name) >= (int)sizeof below) continue;
            bool dir = d->type == 4;
            if (tell) say("created", dir, below);
            if (!dir || !recursive) continue;
            int child = openat(fd, d->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (child >= 0) add_tree(child, below, tell, depth + 1);
        }
    close(fd);
    return 0;
}

static void moved_away(const char *path) {
    size_t n = strlen(path);
    for (int i = 0; i < seen_n; i++)
        if (!strncmp(seen[i].path, path, n) && (!seen[i].path[n] || seen[i].path[n] == '/')) {
            inotify_rm_watch(inotify, seen[i].wd);
            forget(i--);
        }
}

/* False: nothing is left to watch. */
static bool event(int top, const struct inotify_event *e, const char *root) {
    if (e->mask & IN_Q_OVERFLOW) {
        say("overflow", true, root);
        return true;
    }
    const char *parent = path_of(e->wd);
    if (!parent) return true;
    bool dir = e->mask & IN_ISDIR;
    if (e->mask & (IN_IGNORED | IN_DELETE_SELF)) {
        if (e->mask & IN_DELETE_SELF && !strcmp(parent, root)) {
            say("removed", true, root);
            return false;
        }
        for (int i = 0; i < seen_n && e->mask & IN_IGNORED; i++)
            if (seen[i].wd == e->wd) forget(i--);
        return true;
    }
    if (!e->len) return true; /* of the directory itself: told by its parent */
    char path[MAX_PATH];
    if (snprintf(path, sizeof path, "%s/%s", strcmp(parent, "/") ? parent : "", e->name) >= (int)sizeof path) return true;
    say(e->mask & IN_CREATE       ? "created"
        : e->mask & IN_CLOSE_WRITE ? "changed"
        : e->mask & IN_ATTRIB      ? "attributes"
        : e->mask & IN_DELETE      ? "removed"
        : e->mask & IN_MOVED_FROM  ? "moved_from"
                                   : "moved_to",
        dir, path);
    if (!dir || !recursive) return true;
    if (e->mask & IN_MOVED_FROM) moved_away(path);
    if (e->mask & (IN_CREATE | IN_MOVED_TO)) {
        int fd = open_beneath(top, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
        if (fd >= 0) add_tree(fd, path, e->mask & IN_CREATE, 1);
    }
    return true;
}

int watch_main(const char *path, const char *options) {
    static char buffer[32 << 10] __attribute__((aligned(8)));
    recursive = strchr(options, 'r') != NULL;
    seen = malloc(MAX_WATCHES * sizeof *seen);
    inotify = inotify_init1(IN_CLOEXEC);
    int top = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (!seen || inotify < 0 || top < 0) return svc_fail(errno, path, errno == EMFILE ? "no more inotify instances (fs.inotify.max_user_instances)" : NULL);
    char root[MAX_PATH];
    size_t n = strnlen(path, sizeof root - 1);
    memcpy(root, path, n);
    root[n] = 0;
    while (n > 1 && root[n - 1] == '/') root[--n] = 0;
    int fd = open_beneath(top, root, O_RDONLY | O_DIRECTORY, 0);
    int e = fd < 0 ? errno : add_tree(fd, root, false, 0);
    if (e) return svc_fail(e, path, NULL);
    say("ready", true, root);
    for (;;) {
        svc_flush();
        ssize_t got = read(inotify, buffer, sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return svc_fail(errno, path, NULL);
        for (ssize_t at = 0; at < got;) {
            const struct inotify_event *next = (const struct inotify_event *)(buffer + at);
            at += (ssize_t)(sizeof *next + next->len);
            if (event(top, next, root)) continue;
            svc_flush();
            return 0;
        }
    }
}
