/* File operations of the sandbox's own file system, in a worker process that has become the user. Every path is resolved by
 * openat2 inside the root, so no link leads out, and magic links (/proc/N/root, fd) are refused. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct dirent_raw { uint64_t ino; int64_t off; unsigned short reclen; unsigned char type; char name[]; };

static int open_in_root(const char *path, int flags, mode_t mode) {
    char full[8200];
    if (path[0] != '/') {
        snprintf(full, sizeof full, "%s/%s", default_workdir, path);
        path = full;
    }
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .mode = flags & O_CREAT ? mode : 0,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    int root = open("/", O_PATH | O_CLOEXEC | O_DIRECTORY);
    int fd = (int)syscall(SYS_openat2, root, path, &how, sizeof how);
    int e = errno;
    close(root);
    errno = e;
    return fd;
}

/* The directory that holds the last component, and that component. */
static int open_parent(const char *path, char *name, size_t cap) {
    char dir[8200];
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t slash = n;
    while (slash && path[slash - 1] != '/') slash--;
    if (n - slash == 0 || n - slash >= cap || n - slash > 255) {
        errno = n - slash ? ENAMETOOLONG : EBUSY;
        return -1;
    }
    memcpy(name, path + slash, n - slash);
    name[n - slash] = 0;
    if (!strcmp(name, ".") || !strcmp(name, "..")) {
        errno = EINVAL;
        return -1;
    }
    memcpy(dir, path, slash);
    dir[slash] = 0;
    return open_in_root(slash ? dir : ".", O_PATH | O_DIRECTORY, 0);
}

static const char *kind_of(mode_t m) {
    return S_ISREG(m) ? "f" : S_ISDIR(m) ? "d" : S_ISLNK(m) ? "l" : S_ISFIFO(m) ? "p" : S_ISSOCK(m) ? "s" : S_ISCHR(m) ? "c" : "b";
}

static bool put_stat(struct wr *w, int dir, const char *name, const char *shown) {
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH)) return false;
    char target[4096];
    ssize_t n = S_ISLNK(st.st_mode) ? readlinkat(dir, name, target, sizeof target) : 0;
    wr_bytes(w, kind_of(st.st_mode), 1);
    wr_u32(w, st.st_mode & 07777);
    wr_u32(w, st.st_uid);
    wr_u32(w, st.st_gid);
    wr_u64(w, (uint64_t)st.st_size);
    wr_u64(w, (uint64_t)(st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec));
    wr_text(w, shown, strlen(shown));
    wr_text(w, target, n > 0 ? (size_t)n : 0);
    return true;
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

struct result { uint8_t flags; uint32_t written, stats; };
enum { RF_EOF = 1 };

/* The reply's fixed part is 9 bytes: flags, written, stats; then the stats, then the data. */
static int do_read(const struct file *f, struct wr *w, struct result *r) {
    int fd = open_in_root(f->path.p, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    struct stat st;
    if (fd < 0) return errno;
    int e = fstat(fd, &st) ? errno : S_ISREG(st.st_mode) ? 0 : S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
    if (e) {
        close(fd);
        return e;
    }
    put_stat(w, fd, "", base_name(f->path.p));
    r->stats = 1;
    size_t n = 0;
    while (n < f->length && w->n < w->cap) {
        ssize_t got = pread(fd, w->p + w->n, f->length - n < w->cap - w->n ? f->length - n : w->cap - w->n, (off_t)(f->offset + n));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            e = errno;
            close(fd);
            return e;
        }
        if (got == 0) break;
        n += (size_t)got;
        w->n += (size_t)got;
    }
    if (n < f->length || (st.st_size && f->offset + n >= (uint64_t)st.st_size)) r->flags |= RF_EOF;
    close(fd);
    return 0;
}

