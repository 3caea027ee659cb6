/* A process made ahead: all of the sandbox that is likely to be ordered next, but for its names and its agent.
 *
 * It stands in its root, namespaces and cgroups, behind its filter, and waits. An order that is for its user namespace and wants the same of
 * all that is in it (`ahead_fits`) takes it: its socket and its cgroups get the sandbox's names, its host too, and it executes the agent with
 * the order's arguments and environment.
 *
 * All of it is new, and nothing of an order comes to it before it is taken. One that is not taken is killed; so it ends with the zygote, which
 * holds the only other end of its line. Names made ahead begin with "ahead-": of cgroups and sockets whose zygote was killed they say that
 * nobody needs them, and the Edge removes those when it next begins or ends.
 *
 * cgroup v2 renames no group, and moves a process only after a wait for all others, so there only namespaces are made ahead. */
#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <linux/sched.h>

enum { MAX_KEPT = 64 << 10, MAX_OPTIONS = 256, END_MS = 2000, WITH_INODE = 0x100, UNIQUE_MOUNT = 0x4000 };

struct layer {
    uint64_t mount, inode;
};

static uint8_t kept_frame[MAX_KEPT]; /* of the order that it is made like */
static struct order kept;
static char options[MAX_MOUNTS][MAX_OPTIONS]; /* of its mounts, where they name an id */
static struct layer layers[MAX_LOWERS];
static char groups[MAX_GROUPS][PATH_MAX]; /* its cgroups; "": there is none of that number, or it has its sandbox's name */
static char address[MAX_SOCKET];          /* its socket; "" as above */
static struct started waiting;            /* pid 0: there is none */
static int line;                          /* to it; readable once it waits, or has ended */
static bool away;                         /* this process has its host's names */

/* --- whether an order's can be made ahead, and whether one fits an order */

/* The number of the group that a path lies below, and the rest of it. -1: of none. */
static int group_of(const struct order *o, const char *path, const char **rest) {
    for (int i = 0; i < o->made_count; i++) {
        size_t length = strlen(o->made[i]);
        if (!strncmp(path, o->made[i], length) && path[length] == '/') {
            *rest = path + length;
            return i;
        }
    }
    return -1;
}

static bool can_be_ahead(const struct order *o) {
    const char *rest;
    if (!o->has_ids || o->group2 || !o->made_count || o->upper.kind != UPPER_TMPFS) return false;
    for (int i = 0; i < o->group_count; i++)
        if (group_of(o, o->groups[i], &rest) < 0) return false;
    for (int i = 0; i < o->setting_count; i += 2)
        if (group_of(o, o->settings[i], &rest) < 0) return false;
    return true;
}

static bool same_texts(const char *const *a, int count, const char *const *b, int other) {
    if (count != other) return false;
    for (int i = 0; i < count; i++)
        if (strcmp(a[i], b[i])) return false;
    return true;
}

static bool same_mounts(const struct order *a, const struct order *b) {
    if (a->mount_count != b->mount_count) return false;
    for (int i = 0; i < a->mount_count; i++) {
        const struct mount_order *m = &a->mounts[i], *n = &b->mounts[i];
        const char *const one[] = {m->fstype, m->source, m->target, m->data}, *const other[] = {n->fstype, n->source, n->target, n->data};
        if (m->flags != n->flags || !same_texts(one, 4, other, 4)) return false;
    }
    return true;
}

static size_t home_length(const char *path) { return (size_t)(strrchr(path, '/') + 1 - path); }

static bool same_home(const char *a, const char *b) {
    size_t length = home_length(a);
    return !strncmp(a, b, length) && !strchr(b + length, '/');
}

/* The same hierarchies in the same order: a group's name is what differs. */
static bool same_homes(const struct order *a, const struct order *b) {
    const char *rest, *other;
    if (a->made_count != b->made_count || a->group_count != b->group_count || !same_home(a->socket, b->socket)) return false;
    for (int i = 0; i < a->made_count; i++)
        if (!same_home(a->made[i], b->made[i])) return false;
    for (int i = 0; i < a->group_count; i++)
        if (group_of(a, a->groups[i], &rest) != group_of(b, b->groups[i], &other) || strcmp(rest, other)) return false;
    return true;
}

