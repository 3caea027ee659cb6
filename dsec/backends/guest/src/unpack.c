/* The service `unpack`: a tar from stdin into a directory, as the user. Members stay below that directory by openat2, whatever
 * their names and whatever links there are; what the user may not do fails with the member's name.
 *
 * Understood: ustar, PAX (path, linkpath, size, mtime, uid, gid, SCHILY.xattr.*, GNU.sparse 1.0) and GNU (long names, numbers in
 * base 256, sparse maps). Options: `o` keeps owners, set-id bits and file capabilities where the user may. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { BLOCK = 512, MAX_PAX = 1 << 20, MAX_LATER = 32 << 20, MAX_MAP = 1 << 16 };

struct member {
    char path[4200], link[4200], type;
    uint32_t mode;
    uint64_t uid, gid, size, real; /* real: of a sparse file, expanded */
    struct timespec mtime;
    uint8_t *pax;
    size_t pax_n;
    bool has_path, has_sparse_path, has_link, has_size, has_uid, has_gid, has_mtime, sparse, sparse_foreign;
};
struct piece { uint64_t at, n; };
struct later { struct later *next; uint32_t mode, uid, gid; struct timespec mtime; char path[]; };

static int root_fd, parent_fd = -1;
static bool existed; /* the target was there before: it keeps its own mode and owner */
static char parent_path[4200];
static bool keep_owners, owners_noted, attributes_noted, devices_noted;
static struct later *later;
static size_t later_bytes;
static struct piece *map;
static uint32_t map_n;
static uint64_t members, bytes;
static uint8_t data[64 << 10];

static int bad(const struct member *m, const char *why) { return svc_fail(0, m->path, why); }
static int failed(const struct member *m) { return svc_fail(errno, m->path, NULL); }

/* Octal, or base 256 when the first bit is set. False: not a number. */
static bool number(const uint8_t *p, size_t n, uint64_t *out) {
    uint64_t v = 0;
    if (p[0] & 0x80) {
        if (p[0] & 0x40) return false; /* negative */
        v = p[0] & 0x3f;
        for (size_t i = 1; i < n; i++) {
            if (v >> 55) return false;
            v = v << 8 | p[i];
        }
        *out = v;
        return true;
    }
    size_t i = 0;
    while (i < n && p[i] == ' ') i++;
    for (; i < n && p[i] >= '0' && p[i] <= '7'; i++) {
        if (v >> 60) return false;
        v = v << 3 | (uint64_t)(p[i] - '0');
    }
    if (i < n && p[i] && p[i] != ' ') return false;
    *out = v;
    return true;
}

static bool decimal(const char *p, size_t n, uint64_t *out) {
    uint64_t v = 0;
    if (!n || n > 19) return false;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') return false;
        v = v * 10 + (uint64_t)(p[i] - '0');
    }
    *out = v;
    return v <= INT64_MAX;
}

static bool moment(const char *p, size_t n, struct timespec *out) {
    bool minus = n && *p == '-';
    if (minus) p++, n--;
    const char *dot = memchr(p, '.', n);
    uint64_t whole, nanos = 0;
    if (!decimal(p, dot ? (size_t)(dot - p) : n, &whole)) return false;
    if (dot) {
        const char *end = p + n;
        int digits = 0;
        for (p = dot + 1; p < end; p++) {
            if (*p < '0' || *p > '9') return false;
            if (digits < 9) nanos = nanos * 10 + (uint64_t)(*p - '0'), digits++;
        }
        for (; digits < 9; digits++) nanos *= 10;
    }
    if (whole > 1ull << 34) whole = 1ull << 34;
    *out = minus ? (struct timespec){0, 0} : (struct timespec){(time_t)whole, (long)nanos};
    return true;
}

static bool put_text(char *to, size_t cap, const char *p, size_t n) {
    if (n >= cap || memchr(p, 0, n)) return false;
    memcpy(to, p, n);
    to[n] = 0;
    return true;
}