static int do_write(const struct file *f, struct wr *w, struct result *r) {
    int flags = O_WRONLY | O_NONBLOCK | O_NOCTTY | (f->flags & FF_CREATE ? O_CREAT : 0);
    int fd = open_in_root(f->path.p, flags, f->mode & 07777);
    struct stat st;
    (void)w;
    if (fd < 0) return errno;
    int e = fstat(fd, &st) ? errno : !S_ISREG(st.st_mode) ? EINVAL : 0;
    if (!e && f->flags & FF_TRUNCATE && ftruncate(fd, 0)) e = errno;
    while (!e && r->written < f->n) {
        ssize_t n = pwrite(fd, f->data + r->written, f->n - r->written, (off_t)(f->offset + r->written));
        if (n < 0 && errno != EINTR) e = errno;
        if (n > 0) r->written += (uint32_t)n;
    }
    if (close(fd) && !e) e = errno; /* some file systems tell a full disk only here */
    return e;
}

static int do_stat(const struct file *f, struct wr *w, struct result *r) {
    int fd = open_in_root(f->path.p, O_PATH | O_NOFOLLOW, 0);
    if (fd < 0) return errno;
    int e = put_stat(w, fd, "", base_name(f->path.p)) ? 0 : errno;
    close(fd);
    r->stats = !e;
    return e;
}