static bool same_rlimits(const struct order *a, const struct order *b) {
    if (a->rlimit_count != b->rlimit_count) return false;
    for (int i = 0; i < a->rlimit_count; i++) {
        const struct rlimit_order *l = &a->rlimits[i], *m = &b->rlimits[i];
        if (l->resource != m->resource || l->soft != m->soft || l->hard != m->hard) return false;
    }
    return true;
}

static bool same_filter(const struct order *a, const struct order *b) {
    return a->filter_length == b->filter_length && !a->filter == !b->filter && (!a->filter || !memcmp(a->filter, b->filter, (size_t)a->filter_length * 8));
}

static bool same_upper(const struct upper *a, const struct upper *b) {
    return a->kind == b->kind && a->owned_by == b->owned_by && !strcmp(a->size, b->size) && !strcmp(a->inodes, b->inodes);
}

/* A mount has a number that the kernel never gives again. */
static bool identify(int fd, struct layer *layer) {
    struct { /* as the kernel has it: the C library's may be older */
        uint32_t mask, others[7];
        uint64_t inode, more[13], mount, rest[13];
    } found;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, WITH_INODE | UNIQUE_MOUNT, &found) || !(found.mask & UNIQUE_MOUNT)) return false;
    *layer = (struct layer){found.mount, found.inode};
    return true;
}

static bool same_layers(const int *fds, uint32_t count) {
    struct layer layer;
    if (count != kept.lowers) return false;
    for (uint32_t i = 0; i < count; i++)
        if (!identify(fds[i], &layer) || layer.mount != layers[i].mount || layer.inode != layers[i].inode) return false;
    return true;
}

/* Which of an order's settings is the one that was written ahead as number `s`; -1: it wants none. */
static int setting_like(const struct order *o, int s) {
    const char *rest, *other;
    int group = group_of(&kept, kept.settings[s], &rest);
    for (int i = 0; i < o->setting_count; i += 2)
        if (group_of(o, o->settings[i], &other) == group && !strcmp(rest, other)) return i;
    return -1;
}

/* All that is in a frame, but for names, arguments, environment, and what is written into the cgroups. */
static bool like_kept(const struct order *o, const int *fds) {
    if (o->base != kept.base || o->count != kept.count || o->namespaces != kept.namespaces || o->caps != kept.caps || o->has_oom != kept.has_oom ||
        o->oom != kept.oom || o->no_new_privs != kept.no_new_privs)
        return false;
    for (int s = 0; s < kept.setting_count; s += 2)
        if (setting_like(o, s) < 0) return false;
    return same_filter(o, &kept) && same_layers(fds, o->lowers) && same_upper(&o->upper, &kept.upper) && same_mounts(o, &kept) && same_rlimits(o, &kept) &&
           same_homes(o, &kept) && same_texts(o->nodes, o->node_count, kept.nodes, kept.node_count) &&
           same_texts(o->links, o->link_count, kept.links, kept.link_count) && same_texts(o->masked, o->masked_count, kept.masked, kept.masked_count) &&
           same_texts(o->readonly, o->readonly_count, kept.readonly, kept.readonly_count);
}

/* It may still be on its way: its steps take less than those of another would. One that failed has ended. */
static bool waits(void) {
    struct pollfd told = {.fd = line, .events = POLLIN}, ended = {.fd = waiting.pidfd, .events = POLLIN};
    char byte;
    return poll(&told, 1, END_MS) == 1 && recv(line, &byte, 1, MSG_DONTWAIT) == 1 && poll(&ended, 1, 0) == 0;
}

bool ahead_is_there(void) { return waiting.pid; }

/* Where there are groups of its names already, an earlier try's or spares of the Edge's (dsec/qos/spares.py), those are its. */
bool ahead_fits(const struct order *o, const int *fds) {
    return waiting.pid && can_be_ahead(o) && like_kept(o, fds) && access(o->made[0], F_OK) && !access(address, F_OK) && waits();
}