/* Calls `each` for every record of a PAX header; false when one is malformed. */
static bool pax_each(const uint8_t *p, size_t n, bool (*each)(struct member *, const char *, size_t, const char *, size_t), struct member *m) {
    const char *at = (const char *)p, *end = at + n;
    while (at < end && *at) {
        const char *space = memchr(at, ' ', (size_t)(end - at) < 20 ? (size_t)(end - at) : 20);
        uint64_t length;
        if (!space || !decimal(at, (size_t)(space - at), &length) || length > (size_t)(end - at) || length < (size_t)(space - at) + 4) return false;
        const char *stop = at + length - 1, *key = space + 1, *equals = memchr(key, '=', (size_t)(stop - key));
        if (*stop != '\n' || !equals || !each(m, key, (size_t)(equals - key), equals + 1, (size_t)(stop - equals - 1))) return false;
        at += length;
    }
    return true;
}

static bool is(const char *key, size_t n, const char *name) { return strlen(name) == n && !memcmp(key, name, n); }

static bool pax_field(struct member *m, const char *key, size_t kn, const char *value, size_t vn) {
    if (is(key, kn, "path")) return m->has_path = true, m->has_sparse_path || put_text(m->path, sizeof m->path, value, vn);
    if (is(key, kn, "GNU.sparse.name")) return m->has_path = m->has_sparse_path = true, put_text(m->path, sizeof m->path, value, vn);
    if (is(key, kn, "linkpath")) return m->has_link = true, put_text(m->link, sizeof m->link, value, vn);
    if (is(key, kn, "size")) return m->has_size = true, decimal(value, vn, &m->size);
    if (is(key, kn, "uid")) return m->has_uid = true, decimal(value, vn, &m->uid);
    if (is(key, kn, "gid")) return m->has_gid = true, decimal(value, vn, &m->gid);
    if (is(key, kn, "mtime")) return m->has_mtime = true, moment(value, vn, &m->mtime);
    if (is(key, kn, "GNU.sparse.major")) return m->sparse = vn == 1 && *value == '1', vn == 1;
    if (is(key, kn, "GNU.sparse.realsize")) return decimal(value, vn, &m->real);
    if (is(key, kn, "GNU.sparse.map") || is(key, kn, "GNU.sparse.numblocks")) m->sparse_foreign = true;
    return true;
}

static bool read_body(uint8_t **to, size_t *n, uint64_t size) {
    if (size > MAX_PAX) return false;
    size_t whole = ((size_t)size + BLOCK - 1) / BLOCK * BLOCK;
    free(*to);
    *to = malloc(whole + 1);
    if (!*to || !svc_read_all(*to, whole)) return false;
    (*to)[size] = 0;
    *n = (size_t)size;
    return true;
}

