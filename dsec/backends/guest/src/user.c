/* Who a command runs as. Reads the sandbox's own /etc/passwd and /etc/group with bounds, in forked children only: a
 * hostile image may make these files a FIFO or gigabytes long. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_DATABASE = 1 << 20 };

/* Calls `each` with the colon-separated fields of every line until it says true. */
static bool scan(const char *path, bool (*each)(char **field, int n, void *arg), void *arg) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    if (fd < 0) return false;
    char *text = fstat(fd, &st) || !S_ISREG(st.st_mode) ? NULL : malloc(MAX_DATABASE + 1);
    size_t n = 0;
    ssize_t got;
    while (text && n < MAX_DATABASE && (got = read(fd, text + n, MAX_DATABASE - n)) > 0) n += (size_t)got;
    close(fd);
    if (!text) return false;
    text[n] = 0;
    bool found = false;
    for (char *line = text, *end; !found && line && *line; line = end) {
        end = strchr(line, '\n');
        if (end) *end++ = 0;
        char *field[8];
        int count = 0;
        for (char *p = line; p && count < 8; count++) {
            field[count] = p;
            if ((p = strchr(p, ':'))) *p++ = 0;
        }
        found = each(field, count, arg);
    }
    free(text);
    return found;
}

static bool number(const char *s, uint32_t *out) {
    uint64_t v = 0;
    if (!*s) return false;
    for (; *s; s++) {
        if (*s < '0' || *s > '9') return false;
        v = v * 10 + (uint64_t)(*s - '0');
        if (v >= UINT32_MAX) return false;
    }
    *out = (uint32_t)v;
    return true;
}

static void copy(char *to, size_t cap, const char *from) {
    size_t n = strnlen(from, cap - 1);
    memcpy(to, from, n);
    to[n] = 0;
}

struct query { const char *name; uint32_t id; bool numeric; struct cred *cred; };

static bool match_user(char **f, int n, void *arg) {
    struct query *q = arg;
    uint32_t uid, gid;
    if (n < 7 || !number(f[2], &uid) || !number(f[3], &gid)) return false;
    if (q->numeric ? uid != q->id : strcmp(f[0], q->name) != 0) return false;
    q->cred->uid = uid;
    q->cred->gid = gid;
    copy(q->cred->name, sizeof q->cred->name, f[0]);
    copy(q->cred->home, sizeof q->cred->home, f[5]);
    return true;
}

static bool match_group(char **f, int n, void *arg) {
    struct query *q = arg;
    uint32_t gid;
    if (n < 3 || strcmp(f[0], q->name) != 0 || !number(f[2], &gid)) return false;
    q->cred->gid = gid;
    return true;
}

static bool collect_groups(char **f, int n, void *arg) {
    struct cred *c = arg;
    uint32_t gid;
    if (n < 4 || !number(f[2], &gid)) return false;
    for (char *p = f[3], *end; p && *p; p = end) {
        if ((end = strchr(p, ','))) *end++ = 0;
        if (!strcmp(p, c->name) && c->groups_n < (int)(sizeof c->groups / sizeof *c->groups)) c->groups[c->groups_n++] = gid;
    }
    return false;
}

/* "", NAME, UID, and either with :GROUP or :GID. A uid without an entry is allowed, a name without one is not. */
bool user_lookup(const char *spec, struct cred *out) {
    memset(out, 0, sizeof *out);
    out->named = spec[0] != 0;
    if (!spec[0] || !strcmp(spec, "root") || !strcmp(spec, "0")) { /* the common case reads no file */
        copy(out->name, sizeof out->name, "root");
        copy(out->home, sizeof out->home, "/root");
        return true;
    }
    char text[128];
    copy(text, sizeof text, spec);
    char *group = strchr(text, ':');
    if (group) *group++ = 0;
    struct query q = {.name = text, .cred = out};
    q.numeric = number(text, &q.id);
    if (!scan("/etc/passwd", match_user, &q)) {
        if (!q.numeric) return false;
        out->uid = q.id;
        copy(out->home, sizeof out->home, "/");
    }
    if (group) {
        struct query g = {.name = group, .cred = out};
        if (!number(group, &out->gid) && !scan("/etc/group", match_group, &g)) return false;
    }
    if (out->name[0]) scan("/etc/group", collect_groups, out);
    return true;
}

/* Raw calls: the C library's would look for threads, and this also runs in a child that shares its parent's memory. */
int cred_apply(const struct cred *c) {
    if (syscall(SYS_setgroups, (size_t)c->groups_n, c->groups) && errno != EPERM) return errno;
    if (syscall(SYS_setresgid, c->gid, c->gid, c->gid)) return errno;
    if (syscall(SYS_setresuid, c->uid, c->uid, c->uid)) return errno;
    return 0;
}

/* The sandbox's workdir, made for the user who works there when the image does not have it. */
int workdir_make(const struct cred *c) {
    char path[4096];
    struct stat st;
    if (!stat(default_workdir, &st)) return 0;
    copy(path, sizeof path, default_workdir);
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        if (mkdir(path, 0755) && errno != EEXIST) return errno;
        *p = '/';
    }
    if (mkdir(path, 0755)) return errno == EEXIST ? 0 : errno;
    return lchown(path, c->uid, c->gid) ? errno : 0;
}