bool ahead_leave(void) {
    bool whole = waits();
    syscall(SYS_pidfd_send_signal, waiting.pidfd, SIGKILL, NULL, 0);
    return whole;
}

/* --- making one */

/* The owner of terminals is an id of the sandbox, as the node numbers it. */
static void translate(const char **data, char *room, uint32_t before) {
    const char *gid = strstr(*data, "gid=");
    if (!gid) return;
    char *end;
    unsigned long id = strtoul(gid + 4, &end, 10);
    if (id < before || id - before >= kept.count) errno = EINVAL, fail("make a process ahead: the owner of terminals is %lu", id);
    if (snprintf(room, MAX_OPTIONS, "%.*s%lu%s", (int)(gid + 4 - *data), *data, id - before + kept.base, end) >= MAX_OPTIONS) errno = E2BIG, fail("make a process ahead");
    *data = room;
}

static void keep(const uint8_t *frame, size_t size, const char **environment, uint32_t base) {
    const char *field, *why;
    memcpy(kept_frame, frame, size);
    if (!parse_order(kept_frame, size, environment, &kept, &field, &why)) errno = EINVAL, fail("make a process ahead: %s", field);
    uint32_t before = kept.base;
    kept.base = base;
    if (kept.upper.owned_by == before) kept.upper.owned_by = base;
    for (int i = 0; i < kept.mount_count; i++)
        if (!strcmp(kept.mounts[i].fstype, "devpts")) translate(&kept.mounts[i].data, options[i], before);
}

/* What stands in for the last part of a path of the order's. */
static void name_ahead(char *to, size_t room, const char *path) {
    if (snprintf(to, room, "%.*sahead-%d", (int)home_length(path), path, (int)getpid()) >= (int)room) errno = ENAMETOOLONG, fail("name what is made ahead");
}

static void make_groups(void) {
    const char *rest;
    for (int i = 0; i < kept.made_count; i++) {
        char path[PATH_MAX];
        name_ahead(path, sizeof path, kept.made[i]);
        if (mkdir(path, 0755) && (errno != EEXIST || rmdir(path) || mkdir(path, 0755))) fail("make the cgroup %s", path);
        strcpy(groups[i], path);
    }
    for (int s = 0; s < kept.setting_count; s += 2) {
        char path[PATH_MAX + NAME_MAX];
        snprintf(path, sizeof path, "%s%s", groups[group_of(&kept, kept.settings[s], &rest)], rest);
        write_file(path, kept.settings[s + 1]);
    }
}

/* The root, as it is made for an order (`start` in zygote.c). */
static void make_root(const struct ahead *a, struct prepared *prepared) {
    static int lowers[MAX_LOWERS];
    for (uint32_t i = 0; i < kept.lowers; i++) {
        if (!identify(a->layers[i], &layers[i])) fail("know a layer again");
        lowers[i] = clone_mount(a->layers[i], "", a->userns);
    }
    int upper = make_upper(&kept.upper, a->userns);
    prepared->overlay = overlay_by_descriptors(lowers, (int)kept.lowers, upper, kept.base, true);
    prepared->upper = keep_upper(upper);
}

