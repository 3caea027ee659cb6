/* From a fresh process in a pid namespace of its own to the agent.
 *
 * Its mount namespace is a copy of one that holds an empty, read-only directory and nothing else: the sandbox's root is attached
 * over it and entered. So there is nothing of the node below, and no walk over all tasks of the node (pivot_root's) either.
 *
 * The user namespace is joined late, when every mount is made: mounts belong to the node's user namespace, so that root inside
 * can neither undo a mask nor mount. The namespaces that root inside may govern (network, IPC, UTS) were made in it.
 *
 * The cgroups are joined after the mounts: a superblock that is made inside a memory cgroup keeps that cgroup's shrinker maps
 * alive long after its removal. */
#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LISTENER_FD = 3, UPPER_FD = 4 };

static void attach(int mount, const char *path) {
    if (syscall(SYS_MOVE_MOUNT, mount, "", AT_FDCWD, path, MOVE_FROM_EMPTY)) fail("attach a mount at %s", path);
    close(mount);
}

static void enter_root(const struct prepared *p) {
    if (setns(p->empty_namespace, CLONE_NEWNS)) fail("enter the empty mount namespace");
    if (unshare(CLONE_NEWNS)) fail("make a mount namespace");
    if (syscall(SYS_MOVE_MOUNT, p->overlay, "", AT_FDCWD, "/", MOVE_FROM_EMPTY)) fail("attach the root");
    if (fchdir(p->overlay) || chroot(".") || chdir("/")) fail("enter the root");
    close(p->overlay);
}

static void mount_all(const struct order *o) {
    for (int i = 0; i < o->mount_count; i++) {
        const struct mount_order *m = &o->mounts[i];
        bool owned = o->has_ids && !strcmp(m->fstype, "devpts"); /* its nodes belong to whoever mounts it */
        if (mkdir(m->target, 0755) && errno != EEXIST) fail("make %s", m->target);
        if (owned) act_as(o->base);
        if (mount(m->source, m->target, m->fstype, m->flags, m->data)) fail("mount %s at %s with %s", m->fstype, m->target, m->data);
        if (owned) act_as(0);
    }
}

static void make_devices(const struct prepared *p, const int *nodes) {
    const struct order *o = p->order;
    char path[64];
    for (int i = 0; i < o->node_count; i++) {
        snprintf(path, sizeof path, "/dev/%.48s", o->nodes[i]);
        int place = open(path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_EXCL, 0666);
        if (place < 0 && errno != EEXIST) fail("make a place for %s", path);
        if (place >= 0) close(place);
        attach(nodes[i], path);
    }
    for (int i = 0; i < o->link_count; i += 2)
        if (symlink(o->links[i], o->links[i + 1]) && errno != EEXIST) fail("link %s", o->links[i + 1]);
}

/* A cover of a file is /dev/null, that of a directory an empty one: the first by descriptor, the next as copies of the first. */
static void mask(const struct order *o, int empty_directory) {
    const char *covered = NULL;
    for (int i = 0; i < o->masked_count; i++) {
        struct stat st;
        if (lstat(o->masked[i], &st)) {
            if (errno == ENOENT) continue; /* this kernel has no such file */
            fail("look at %s", o->masked[i]);
        }
        if (!S_ISDIR(st.st_mode)) attach(clone_mount(AT_FDCWD, "/dev/null", -1), o->masked[i]);
        else if (covered) attach(clone_mount(AT_FDCWD, covered, -1), o->masked[i]);
        else attach(empty_directory, covered = o->masked[i]);
    }
    if (!covered) close(empty_directory);
}