/* 1: a member, 0: the end, -1: failed (told). */
static int next_member(struct member *m) {
    uint8_t h[BLOCK], *long_text = NULL;
    size_t n;
    free(m->pax);
    memset(m, 0, sizeof *m);
    for (;;) {
        if (!svc_read_all(h, BLOCK)) return svc_fail(0, m->path, "the archive is truncated"), -1;
        bool zero = true;
        for (int i = 0; i < BLOCK && zero; i++) zero = !h[i];
        if (zero) return 0;
        uint64_t sum = 0, want, size, value;
        for (int i = 0; i < BLOCK; i++) sum += i >= 148 && i < 156 ? ' ' : h[i];
        if (!number(h + 148, 8, &want) || want != sum) return svc_fail(0, m->path, "not a tar header"), -1;
        if (!number(h + 124, 12, &size) || size > INT64_MAX) return svc_fail(0, m->path, "a header of impossible size"), -1;
        char type = (char)h[156];
        if (type == 'x' || type == 'g' || type == 'L' || type == 'K') {
            bool wide = type == 'x' || type == 'g';
            if (!read_body(wide ? &m->pax : &long_text, wide ? &m->pax_n : &n, size)) {
                free(long_text);
                return svc_fail(0, m->path, "a header of impossible size"), -1;
            }
            bool good = true;
            if (type == 'x') good = pax_each(m->pax, m->pax_n, pax_field, m);
            else if (type == 'g') m->pax_n = 0; /* comments, as git writes them */
            else {
                n = strnlen((char *)long_text, n);
                if (type == 'L') m->has_path = good = put_text(m->path, sizeof m->path, (char *)long_text, n);
                else m->has_link = good = put_text(m->link, sizeof m->link, (char *)long_text, n);
            }
            free(long_text);
            long_text = NULL;
            if (!good) return svc_fail(0, m->path, "a malformed extended header"), -1;
            continue;
        }
        if (!m->has_path) {
            size_t prefix = memcmp(h + 257, "ustar", 6) ? 0 : strnlen((char *)h + 345, 155); /* "ustar\0": GNU's has a space */
            snprintf(m->path, sizeof m->path, "%.*s%s%.100s", (int)prefix, (char *)h + 345, prefix ? "/" : "", (char *)h);
        }
        if (!m->has_link) snprintf(m->link, sizeof m->link, "%.100s", (char *)h + 157);
        if (!m->has_size) m->size = size;
        if (!number(h + 100, 8, &value)) return bad(m, "a malformed header"), -1;
        m->mode = value & 07777;
        if (!m->has_uid && !number(h + 108, 8, &m->uid)) m->uid = UINT64_MAX;
        if (!m->has_gid && !number(h + 116, 8, &m->gid)) m->gid = UINT64_MAX;
        if (!m->has_mtime && number(h + 136, 12, &value)) m->mtime.tv_sec = (time_t)(value >> 34 ? 1ull << 34 : value);
        m->type = type ? type : '0';
        if (m->type == '7') m->type = '0';
        size_t length = strlen(m->path);
        if (m->type == '0' && length && m->path[length - 1] == '/') m->type = '5'; /* as tars before POSIX had it */
        if (m->sparse_foreign && !m->sparse) return bad(m, "a sparse format that is not understood (1.0 is)"), -1;
        if (m->type == 'S') { /* GNU: the map is in the header and in blocks behind it */
            uint8_t *entry = h + 386;
            bool more = h[482] != 0;
            int count = 4;
            if (!number(h + 483, 12, &m->real)) return bad(m, "a malformed sparse map"), -1;
            map_n = 0;
            for (;;) {
                for (int i = 0; i < count; i++, entry += 24) {
                    struct piece p;
                    if (!entry[0]) break;
                    if (map_n == MAX_MAP || !number(entry, 12, &p.at) || !number(entry + 12, 12, &p.n)) return bad(m, "a malformed sparse map"), -1;
                    map[map_n++] = p;
                }
                if (!more) break;
                if (!svc_read_all(h, BLOCK)) return bad(m, "the archive is truncated"), -1;
                entry = h;
                count = 21;
                more = h[504] != 0;
            }
            m->sparse = true;
        } else map_n = 0;
        members++;
        return 1;
    }
}

/* A member's name below the target: no `..`, no empty parts. False: it cannot be a path. */
static bool clean(char *path) {
    char out[4200];
    size_t n = 0;
    for (char *p = path; *p;) {
        while (*p == '/') p++;
        size_t k = strcspn(p, "/");
        if (!k) break;
        if (k > 255 || (k == 2 && p[0] == '.' && p[1] == '.')) return false;
        if (!(k == 1 && p[0] == '.')) {
            if (n) out[n++] = '/';
            memcpy(out + n, p, k);
            n += k;
        }
        p += k;
    }
    out[n] = 0;
    if (n > 4095) return false;
    memcpy(path, out, n + 1);
    return true;
}

/* The directory of `path` (made where it is absent), and the last part. The last one is kept open: members come in its order. */
static int parent_of(const char *path, const char **leaf) {
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    *leaf = slash ? slash + 1 : path;
    if (!n) return root_fd;
    if (parent_fd >= 0 && strlen(parent_path) == n && !memcmp(parent_path, path, n)) return parent_fd;
    if (parent_fd >= 0) close(parent_fd);
    memcpy(parent_path, path, n);
    parent_path[n] = 0;
    parent_fd = open_beneath(root_fd, parent_path, O_PATH | O_DIRECTORY, 0);
    if (parent_fd >= 0 || errno != ENOENT) return parent_fd;
    int at = dup(root_fd);
    for (char *p = parent_path; at >= 0;) { /* each step resolved from the root again: a link's target may lie elsewhere */
        char *end = strchr(p, '/');
        if (end) *end = 0;
        char *name = strrchr(parent_path, '/');
        name = name ? name + 1 : parent_path;
        if (mkdirat(at, name, 0755) && errno != EEXIST) {
            int e = errno;
            close(at);
            errno = e;
            at = -1;
            break;
        }
        close(at);
        at = open_beneath(root_fd, parent_path, O_PATH | O_DIRECTORY, 0);
        if (!end) break;
        *end = '/';
        p = end + 1;
    }
    return parent_fd = at;
}

static void parent_forget(void) {
    if (parent_fd >= 0) close(parent_fd);
    parent_fd = -1;
}

