/* Fuzz target for the zygote's frame parser (launcher/frame.c). Each frame ends at the edge of an unmapped page, so reading one byte
 * too far is a crash even without a sanitizer; whatever an accepted order points to must lie in the frame and end there.
 *
 *   launch SECONDS SEED FRAME...     run, beginning with these frames; prints how many frames were read and how many refused */
#include "launcher.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 1 << 16 };
static uint8_t *edge; /* first byte that may not be read */
static const char *env[MAX_ENV + 1];
static struct order order;
static volatile uint64_t sink;
static uint64_t state;

static uint64_t dice(void) { /* xorshift */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void text(const char *t, const uint8_t *from) {
    if ((const uint8_t *)t < from || (const uint8_t *)t >= edge) abort();
    sink += strlen(t);
}

static void texts(const char **t, int n, int most, const uint8_t *from) {
    if (n < 0 || n > most) abort();
    for (int i = 0; i < n; i++) text(t[i], from);
}

static bool one(const uint8_t *data, size_t n) {
    uint8_t *at = edge - n;
    memcpy(at, data, n);
    const char *field = NULL, *why = NULL;
    if (!parse_order(at, n, env, &order, &field, &why)) {
        if (!field || !why) abort();
        sink += strlen(field) + strlen(why);
        return false;
    }
    if (order.lowers < 1 || order.lowers > MAX_LOWERS || order.argc < 1 || order.argv[order.argc] || env[order.envc]) abort();
    texts(order.argv, order.argc, MAX_ARGS, at);
    texts(order.env, order.envc, MAX_ENV, at);
    texts(order.nodes, order.node_count, MAX_NODES, at);
    texts(order.links, order.link_count, 2 * MAX_LINKS, at);
    texts(order.masked, order.masked_count, MAX_PATHS, at);
    texts(order.readonly, order.readonly_count, MAX_PATHS, at);
    texts(order.groups, order.group_count, MAX_GROUPS, at);
    texts(order.made, order.made_count, MAX_GROUPS, at);
    texts(order.settings, order.setting_count, 2 * MAX_SETTINGS, at);
    text(order.socket, at);
    if (order.socket[0] != '/' || strlen(order.socket) >= MAX_SOCKET || order.setting_count % 2) abort();
    text(order.hostname, at);
    text(order.upper.size, at), text(order.upper.inodes, at), text(order.upper.path, at);
    if (order.group2) text(order.group2, at);
    if (order.mount_count > MAX_MOUNTS || order.rlimit_count > MAX_RLIMITS || order.link_count % 2) abort();
    for (int i = 0; i < order.mount_count; i++) {
        const struct mount_order *m = &order.mounts[i];
        text(m->fstype, at), text(m->source, at), text(m->target, at), text(m->data, at);
        if (m->target[0] != '/') abort();
    }
    if (order.filter) {
        if (order.filter_length < 1 || order.filter_length > MAX_FILTER || !order.no_new_privs) abort();
        for (int i = 0; i < order.filter_length * 8; i++) sink += order.filter[i];
    }
    if (order.has_ids && (!order.base || !order.count || order.base + order.count < order.base)) abort();
    return true;
}

/* One to four edits: a bit, an edge value, a cut, a doubled or a moved piece; the header's size is mostly put right again. */
static size_t mutate(uint8_t *data, size_t n) {
    static const uint32_t edges[] = {0, 1, 2, 7, 8, 19, 20, 63, 64, 65, 500, 501, 0x7fffffff, 0x80000000, 0xffffffff, 0xffff, 0x100};
    for (uint64_t edits = 1 + dice() % 4; edits; edits--) {
        size_t at = n ? dice() % n : 0;
        switch (dice() % 6) {
        case 0:
            if (n) data[at] ^= (uint8_t)(1 << dice() % 8);
            break;
        case 1: {
            uint32_t value = edges[dice() % (sizeof edges / sizeof *edges)];
            if (at + 4 <= n) memcpy(data + at, &value, dice() % 2 ? 4 : 2);
            break;
        }
        case 2: n = at; break;
        case 3: {
            size_t size = dice() % 64;
            if (at + size <= n && n + size <= ROOM) memmove(data + at + size, data + at, n - at), n += size;
            break;
        }
        case 4: {
            size_t size = dice() % 64;
            if (at + size <= n) memmove(data + at, data + at + size, n - at - size), n -= size;
            break;
        }
        default:
            if (n) data[at] = (uint8_t)dice();
        }
    }
    uint32_t total = (uint32_t)n;
    if (n >= 16 && dice() % 8) memcpy(data + 8, &total, 4);
    return n;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    static uint8_t seeds[8][ROOM], data[ROOM];
    size_t sizes[8] = {0};
    int count = 0;
    for (int i = 3; i < argc && count < 4; i++, count++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) return 2;
        sizes[count] = fread(seeds[count], 1, ROOM, file);
        fclose(file);
    }
    long page = sysconf(_SC_PAGESIZE);
    uint8_t *map = mmap(NULL, ROOM + (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || munmap(map + ROOM, (size_t)page)) return 2;
    edge = map + ROOM;
    state = strtoull(argv[2], NULL, 10) * 2654435761u + 88172645463325252u;
    int given = count;
    for (int i = 0; i < given; i++)
        if (!one(seeds[i], sizes[i])) return 3; /* what the node renders is read */
    time_t end = time(NULL) + atol(argv[1]);
    uint64_t read = 0, refused = 0;
    while (time(NULL) < end)
        for (int i = 0; i < 2000; i++) {
            int from = (int)(dice() % (uint64_t)count);
            memcpy(data, seeds[from], sizes[from]);
            size_t n = mutate(data, sizes[from]);
            if (!one(data, n)) refused++;
            else if (read++, dice() % 16 == 0) { /* what was read is a good place to begin from */
                int slot = count < 8 ? count++ : given + (int)(dice() % (uint64_t)(8 - given));
                memcpy(seeds[slot], data, n), sizes[slot] = n;
            }
        }
    printf("%llu frames, %llu read, %llu refused\n", (unsigned long long)(read + refused), (unsigned long long)read, (unsigned long long)refused);
    return 0;
}