static int do_list(const struct file *f, struct wr *w, struct result *r) {
    int fd = open_in_root(f->path.p, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return errno;
    char buffer[16 << 10];
    uint64_t seen = 0;
    for (;;) {
        long n = syscall(SYS_getdents64, fd, buffer, sizeof buffer);
        if (n < 0) {
            int e = errno;
            close(fd);
            return e;
        }
        if (n == 0) break;
        for (long at = 0; at < n;) {
            struct dirent_raw *d = (struct dirent_raw *)(buffer + at);
            at += d->reclen;
            if (!strcmp(d->name, ".") || !strcmp(d->name, "..") || seen++ < f->offset) continue;
            size_t mark = w->n;
            if (r->stats >= f->length) goto more;
            if (!put_stat(w, fd, d->name, d->name)) { /* it went away between the two looks: an entry all the same, so that the cursor holds */
                wr_bytes(w, "?", 1);
                for (int i = 0; i < 3; i++) wr_u32(w, 0);
                wr_u64(w, 0);
                wr_u64(w, 0);
                wr_text(w, d->name, strlen(d->name));
                wr_text(w, "", 0);
            }
            if (w->full) {
                w->n = mark;
                w->full = false;
                goto more;
            }
            r->stats++;
        }
    }
    r->flags |= RF_EOF;
more:
    close(fd);
    return 0;
}

static int do_mkdir(const struct file *f) {
    char path[4100], name[256];
    mode_t mode = f->mode & 07777;
    if (f->flags & FF_CREATE) { /* parents too; one that exists is fine */
        memcpy(path, f->path.p, f->path.n + 1);
        for (char *p = path + 1; *p; p++) {
            if (*p != '/') continue;
            *p = 0;
            int dir = open_parent(path, name, sizeof name);
            if (dir >= 0) {
                mkdirat(dir, name, 0755); /* what matters is told by the last one */
                close(dir);
            }
            *p = '/';
        }
    }
    int dir = open_parent(f->path.p, name, sizeof name);
    if (dir < 0) return errno;
    int e = mkdirat(dir, name, mode) ? errno : 0;
    close(dir);
    if (e == EEXIST && f->flags & FF_CREATE) {
        int fd = open_in_root(f->path.p, O_PATH | O_DIRECTORY, 0);
        if (fd >= 0) e = 0, close(fd);
    }
    return e;
}

enum { DEEP = 200, DEEPEST = 1 << 16 };
struct place { dev_t dev; ino_t ino; };

/* Removes what can be removed of one name; ENOTEMPTY means a directory that holds something. */
static int remove_one(int dir, const char *name) {
    if (!unlinkat(dir, name, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return errno == ENOENT ? 0 : errno;
    if (!unlinkat(dir, name, AT_REMOVEDIR) || errno == ENOENT) return 0;
    return errno == EEXIST ? ENOTEMPTY : errno;
}

/* What is mounted somewhere below is not part of the tree: EBUSY, as rmdir would say of it. */
static int open_to_empty(int dir, const char *name) {
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, .resolve = RESOLVE_NO_XDEV};
    int fd = (int)syscall(SYS_openat2, dir, name, &how, sizeof how);
    if (fd < 0 && errno == EXDEV) errno = EBUSY;
    return fd;
}

/* Empties a tree of any depth with two descriptors: down by name, up by "..", which must be the directory that it was. `fd` is ours. */
static int empty_deep(int fd) {
    struct place *up = malloc(64 * sizeof *up);
    size_t depth = 0, cap = 64;
    int e = up ? 0 : ENOMEM;
    while (!e) {
        char buffer[4 << 10];
        bool any = false, down = false;
        long n = 0;
        lseek(fd, 0, SEEK_SET);
        while (!e && !down && (n = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0)
            for (long at = 0; at < n && !e && !down;) {
                struct dirent_raw *d = (struct dirent_raw *)(buffer + at);
                at += d->reclen;
                if (!strcmp(d->name, ".") || !strcmp(d->name, "..")) continue;
                any = true;
                e = remove_one(fd, d->name);
                if (e != ENOTEMPTY) continue;
                struct stat st;
                int next = open_to_empty(fd, d->name);
                e = next < 0 || fstat(fd, &st) ? errno : 0;
                if (!e && depth == cap) {
                    struct place *more = cap < DEEPEST ? realloc(up, 2 * cap * sizeof *up) : NULL;
                    if (more) up = more, cap *= 2;
                    else e = cap < DEEPEST ? ENOMEM : ENAMETOOLONG;
                }
                if (e) {
                    if (next >= 0) close(next);
                    if (e == ENOENT) e = 0;
                    continue;
                }
                up[depth++] = (struct place){st.st_dev, st.st_ino};
                close(fd);
                fd = next;
                down = true;
            }
        if (n < 0) e = errno;
        if (e || down || any) continue;
        if (!depth) break;
        struct stat st;
        int parent = openat(fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (parent < 0 || fstat(parent, &st)) e = errno;
        else if (st.st_dev != up[depth - 1].dev || st.st_ino != up[depth - 1].ino) e = EBUSY; /* somebody moved it: not ours to empty */
        if (parent >= 0) {
            close(fd);
            fd = parent;
        }
        depth--;
    }
    close(fd);
    free(up);
    return e;
}

static int remove_at(int dir, const char *name, bool recursive, int depth) {
    int e = remove_one(dir, name);
    if (e != ENOTEMPTY || !recursive) return e;
    int fd = open_to_empty(dir, name);
    if (fd < 0) return errno == ENOENT ? 0 : errno;
    if (depth >= DEEP) { /* one descriptor a level up to here */
        e = empty_deep(fd);
        return e ? e : remove_one(dir, name);
    }
    e = 0;
    for (bool again = true; again && !e;) { /* removing while reading may skip entries: read until nothing is left */
        char buffer[4 << 10];
        again = false;
        lseek(fd, 0, SEEK_SET);
        long n;
        while (!e && (n = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0)
            for (long at = 0; at < n && !e;) {
                struct dirent_raw *d = (struct dirent_raw *)(buffer + at);
                at += d->reclen;
                if (!strcmp(d->name, ".") || !strcmp(d->name, "..")) continue;
                again = true;
                e = remove_at(fd, d->name, true, depth + 1);
            }
    }
    close(fd);
    return e ? e : remove_one(dir, name);
}

static int do_remove(const struct file *f) {
    char name[256];
    int dir = open_parent(f->path.p, name, sizeof name);
    if (dir < 0) return errno;
    struct stat st;
    int e = fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) ? errno : remove_at(dir, name, f->flags & FF_RECURSIVE, 0);
    close(dir);
    return e;
}

static int do_rename(const struct file *f) {
    char from[256], to[256];
    int a = open_parent(f->path.p, from, sizeof from);
    if (a < 0) return errno;
    int b = open_parent(f->target.p, to, sizeof to);
    int e = b < 0 || renameat(a, from, b, to) ? errno : 0;
    close(a);
    if (b >= 0) close(b);
    return e;
}

/* chmod and touch follow links, as the commands do; chown and link do not, so that a link can be owned and named. */
static int do_attributes(const struct file *f) {
    char name[256];
    if (f->verb == V_CHMOD || f->verb == V_TOUCH) {
        int fd = open_in_root(f->path.p, O_PATH, 0);
        if (fd < 0) return errno;
        char path[40]; /* of a descriptor that only names the file: works for those that cannot be opened */
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        struct timespec at = {.tv_sec = (time_t)(f->offset / 1000000000), .tv_nsec = (long)(f->offset % 1000000000)};
        int e = (f->verb == V_CHMOD ? chmod(path, f->mode & 07777) : utimensat(AT_FDCWD, path, (struct timespec[]){at, at}, 0)) ? errno : 0;
        close(fd);
        return e;
    }
    if (f->verb == V_CHOWN) {
        struct cred owner;
        if (!user_lookup(f->target.p, &owner)) return ENOENT;
        int dir = open_parent(f->path.p, name, sizeof name);
        if (dir < 0) return errno;
        int e = fchownat(dir, name, owner.uid, owner.gid, AT_SYMLINK_NOFOLLOW) ? errno : 0;
        close(dir);
        return e;
    }
    int dir = open_parent(f->path.p, name, sizeof name);
    if (dir < 0) return errno;
    int e = 0;
    if (f->verb == V_SYMLINK) e = symlinkat(f->target.p, dir, name) ? errno : 0; /* `path` is the new link, `target` what it says */
    else {
        char to[256];
        int other = open_parent(f->target.p, to, sizeof to);
        e = other < 0 || linkat(dir, name, other, to, 0) ? errno : 0; /* as rename: `target` is the new name */
        if (other >= 0) close(other);
    }
    close(dir);
    return e;
}

/* Writes the reply's body; *type says whether it is F_FILE or F_ERROR. */
size_t file_handle(const uint8_t *body, size_t n, uint8_t *reply, size_t cap, uint16_t *type) {
    struct file f;
    const char *field;
    struct wr w = {reply, 9, cap, false};
    struct result r = {0};
    int e = 0;
    bool valid = parse_file(body, n, &f, &field);
    if (valid) {
        field = "path";
        switch (f.verb) {
        case V_READ: e = do_read(&f, &w, &r); break;
        case V_WRITE: e = do_write(&f, &w, &r); break;
        case V_STAT: e = do_stat(&f, &w, &r); break;
        case V_LIST: e = do_list(&f, &w, &r); break;
        case V_MKDIR: e = do_mkdir(&f); break;
        case V_REMOVE: e = do_remove(&f); break;
        case V_RENAME: e = do_rename(&f); break;
        default: e = do_attributes(&f); break;
        }
    }
    *type = valid && !e ? F_FILE : F_ERROR;
    if (*type == F_FILE) {
        struct wr head = {reply, 0, 9, false};
        wr_u8(&head, r.flags);
        wr_u32(&head, r.written);
        wr_u32(&head, r.stats);
        return w.n;
    }
    struct wr err = {reply, 0, cap, false};
    int code = !valid ? E_INVALID : e == ENOENT || e == ENOTDIR ? E_NOT_FOUND : e == EEXIST || e == ENOTEMPTY ? E_CONFLICT
             : e == EACCES || e == EPERM || e == EROFS ? E_DENIED
             : e == EISDIR || e == EINVAL || e == ENAMETOOLONG || e == ELOOP ? E_INVALID : E_SANDBOX;
    const char *message = valid ? strerror(e) : "malformed request";
    wr_u16(&err, (uint16_t)code);
    wr_u32(&err, (uint32_t)e);
    wr_text(&err, field, strlen(field));
    wr_text(&err, message, strlen(message));
    return err.n;
}