/* What is in the way is removed; a directory only when it is empty. */
static int clear(int dir, const char *leaf) {
    if (!unlinkat(dir, leaf, 0) || errno == ENOENT) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    return unlinkat(dir, leaf, AT_REMOVEDIR);
}

static bool attribute(struct member *unused, const char *key, size_t kn, const char *value, size_t vn);
static int attribute_fd;

static int own(const struct member *m, int dir, const char *leaf, int fd) {
    if (!keep_owners) return 0;
    if (m->uid >= UINT32_MAX || m->gid >= UINT32_MAX) return errno = EINVAL, -1;
    int e = fd >= 0 ? fchown(fd, (uid_t)m->uid, (gid_t)m->gid) : fchownat(dir, leaf, (uid_t)m->uid, (gid_t)m->gid, AT_SYMLINK_NOFOLLOW);
    if (e && errno == EPERM && geteuid()) { /* not root: as tar does, everything is the user's */
        if (!owners_noted) svc_note("owners were not kept: the user is not root");
        owners_noted = true;
        return 1;
    }
    return e;
}

/* Owner before mode (chown clears set-id bits) before attributes (chown drops capabilities) before time. */
static int finish(const struct member *m, int fd) {
    int e = own(m, -1, NULL, fd);
    if (e < 0) return -1;
    if (fchmod(fd, m->mode & (keep_owners && !e ? 07777 : 01777))) return -1;
    attribute_fd = fd;
    if (m->pax_n) pax_each(m->pax, m->pax_n, attribute, NULL);
    return futimens(fd, (struct timespec[]){m->mtime, m->mtime});
}

static bool attribute(struct member *unused, const char *key, size_t kn, const char *value, size_t vn) {
    (void)unused;
    static const char prefix[] = "SCHILY.xattr.";
    char name[256];
    if (kn <= sizeof prefix - 1 || memcmp(key, prefix, sizeof prefix - 1)) return true;
    if (!put_text(name, sizeof name, key + sizeof prefix - 1, kn - (sizeof prefix - 1))) return true;
    bool wanted = !strncmp(name, "user.", 5) || (keep_owners && !strcmp(name, "security.capability"));
    if ((!wanted || fsetxattr(attribute_fd, name, value, vn, 0)) && !attributes_noted) {
        svc_note("some extended attributes were not kept");
        attributes_noted = true;
    }
    return true;
}

/* The body of a member that is not written anywhere, and the padding of one that is. */
static bool skip(uint64_t n) {
    while (n) {
        size_t k = n < sizeof data ? (size_t)n : sizeof data;
        if (!svc_read_all(data, k)) return false;
        n -= k;
    }
    return true;
}

/* The 1.0 map: decimal lines at the front of the body, padded to a block. How many bytes it took; 0: malformed. */
static uint64_t read_map(uint64_t body) {
    uint64_t used = 0, value = 0, want = 0, seen = 0;
    int digits = 0;
    bool counted = false;
    while (used < body) {
        uint8_t block[BLOCK];
        if (!svc_read_all(block, BLOCK)) return 0;
        used += BLOCK;
        for (int i = 0; i < BLOCK; i++) {
            if (block[i] >= '0' && block[i] <= '9' && digits < 18) {
                value = value * 10 + (uint64_t)(block[i] - '0');
                digits++;
                continue;
            }
            if (block[i] != '\n' || !digits) return 0;
            if (!counted) {
                if (value > MAX_MAP) return 0;
                want = value * 2;
                counted = true;
            } else if (seen % 2) map[seen / 2].n = value, seen++;
            else map[seen / 2].at = value, seen++;
            value = 0;
            digits = 0;
            if (counted && seen == want) {
                map_n = (uint32_t)(want / 2);
                return used;
            }
        }
    }
    return 0;
}