void ahead_make(const struct ahead *a) {
    static int homes[MAX_GROUPS];
    static const char *joins[MAX_GROUPS];
    static char paths[MAX_GROUPS][PATH_MAX + NAME_MAX];
    const char *rest;
    if (a->size > MAX_KEPT || !can_be_ahead(a->order)) return;
    keep(a->frame, a->size, a->environment, a->base);
    struct prepared prepared = a->prepared;
    make_root(a, &prepared);
    make_groups();
    for (int i = 0; i < kept.group_count; i++) {
        snprintf(paths[i], sizeof paths[i], "%s%s", groups[group_of(&kept, kept.groups[i], &rest)], rest);
        homes[i] = open_home(paths[i], &joins[i]);
    }
    name_ahead(address, sizeof address, kept.socket);
    prepared.listener = listen_at(address);
    int ends[2], sides[2], pidfd = -1;
    if (pipe2(ends, O_CLOEXEC) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sides)) fail("make a line to a process");
    prepared.order = &kept;
    prepared.later = a->order;
    prepared.line = sides[1];
    prepared.news = ends[1];
    prepared.homes = homes;
    prepared.joins = joins;
    prepared.groups_made = -1;
    struct clone_args how = {.flags = CLONE_NEWPID | CLONE_PARENT | CLONE_PIDFD, .pidfd = (uintptr_t)&pidfd};
    long pid = syscall(SYS_CLONE3, &how, sizeof how);
    if (pid < 0) fail("make a process ahead");
    if (pid == 0) {
        close(sides[0]);
        a->in_child(ends[1]);
        become_sandbox(&prepared);
    }
    close(ends[1]), close(sides[1]), close(prepared.listener);
    for (int i = 0; i < kept.group_count; i++) close(homes[i]);
    waiting = (struct started){.pid = (int)pid, .pidfd = pidfd, .news = ends[0], .groups_made = -1, .ahead = true, .whole = true};
    line = sides[0];
}

/* --- giving it what its order says */

struct started ahead_take(const struct order *o) {
    if (rename(address, o->socket)) fail("name the socket %s", o->socket);
    address[0] = 0;
    return waiting;
}

static void come_home(int home_names) {
    if (!away) return;
    if (setns(home_names, CLONE_NEWUTS)) {
        dprintf(2, "zygote: return from a sandbox's namespace: %s\n", strerror(errno));
        _exit(3); /* nothing more may be done from there */
    }
    away = false;
}

/* What was written ahead and is wanted otherwise, and what was not. Memory and memory with swap bound each other, upwards in one order and
 * downwards in the other: what the kernel refuses is tried once more after the rest. */
static void settle_groups(const struct order *o) {
    static bool written[MAX_SETTINGS];
    const char *rest;
    memset(written, 0, sizeof written);
    for (int s = 0; s < kept.setting_count; s += 2) {
        int i = setting_like(o, s);
        written[i / 2] = !strcmp(o->settings[i + 1], kept.settings[s + 1]);
    }
    for (int again = 0; again < 2; again++)
        for (int i = 0; i < o->setting_count; i += 2) {
            if (written[i / 2]) continue;
            char path[PATH_MAX + NAME_MAX];
            snprintf(path, sizeof path, "%s%s", groups[group_of(o, o->settings[i], &rest)], rest);
            if (again) write_file(path, o->settings[i + 1]);
            else written[i / 2] = try_write(path, o->settings[i + 1]);
        }
}

static void name_groups(const struct order *o) {
    for (int i = 0; i < o->made_count; i++) {
        if (rename(groups[i], o->made[i])) fail("name the cgroup %s", o->made[i]);
        groups[i][0] = 0;
    }
}

void ahead_go(const struct order *o, int home_names) {
    settle_groups(o);
    if (o->namespaces & CLONE_NEWUTS) {
        away = true;
        if (setns(waiting.pidfd, CLONE_NEWUTS)) fail("enter the namespace made ahead");
        name_host(o);
        come_home(home_names);
    }
    name_groups(o); /* first: once there is an agent, whoever asked may end it, with all that has its name */
    if (send(line, "", 1, MSG_NOSIGNAL) != 1) fail("tell the process made ahead");
}

/* --- its end */

void ahead_taken_over(void) { waiting.pid = 0; }

void ahead_dismiss(int home_names) {
    come_home(home_names);
    if (waiting.pid) {
        struct pollfd ended = {.fd = waiting.pidfd, .events = POLLIN};
        syscall(SYS_pidfd_send_signal, waiting.pidfd, SIGKILL, NULL, 0);
        poll(&ended, 1, END_MS); /* a group with a process in it stays */
    }
    waiting.pid = 0;
    for (int i = 0; i < MAX_GROUPS; i++)
        if (groups[i][0]) rmdir(groups[i]), groups[i][0] = 0;
    if (address[0]) unlink(address), address[0] = 0;
}