static void make_readonly(const struct order *o) {
    struct attributes attributes = {.set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC};
    for (int i = 0; i < o->readonly_count; i++) {
        if (access(o->readonly[i], F_OK) && errno == ENOENT) continue;
        int copy = clone_mount(AT_FDCWD, o->readonly[i], -1);
        if (syscall(SYS_MOUNT_SETATTR, copy, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) fail("make %s read-only", o->readonly[i]);
        attach(copy, o->readonly[i]);
    }
}

static void join_groups(const struct prepared *p) {
    char made;
    if (p->groups_made >= 0 && read(p->groups_made, &made, 1) != 1) errno = ECHILD, fail("make the cgroups");
    for (int i = 0; i < p->order->group_count; i++) {
        int tasks = openat(p->homes[i], p->joins[i], O_WRONLY | O_CLOEXEC);
        if (tasks < 0 || write(tasks, "0", 1) != 1) fail("join the cgroup of %s", p->order->groups[i]);
        close(tasks), close(p->homes[i]);
    }
    if (p->order->namespaces & CLONE_NEWCGROUP && unshare(CLONE_NEWCGROUP)) fail("make a cgroup namespace");
}

/* Raw calls: this process has one thread, and libc's would look for others. */
static void become_root(void) {
    if (syscall(SYS_setgroups, 0, 0) || syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0)) fail("become root inside");
}

int raise_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request)) return -1;
    return close(fd);
}

void name_host(const struct order *o) {
    if (o->namespaces & CLONE_NEWUTS && sethostname(o->hostname, strlen(o->hostname))) fail("set the host name");
}

/* Those that root inside governs: the nurse has made them, in the user namespace; without one they are made here. */
static void join_namespaces(const struct prepared *p) {
    int others = (int)p->order->namespaces & (CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET);
    if (p->nurse >= 0) {
        char told;
        if (p->nurse_told >= 0 && read(p->nurse_told, &told, 1) != 1) errno = ECHILD, fail("make the namespaces %#x", (unsigned)others);
        if (setns(p->nurse, CLONE_NEWUSER | others)) fail("join the user namespace");
    } else {
        if (others && unshare(others)) fail("make the namespaces %#x", (unsigned)others);
        if (others & CLONE_NEWNET && raise_loopback()) fail("raise the loopback interface");
    }
    become_root();
    if (!p->later) name_host(p->order);
}

/* Both are moved above the numbers that they get, so that neither can overwrite the other. Standard error is the holder's log. */
static void keep_two(int listener, int upper) {
    if (dup2(0, 2) < 0) fail("leave standard error");
    int a = fcntl(listener, F_DUPFD_CLOEXEC, UPPER_FD + 1), b = fcntl(upper, F_DUPFD_CLOEXEC, UPPER_FD + 1);
    if (a < 0 || b < 0 || dup2(a, LISTENER_FD) < 0 || dup2(b, UPPER_FD) < 0) fail("hand over descriptors");
}

/* Made ahead of its order: says that all is done, and ends when no order comes. Until then nothing of one is in it. */
static void await_order(int line) {
    char byte = 0;
    if (write(line, &byte, 1) != 1 || read(line, &byte, 1) != 1) _exit(0);
    close(line);
}

void become_sandbox(const struct prepared *p) {
    const struct order *o = p->order;
    int nodes[MAX_NODES];
    /* Only the mount namespace that made a detached mount may clone it: now, while this is the holder's. */
    for (int i = 0; i < o->node_count; i++) nodes[i] = clone_mount(p->nodes[i], "", -1);
    int empty_directory = clone_mount(p->empty_directory, "", -1);
    umask(0);
    enter_root(p);
    mount_all(o);
    make_devices(p, nodes);
    mask(o, empty_directory);
    make_readonly(o);
    char text[16];
    snprintf(text, sizeof text, "%d", o->oom);
    if (o->has_oom) write_file("/proc/self/oom_score_adj", text);
    join_groups(p);
    join_namespaces(p);
    umask(022);
    if (setsid() < 0) fail("make a session");
    take_away(o);
    if (p->later) await_order(p->line), o = p->later;
    keep_two(p->listener, p->upper);
    struct pollfd asked = {.fd = p->news, .events = 0};
    if (poll(&asked, 1, 0) > 0 && asked.revents & POLLERR) _exit(113); /* whoever asked for this sandbox is gone */
    execve(o->argv[0], (char **)o->argv, (char **)o->env);
    fail("execute %s", o->argv[0]);
}