static int write_at(int fd, const uint8_t *p, size_t n, uint64_t at) {
    while (n) {
        ssize_t k = pwrite(fd, p, n, (off_t)at);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return -1;
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return 0;
}

static int content(struct member *m, int fd) {
    uint64_t left = m->size, end = 0;
    if (m->sparse && m->type != 'S') {
        uint64_t used = read_map(left);
        if (!used || used > (left + BLOCK - 1) / BLOCK * BLOCK) return bad(m, "a malformed sparse map");
        left -= used < left ? used : left;
    }
    struct piece whole = {0, left};
    const struct piece *pieces = m->sparse ? map : &whole;
    uint32_t count = m->sparse ? map_n : 1;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = pieces[i].at, n = pieces[i].n;
        if (at < end || n > left || at > INT64_MAX - n || (m->sparse && at + n > m->real)) return bad(m, "a malformed sparse map");
        end = at + n;
        left -= n;
        while (n) {
            size_t k = svc_read(data, n < sizeof data ? (size_t)n : sizeof data);
            if (!k) return bad(m, "the archive is truncated");
            if (write_at(fd, data, k, at)) return failed(m);
            at += k;
            n -= k;
            bytes += k;
        }
    }
    if (m->sparse && ftruncate(fd, (off_t)m->real)) return failed(m);
    if (!skip(left + (BLOCK - m->size % BLOCK) % BLOCK)) return bad(m, "the archive is truncated");
    return 0;
}

