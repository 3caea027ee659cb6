/* The service `pack`: paths of the sandbox as one tar (PAX) to stdout, as the user; never through a link below the paths named.
 * Memory is bounded whatever the tree is: one descriptor and one buffer a level, and a bounded table of hard links. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { BLOCK = 512, MAX_DEPTH = 400, MAX_PAX = 64 << 10, MAX_PIECES = 4096, MAX_LINK_BYTES = 8 << 20, MAX_PATH = 4096 };

struct dirent_raw { uint64_t ino; int64_t off; unsigned short reclen; unsigned char type; char name[]; };
struct known { struct known *next; uint64_t dev, ino; char path[]; };

static struct known *table[4096]; /* files with several names that were seen */
static size_t table_bytes;
static uint8_t pax[MAX_PAX];
static size_t pax_n;
static bool pax_full;
static char path[MAX_PATH * 2]; /* of the member that is being written */
static bool left_out_noted, depth_noted, kernel_noted;
static const uint8_t zeros[BLOCK];

static void octal(uint8_t *p, size_t n, uint64_t v) {
    p[--n] = 0;
    while (n) p[--n] = (uint8_t)('0' + v % 8), v /= 8;
}

static void record(const char *key, const void *value, size_t n) {
    size_t body = strlen(key) + n + 3, whole = body + 1, digits = 1;
    for (size_t v = whole; v >= 10; v /= 10) digits++;
    whole = body + digits;
    size_t check = 0;
    for (size_t v = whole; v; v /= 10) check++;
    if (check != digits) whole++;
    if (whole > sizeof pax - pax_n) {
        pax_full = true;
        return;
    }
    pax_n += (size_t)sprintf((char *)pax + pax_n, "%zu %s=", whole, key);
    memcpy(pax + pax_n, value, n);
    pax_n += n;
    pax[pax_n++] = '\n';
}

static void record_number(const char *key, uint64_t v) {
    char text[24];
    record(key, text, (size_t)sprintf(text, "%llu", (unsigned long long)v));
}

static void pad(uint64_t n) { svc_write(zeros, (BLOCK - n % BLOCK) % BLOCK); }

static void block(const char *name, char type, const struct stat *st, uint64_t size, const char *link) {
    uint8_t h[BLOCK] = {0};
    memcpy(h, name, strnlen(name, 100));
    octal(h + 100, 8, st->st_mode & 07777);
    octal(h + 108, 8, st->st_uid <= 07777777 ? st->st_uid : 0);
    octal(h + 116, 8, st->st_gid <= 07777777 ? st->st_gid : 0);
    octal(h + 124, 12, size >> 33 ? 0 : size);
    octal(h + 136, 12, st->st_mtim.tv_sec > 0 && !((uint64_t)st->st_mtim.tv_sec >> 33) ? (uint64_t)st->st_mtim.tv_sec : 0);
    h[156] = (uint8_t)type;
    memcpy(h + 157, link, strnlen(link, 100));
    memcpy(h + 257, "ustar\00000", 8);
    memset(h + 148, ' ', 8);
    unsigned sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += h[i];
    octal(h + 148, 7, sum);
    svc_write(h, sizeof h);
}

/* The member's header, before it the extended one where it is needed. */
static void header(char type, const struct stat *st, uint64_t size, const char *link, bool sparse) {
    size_t n = strlen(path);
    if (n > 100) {
        if (sparse) record("GNU.sparse.name", path, n);
        else record("path", path, n);
    } else if (sparse) record("GNU.sparse.name", path, n);
    if (strlen(link) > 100) record("linkpath", link, strlen(link));
    if (size >> 33) record_number("size", size);
    if (st->st_uid > 07777777) record_number("uid", st->st_uid);
    if (st->st_gid > 07777777) record_number("gid", st->st_gid);
    if (st->st_mtim.tv_nsec && st->st_mtim.tv_sec >= 0) {
        char text[48];
        record("mtime", text, (size_t)sprintf(text, "%lld.%09ld", (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec));
    }
    if (pax_n) {
        struct stat plain = {.st_mode = 0644};
        block("PaxHeader", 'x', &plain, pax_n, "");
        svc_write(pax, pax_n);
        pad(pax_n);
    }
    block(path, type, st, size, link);
}

static void attributes(int fd) {
    static char names[16 << 10], value[32 << 10];
    ssize_t n = flistxattr(fd, names, sizeof names);
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
        const char *name = names + at;
        if (strncmp(name, "user.", 5) && strcmp(name, "security.capability")) continue;
        ssize_t k = fgetxattr(fd, name, value, sizeof value);
        char key[300];
        if (k >= 0 && snprintf(key, sizeof key, "SCHILY.xattr.%s", name) < (int)sizeof key) record(key, value, (size_t)k);
        if (k < 0 || pax_full) svc_note("some extended attributes were left out");
        pax_full = false;
    }
}

