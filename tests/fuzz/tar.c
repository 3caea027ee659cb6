/* Fuzz target for the guest's tar reader: mutated archives are unpacked into a directory below one that must stay as it was.
 *
 *   unpack SECONDS SEED PLACE     PLACE/target is written to; PLACE/keep and PLACE's entries are looked at afterwards
 *
 * The reader is compiled into this file, so that each archive starts with its state as new. */
#include "unpack.c"
#include <ftw.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <time.h>

enum { ROOM = 1 << 16 };
static uint8_t archive[ROOM];
static size_t archive_n, archive_at;
static uint64_t fails, state;

/* What service.c gives the reader. */
int open_beneath(int root, const char *path, int flags, mode_t mode) {
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .mode = flags & O_CREAT ? mode : 0,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}
size_t svc_read(void *to, size_t n) {
    if (n > archive_n - archive_at) n = archive_n - archive_at;
    memcpy(to, archive + archive_at, n);
    archive_at += n;
    return n;
}
bool svc_read_all(void *to, size_t n) {
    if (n > archive_n - archive_at) return false;
    return svc_read(to, n) == n;
}
void svc_drain(void) {}
void svc_write(const void *p, size_t n) { (void)p, (void)n; }
void svc_flush(void) {}
void svc_note(const char *text) { (void)text; }
int svc_fail(int error, const char *about, const char *message) {
    (void)error, (void)message;
    if (strlen(about) > 5000) abort();
    fails++;
    return 1;
}

static uint32_t dice(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 20) % below : 0;
}

static void put_octal(uint8_t *p, int n, uint64_t v) {
    p[--n] = 0;
    while (n) p[--n] = (uint8_t)('0' + v % 8), v /= 8;
}

static void add(const char *name, char type, const char *link, const void *body, size_t n) {
    if (archive_n + 1024 + n > ROOM) return;
    uint8_t *h = archive + archive_n;
    memset(h, 0, 512);
    memcpy(h, name, strnlen(name, 100));
    put_octal(h + 100, 8, dice(010000));
    put_octal(h + 108, 8, dice(70000));
    put_octal(h + 116, 8, dice(70000));
    put_octal(h + 124, 12, n);
    put_octal(h + 136, 12, dice(1 << 30));
    h[156] = (uint8_t)type;
    memcpy(h + 157, link, strnlen(link, 100));
    memcpy(h + 257, "ustar\00000", 8);
    archive_n += 512;
    memset(archive + archive_n, 0, (n + 511) / 512 * 512);
    memcpy(archive + archive_n, body, n);
    archive_n += (n + 511) / 512 * 512;
}

static void sign(uint8_t *h) { /* a mutated header is looked at only with its sum put right */
    unsigned sum = 0;
    memset(h + 148, ' ', 8);
    for (int i = 0; i < 512; i++) sum += h[i];
    put_octal(h + 148, 7, sum);
}

static void make(void) {
    static const char *const names[] = {"a", "a/b", "d", "d/keep", "/keep", "l", "l/x", ".", "s", "d/./e", "../keep", "a/../../keep", "..", ""};
    static const char *const links[] = {"..", "../keep", "/", "a", "l", "/../../keep", "../../..", "d", ".", "/proc/self/root"};
    static const char *const records[] = {"12 path=a/b\n", "17 path=../keep0\n", "15 linkpath=..\n", "11 size=12\n", "22 GNU.sparse.major=1\n",
                                          "30 GNU.sparse.realsize=100000\n", "25 SCHILY.xattr.user.a=b\n", "21 mtime=1.123456789\n", "9 uid=12\n"};
    static const char *const maps[] = {"1\n0\n5\n", "2\n100\n5\n200\n5\n", "1\n99999\n99999\n", "9999999999\n", "2\n5\n5\n0\n5\n", "x"};
    uint32_t count = 1 + dice(6);
    archive_n = archive_at = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t start = archive_n;
        if (!dice(3)) {
            char text[400];
            size_t n = 0;
            for (uint32_t k = 1 + dice(4); k; k--) {
                const char *r = records[dice(sizeof records / sizeof *records)];
                memcpy(text + n, r, strlen(r));
                n += strlen(r);
            }
            add("x", dice(5) ? 'x' : "gLK"[dice(3)], "", text, n);
            sign(archive + start);
        }
        start = archive_n;
        const char *map = maps[dice(6)];
        uint8_t body[600] = {0};
        memcpy(body, map, strlen(map));
        char type = "0000001225673S"[dice(14)];
        bool file = strchr("07S", type) || !dice(30); /* others have no body */
        add(names[dice(dice(6) ? 10 : 14)], type, links[dice(10)], body, !file ? 0 : dice(2) ? dice(600) : 512 + dice(20));
        for (uint32_t k = dice(2) ? 0 : dice(4); k; k--) {
            uint32_t at = (uint32_t)start + dice(512);
            if (dice(2)) archive[at] = (uint8_t)dice(256);
            else archive[at] ^= (uint8_t)(1u << dice(8));
        }
        if (dice(20)) sign(archive + start);
    }
    if (dice(4)) archive_n += archive_n + 1024 <= ROOM ? (memset(archive + archive_n, 0, 1024), 1024) : 0;
    if (!dice(8)) archive_n = dice((uint32_t)archive_n);
}

static int drop(const char *path, const struct stat *st, int flag, struct FTW *f) {
    (void)st, (void)flag;
    if (f->level) remove(path);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    char target[4096], keep[4096];
    time_t end = time(NULL) + atoi(argv[1]);
    state = strtoull(argv[2], NULL, 10) * 2654435761u + 88172645463325252ull;
    snprintf(target, sizeof target, "%.2000s/target", argv[3]);
    snprintf(keep, sizeof keep, "%.2000s/keep", argv[3]);
    struct stat before, after;
    if (stat(keep, &before)) return 2;
    uint64_t n = 0;
    for (; (n & 255) || time(NULL) < end; n++) {
        make();
        if (!(n & 15)) nftw(target, drop, 8, FTW_DEPTH | FTW_PHYS);
        int top = unpack_main(target, dice(2) ? "o" : "");
        (void)top;
        parent_forget();
        close(root_fd);
        while (later) {
            struct later *l = later;
            later = l->next;
            free(l);
        }
        later_bytes = 0;
        free(map);
        for (int fd = 3; fd < 16; fd++) close(fd); /* a failed member leaves what a process's end closes */
        if (stat(keep, &after) || memcmp(&before.st_mode, &after.st_mode, sizeof before.st_mode) || before.st_size != after.st_size ||
            before.st_mtim.tv_nsec != after.st_mtim.tv_nsec || before.st_nlink != after.st_nlink || before.st_uid != after.st_uid)
            abort();
    }
    printf("%llu archives, %llu refused\n", (unsigned long long)n, (unsigned long long)fails);
    return 0;
}