/* A file that exists is replaced as a whole once the new one is complete. */
static int file(struct member *m, int dir, const char *leaf) {
    char temp[64] = "";
    int fd = openat(dir, leaf, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    for (int i = 0; fd < 0 && errno == EEXIST && i < 100; i++) {
        snprintf(temp, sizeof temp, ".dsec-%d-%llu-%d", getpid(), (unsigned long long)members, i);
        fd = openat(dir, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    }
    if (fd < 0) return failed(m);
    int told = content(m, fd);
    bool whole = !told && !finish(m, fd);
    if (close(fd)) whole = false;
    if (whole && temp[0] && renameat(dir, temp, dir, leaf)) {
        whole = errno == EISDIR && !clear(dir, leaf) && !renameat(dir, temp, dir, leaf);
    }
    if (whole) return 0;
    int e = errno;
    unlinkat(dir, temp[0] ? temp : leaf, 0);
    errno = e;
    return told ? told : failed(m);
}

static int directory(struct member *m, int dir, const char *leaf) {
    if (!*leaf && existed) return 0;
    if (*leaf && mkdirat(dir, leaf, 0700)) {
        struct stat st;
        if (errno != EEXIST) return failed(m);
        /* A link to a directory stays (bin -> usr/bin): replacing it would take the sandbox apart. */
        int there = open_beneath(root_fd, m->path, O_PATH | O_DIRECTORY, 0);
        if (there < 0) {
            if (clear(dir, leaf) || mkdirat(dir, leaf, 0700)) return failed(m);
        } else {
            bool link = !fstatat(dir, leaf, &st, AT_SYMLINK_NOFOLLOW) && S_ISLNK(st.st_mode);
            close(there);
            if (link) return 0;
        }
    }
    size_t n = strlen(m->path) + 1;
    struct later *l = later_bytes < MAX_LATER ? malloc(sizeof *l + n) : NULL;
    if (!l || m->pax_n > 512) { /* also those with attributes: at once, its mode then forbids what it forbids */
        free(l);
        int fd = open_beneath(root_fd, *leaf ? m->path : ".", O_RDONLY | O_DIRECTORY, 0);
        int e = fd < 0 || finish(m, fd) ? failed(m) : 0;
        if (fd >= 0) close(fd);
        return e;
    }
    /* Its time changes with every entry made in it, and its mode may forbid making one: when all is there. */
    *l = (struct later){later, m->mode, (uint32_t)m->uid, (uint32_t)m->gid, m->mtime};
    memcpy(l->path, m->path, n);
    later = l;
    later_bytes += sizeof *l + n + 16;
    if (m->pax_n && *leaf) {
        attribute_fd = open_beneath(root_fd, m->path, O_RDONLY | O_DIRECTORY, 0);
        if (attribute_fd >= 0) {
            pax_each(m->pax, m->pax_n, attribute, NULL);
            close(attribute_fd);
        }
    }
    return 0;
}

static int directories(void) {
    for (; later; later = later->next) { /* newest first: what is inside comes before what holds it */
        struct member m = {.mode = later->mode, .uid = later->uid, .gid = later->gid, .mtime = later->mtime};
        int fd = open_beneath(root_fd, later->path[0] ? later->path : ".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
        if (fd < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP)) continue; /* replaced by a later member */
        memcpy(m.path, later->path, strlen(later->path) + 1);
        int e = fd < 0 || finish(&m, fd) ? errno : 0;
        if (fd >= 0) close(fd);
        if (e) return svc_fail(e, later->path, NULL);
    }
    return 0;
}

static int link_to(struct member *m, int dir, const char *leaf) {
    if (m->type == '2') {
        if (!m->link[0]) return bad(m, "a symbolic link without a target");
        if (symlinkat(m->link, dir, leaf) && (errno != EEXIST || clear(dir, leaf) || symlinkat(m->link, dir, leaf))) return failed(m);
    } else {
        if (!clean(m->link) || !m->link[0]) return bad(m, "a hard link that leads out of the archive");
        char *slash = strrchr(m->link, '/');
        if (slash) *slash = 0;
        int from = open_beneath(root_fd, slash ? m->link : ".", O_PATH | O_DIRECTORY, 0);
        if (from < 0) return failed(m);
        const char *name = slash ? slash + 1 : m->link;
        int e = linkat(from, name, dir, leaf, 0);
        struct stat a, b;
        if (e && errno == EEXIST) {
            bool same = !fstatat(from, name, &a, AT_SYMLINK_NOFOLLOW) && !fstatat(dir, leaf, &b, AT_SYMLINK_NOFOLLOW) && a.st_ino == b.st_ino &&
                        a.st_dev == b.st_dev;
            e = same ? 0 : clear(dir, leaf) ? -1 : linkat(from, name, dir, leaf, 0);
        }
        int error = errno;
        close(from);
        errno = error;
        return e ? failed(m) : 0; /* the file's own member said the rest */
    }
    if (own(m, dir, leaf, -1) < 0) return failed(m);
    utimensat(dir, leaf, (struct timespec[]){m->mtime, m->mtime}, AT_SYMLINK_NOFOLLOW);
    return 0;
}

static int one(struct member *m) {
    char named[4200];
    memcpy(named, m->path, sizeof named);
    if (!clean(m->path)) {
        memcpy(m->path, named, sizeof named);
        return bad(m, "a name that leads out of the archive, or is too long");
    }
    if (!m->path[0]) return m->type == '5' ? directory(m, root_fd, "") : bad(m, "the archive's root is not a directory");
    const char *leaf;
    int dir = parent_of(m->path, &leaf);
    if (dir < 0) return failed(m);
    switch (m->type) {
    case '0': case 'S': return file(m, dir, leaf);
    case '5': return directory(m, dir, leaf);
    case '1': case '2': {
        int e = link_to(m, dir, leaf);
        parent_forget(); /* the way to it may have led through what this replaced */
        return e;
    }
    case '6':
        if (mkfifoat(dir, leaf, 0600) && (errno != EEXIST || clear(dir, leaf) || mkfifoat(dir, leaf, 0600))) return failed(m);
        if (own(m, dir, leaf, -1) < 0 || fchmodat(dir, leaf, m->mode & 01777, 0)) return failed(m);
        utimensat(dir, leaf, (struct timespec[]){m->mtime, m->mtime}, AT_SYMLINK_NOFOLLOW);
        return 0;
    case '3': case '4':
        if (!devices_noted) svc_note("device nodes were left out");
        devices_noted = true;
        return 0;
    default: return bad(m, "a member of unknown type");
    }
}

int unpack_main(const char *target, const char *options) {
    static struct member m;
    keep_owners = strchr(options, 'o') != NULL;
    map = malloc(MAX_MAP * sizeof *map); /* touched only as far as a map goes */
    int top = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (!map || top < 0) return svc_fail(errno, target, NULL);
    root_fd = top; /* the target is made as members are: with its parents, resolved inside the sandbox's root */
    memcpy(m.path, target, strnlen(target, 4096));
    char whole[4200];
    snprintf(whole, sizeof whole, "%.4096s/x", target);
    const char *leaf;
    int there = open_beneath(top, target, O_PATH | O_DIRECTORY, 0);
    existed = there >= 0;
    if (existed) close(there);
    if (!clean(whole) || parent_of(whole, &leaf) < 0) return svc_fail(errno, target, NULL);
    root_fd = parent_fd >= 0 ? open_beneath(top, parent_path, O_PATH | O_DIRECTORY, 0) : top;
    parent_forget();
    if (root_fd < 0) return svc_fail(errno, target, NULL);
    for (int more; (more = next_member(&m));)
        if (more < 0 || one(&m)) return 1;
    if (directories()) return 1;
    svc_drain();
    char line[64];
    svc_write(line, (size_t)snprintf(line, sizeof line, "%llu %llu", (unsigned long long)members, (unsigned long long)bytes));
    svc_flush();
    return 0;
}