/* The first name under which this file was packed, or NULL: then this is it. */
static const char *first_name(const struct stat *st) {
    if (st->st_nlink < 2 || S_ISDIR(st->st_mode)) return NULL;
    struct known **slot = &table[(st->st_ino ^ st->st_dev) % 4096];
    for (struct known *k = *slot; k; k = k->next)
        if (k->ino == st->st_ino && k->dev == st->st_dev) return k->path;
    size_t n = strlen(path) + 1;
    if (table_bytes + n > MAX_LINK_BYTES) return NULL; /* beyond that, copies */
    struct known *k = malloc(sizeof *k + n);
    if (!k) return NULL;
    *k = (struct known){*slot, st->st_dev, st->st_ino};
    memcpy(k->path, path, n);
    *slot = k;
    table_bytes += sizeof *k + n;
    return NULL;
}

struct piece { uint64_t at, n; };
static struct piece pieces[MAX_PIECES];

/* Data of a file with holes; 0: it has none (or too many to tell). */
static uint32_t find_pieces(int fd, uint64_t size) {
    uint32_t n = 0;
    uint64_t at = 0;
    while (at < size) {
        off_t begin = lseek(fd, (off_t)at, SEEK_DATA);
        if (begin < 0 && errno == ENXIO) break;
        off_t end = begin < 0 ? -1 : lseek(fd, begin, SEEK_HOLE);
        if (end < 0 || n == MAX_PIECES - 1) return 0;
        if ((uint64_t)end > size) end = (off_t)size;
        if (end > begin) pieces[n++] = (struct piece){(uint64_t)begin, (uint64_t)(end - begin)};
        at = (uint64_t)end;
    }
    if (n == 1 && !pieces[0].at && pieces[0].n == size) return 0;
    pieces[n++] = (struct piece){size, 0}; /* says how far the last hole goes */
    return n;
}

/* Exactly n bytes: a file that shrinks meanwhile is filled up, since its header is out already. */
static void copy(int fd, uint64_t at, uint64_t n) {
    while (n) {
        size_t room;
        uint8_t *to = svc_room(&room);
        if (room > n) room = (size_t)n;
        ssize_t k = pread(fd, to, room, (off_t)at);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) {
            svc_note("a file became shorter while it was read");
            for (; n; n -= room) {
                to = svc_room(&room);
                if (room > n) room = (size_t)n;
                memset(to, 0, room);
                svc_filled(room);
            }
            return;
        }
        svc_filled((size_t)k);
        at += (uint64_t)k;
        n -= (uint64_t)k;
    }
}

static void regular(int fd, const struct stat *st) {
    uint64_t size = (uint64_t)st->st_size, stored = 0;
    uint32_t n = size && (uint64_t)st->st_blocks * 512 < size ? find_pieces(fd, size) : 0;
    attributes(fd);
    if (!n) {
        header('0', st, size, "", false);
        copy(fd, 0, size);
        pad(size);
        return;
    }
    static char map[MAX_PIECES * 42 + 32];
    size_t map_n = (size_t)sprintf(map, "%u\n", n);
    for (uint32_t i = 0; i < n; i++) {
        map_n += (size_t)sprintf(map + map_n, "%llu\n%llu\n", (unsigned long long)pieces[i].at, (unsigned long long)pieces[i].n);
        stored += pieces[i].n;
    }
    size_t whole = (map_n + BLOCK - 1) / BLOCK * BLOCK;
    memset(map + map_n, 0, whole - map_n);
    record("GNU.sparse.major", "1", 1);
    record("GNU.sparse.minor", "0", 1);
    record_number("GNU.sparse.realsize", size);
    header('0', st, whole + stored, "", true);
    svc_write(map, whole);
    for (uint32_t i = 0; i < n; i++) copy(fd, pieces[i].at, pieces[i].n);
    pad(stored);
}

/* proc, sysfs, devpts and cgroups hold no files of the sandbox's, and reading them does not end. */
static bool kernels_own(int fd) {
    struct statfs fs;
    if (fstatfs(fd, &fs)) return false;
    unsigned long type = (unsigned long)fs.f_type & 0xffffffff;
    return type == 0x9fa0 || type == 0x62656572 || type == 0x1cd1 || type == 0x27e0eb || type == 0x63677270;
}

static int member(int dir, const char *name, int depth);

static int children(int fd, int depth) {
    struct { char b[8 << 10]; } buffer; /* a level's own */
    size_t n = strlen(path);
    for (long got; (got = syscall(SYS_getdents64, fd, &buffer, sizeof buffer)) != 0;) {
        if (got < 0) return svc_fail(errno, path, NULL);
        for (long at = 0; at < got;) {
            struct dirent_raw *d = (struct dirent_raw *)(buffer.b + at);
            at += d->reclen;
            if (!strcmp(d->name, ".") || !strcmp(d->name, "..")) continue;
            size_t k = strlen(d->name);
            if (n + k + 2 > MAX_PATH) {
                if (!depth_noted) svc_note("what lies too deep was left out");
                depth_noted = true;
                continue;
            }
            size_t end = n;
            if (end && path[end - 1] != '/') path[end++] = '/';
            memcpy(path + end, d->name, k + 1);
            int e = member(fd, d->name, depth + 1);
            path[n] = 0;
            if (e) return e;
        }
    }
    return 0;
}

/* `path` is its name in the archive. What disappears between two looks is no error. */
static int member(int dir, const char *name, int depth) {
    struct stat st;
    pax_n = 0;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) return depth && errno == ENOENT ? 0 : svc_fail(errno, path, NULL);
    const char *first = first_name(&st);
    if (first) {
        header('1', &st, 0, first, false);
        return 0;
    }
    if (S_ISLNK(st.st_mode)) {
        char target[MAX_PATH + 1];
        ssize_t n = readlinkat(dir, name, target, MAX_PATH);
        if (n < 0) return errno == ENOENT ? 0 : svc_fail(errno, path, NULL);
        target[n] = 0;
        header('2', &st, 0, target, false);
        return 0;
    }
    if (S_ISFIFO(st.st_mode)) {
        header('6', &st, 0, "", false);
        return 0;
    }
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) {
        if (!left_out_noted) svc_note("sockets and device nodes were left out");
        left_out_noted = true;
        return 0;
    }
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (S_ISDIR(st.st_mode) ? O_DIRECTORY : 0));
    if (fd < 0) return depth && errno == ENOENT ? 0 : svc_fail(errno, path, NULL);
    struct stat now; /* what was opened may be another file than what was looked at */
    int e = 0;
    if (fstat(fd, &now) || (now.st_mode & S_IFMT) != (st.st_mode & S_IFMT)) e = svc_fail(EAGAIN, path, "it changed while it was read");
    else if (S_ISREG(st.st_mode)) regular(fd, &now);
    else if (depth >= MAX_DEPTH) {
        if (!depth_noted) svc_note("what lies too deep was left out");
        depth_noted = true;
    } else {
        attributes(fd);
        size_t n = strlen(path);
        bool dot = !strcmp(path, ".");
        memcpy(path + n, "/", 2);
        header('5', &now, 0, "", false);
        path[dot ? 0 : n] = 0;
        if (depth && kernels_own(fd)) {
            if (!kernel_noted) svc_note("proc, sys and the like were left out");
            kernel_noted = true;
        } else e = children(fd, depth);
        if (dot) memcpy(path, ".", 2);
    }
    close(fd);
    return e;
}

/* `name`: the archive's name for the one path; "" = each path's own last part. Option `f`: a path that is a link is followed. */
int pack_main(const char *name, const char *options, const char *const *paths, uint32_t n) {
    int top = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (uint32_t i = 0; i < n; i++) {
        char text[MAX_PATH + 1];
        size_t k = strnlen(paths[i], MAX_PATH);
        memcpy(text, paths[i], k);
        text[k] = 0;
        while (k > 1 && text[k - 1] == '/') text[--k] = 0;
        char *slash = strrchr(text, '/');
        const char *leaf = slash ? slash + 1 : text;
        const char *shown = *name ? name : *leaf && strcmp(leaf, "..") ? leaf : ".";
        if (strlen(shown) >= MAX_PATH) return svc_fail(ENAMETOOLONG, text, NULL);
        memcpy(path, shown, strlen(shown) + 1);
        int e;
        if (strchr(options, 'f') || !*leaf || !strcmp(leaf, ".") || !strcmp(leaf, "..")) {
            int fd = open_beneath(top, text, O_PATH, 0);
            struct stat st;
            if (fd < 0 || fstat(fd, &st)) return svc_fail(errno, text, NULL);
            if (S_ISDIR(st.st_mode)) e = member(fd, ".", 0);
            else {
                char link[40], full[MAX_PATH + 1]; /* its own directory, found by where the kernel says that it is */
                snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
                ssize_t got = readlink(link, full, MAX_PATH);
                char *last = got > 0 ? memrchr(full, '/', (size_t)got) : NULL;
                if (!last) return svc_fail(ENOENT, text, NULL);
                full[got] = 0;
                *last = 0;
                int dir = open_beneath(top, *full ? full : "/", O_PATH | O_DIRECTORY, 0);
                e = dir < 0 ? svc_fail(errno, text, NULL) : member(dir, last + 1, 0);
                close(dir);
            }
            close(fd);
        } else {
            if (slash) *slash = 0;
            int dir = open_beneath(top, !slash ? "." : *text ? text : "/", O_PATH | O_DIRECTORY, 0);
            if (dir < 0) return svc_fail(errno, paths[i], NULL);
            e = member(dir, leaf, 0);
            close(dir);
        }
        if (e) return e;
    }
    svc_write(zeros, BLOCK);
    svc_write(zeros, BLOCK);
    svc_flush();
    return 0;
}
