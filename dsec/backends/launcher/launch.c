/* Enters a sandbox's cgroups and a private mount namespace, builds its root there and becomes the OCI runtime.
 *
 *   dsec-launch [options] -- runtime arguments...
 *     -l N           descriptors 5 ... 5+N-1 are lower mounts, detached or of this mount namespace, topmost first
 *     -u BASE:COUNT  ids of the user namespace; without it owners are taken as they are
 *     -j             the runtime joins that namespace: it finds it at descriptor 600
 *     -t BYTES:INODES  the upper is a fresh tmpfs
 *     -d DIR         the upper is DIR/u with work directory DIR/w (made when missing)
 *     -b IMAGE       the upper is the ext4 file system in this file, through a loop device that clears itself
 *     -v             the overlay need not survive a crash of the node: it forgets syncs, and its end waits for no disk
 *     -o             the upper belongs to the namespace's ids on disk (kernels that cannot id-map this file system)
 *     -r ROOT        where the root is attached, an existing directory
 *     -p PREFIX      mount the overlay by paths PREFIX0, PREFIX1 ... (existing directories) instead of by descriptors
 *     -x             the descriptor after the lowers is the runtime's program; its path is used where that cannot be executed
 *     -c NAME        the command is CRIU: it gets the id BASE, which is to own the user namespace that it makes, and what it does not make:
 *                    a session keyring, and namespaces of cgroups, of System V objects and of this host name
 *     -g FILE        a cgroup to join by writing 0 to this file (v1: tasks, v2: cgroup.procs); may be repeated
 *
 * Descriptor 3 is the sandbox's listening socket and goes on to the runtime; 4 is the status pipe: one line that says what
 * failed, or nothing but its end when the runtime was executed. Because every mount is made in this process's own mount
 * namespace, all of them vanish with the last process of the sandbox: no kill can leak one.
 *
 * The runtime gets the upper's directory as descriptor 4 and hands it on to the sandbox's init: a read-only view, reached from
 * outside as /proc/<init>/fd/4, which needs no file system and no attachment of its own and ends with the sandbox.
 *
 * The cgroups are joined after the mounts are made: a superblock that is created inside a memory cgroup keeps that cgroup's
 * shrinker maps alive long after its removal.
 */
#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STATUS_FD = 4, UPPER_FD = 4, FIRST_LOWER = 5, USERNS_FD = 600 };

static int lowers[MAX_LOWERS], lower_count;
static const char *cgroups[MAX_GROUPS];
static int cgroup_count;
static int status_fd = STATUS_FD;

static void tell_and_end(int error, const char *text) {
    char line[1024];
    int length = snprintf(line, sizeof line, "%s: %s\n", text, strerror(error));
    if (length > (int)sizeof line - 1) length = sizeof line - 1;
    if (write(status_fd, line, length) < 0) _exit(112);
    _exit(111);
}

/* Moves the status pipe out of the way of the descriptor that the runtime expects in its place. */
static void hand_over(int kept) {
    int moved = fcntl(status_fd, F_DUPFD_CLOEXEC, FIRST_LOWER + MAX_LOWERS + 1);
    if (moved < 0) fail("move the status pipe");
    status_fd = moved;
    if (dup2(kept, UPPER_FD) < 0) fail("hand over the upper"); /* without close-on-exec */
    close(kept);
}

/* For kernels whose overlay takes no descriptors: everything is attached in this private namespace first. The upper's
 * mount takes the place after the last lower. */
static void overlay_by_paths(const char *prefix, const char *root, int upper, uint32_t mounter, int is_volatile, int *kept) {
    char options[4096], place[256];
    int used = snprintf(options, sizeof options, "xino=off,metacopy=off%s,lowerdir=", is_volatile ? ",volatile" : "");
    for (int i = 0; i <= lower_count; i++) {
        snprintf(place, sizeof place, "%s%d", prefix, i);
        if (syscall(SYS_MOVE_MOUNT, i < lower_count ? lowers[i] : upper, "", AT_FDCWD, place, MOVE_FROM_EMPTY))
            fail("attach a layer at %s", place);
        if (i < lower_count) used += snprintf(options + used, sizeof options - used, "%s%s", i ? ":" : "", place);
        if (used > (int)sizeof options - 1024) errno = E2BIG, fail("overlay options");
    }
    snprintf(options + used, sizeof options - used, ",upperdir=%s/u,workdir=%s/w", place, place);
    if (mounter) act_as(mounter);
    if (mount("overlay", root, "overlay", MS_NODEV, options)) fail("mount overlay with %s", options);
    if (mounter) act_as(0);
    *kept = keep_upper(upper);
    for (int i = 0; i <= lower_count; i++) {
        snprintf(place, sizeof place, "%s%d", prefix, i);
        umount2(place, MNT_DETACH);
    }
}

int launch_main(int argc, char **argv) {
    unsigned base = 0, count = 0;
    const char *size = 0, *directory = 0, *device = 0, *root = 0, *prefix = 0, *restored = 0;
    char *inodes = 0;
    int descriptors = 0, join = 0, own = 0, is_volatile = 0, program = -1, option;
    on_failure = tell_and_end;
    fcntl(STATUS_FD, F_SETFD, FD_CLOEXEC);
    while ((option = getopt(argc, argv, "+l:u:jt:d:b:ovxc:r:p:g:")) != -1) switch (option) {
        case 'l': descriptors = atoi(optarg); break;
        case 'u':
            if (sscanf(optarg, "%u:%u", &base, &count) != 2) errno = EINVAL, fail("-u %s", optarg);
            break;
        case 't':
            inodes = strchr(optarg, ':');
            if (!inodes) errno = EINVAL, fail("-t %s", optarg);
            *inodes++ = 0;
            size = optarg;
            break;
        case 'd': directory = optarg; break;
        case 'j': join = 1; break;
        case 'o': own = 1; break;
        case 'c': restored = optarg; break;
        case 'v': is_volatile = 1; break;
        case 'x': program = 0; break;
        case 'b': device = optarg; break;
        case 'r': root = optarg; break;
        case 'p': prefix = optarg; break;
        case 'g':
            if (cgroup_count == MAX_GROUPS) errno = E2BIG, fail("more than %d cgroups", MAX_GROUPS);
            cgroups[cgroup_count++] = optarg;
            break;
        default: errno = EINVAL, fail("unknown option");
    }
    if (!root || (!size && !directory && !device) || optind >= argc)
        errno = EINVAL, fail("-r, one of -t, -d and -b, and a command are needed");
    if (descriptors < 0 || descriptors > MAX_LOWERS) errno = E2BIG, fail("more than %d layers", MAX_LOWERS);

    /* Only the namespace that made a detached mount may clone it: everything is made here, and attached after the unshare. */
    int userns = count ? make_userns(base, count) : -1;
    for (int i = 0; i < descriptors; i++) {
        fcntl(FIRST_LOWER + i, F_SETFD, FD_CLOEXEC);
        lowers[lower_count++] = clone_mount(FIRST_LOWER + i, "", userns);
        close(FIRST_LOWER + i);
    }
    struct upper wanted = {
        .kind = size ? UPPER_TMPFS : device ? UPPER_LOOP : UPPER_DIRECTORY, .size = size, .inodes = inodes,
        .path = device ? device : directory, .owned_by = own ? base : 0,
    };
    int upper = make_upper(&wanted, userns);
    int overlay = prefix ? -1 : overlay_by_descriptors(lowers, lower_count, upper, base, is_volatile);
    int kept = prefix ? -1 : keep_upper(upper);

    if (unshare(CLONE_NEWNS)) fail("unshare the mount namespace");
    if (mount(0, "/", 0, MS_REC | MS_PRIVATE, 0)) fail("make mounts private");
    if (prefix) overlay_by_paths(prefix, root, upper, base, is_volatile, &kept);
    else if (syscall(SYS_MOVE_MOUNT, overlay, "", AT_FDCWD, root, MOVE_FROM_EMPTY)) fail("attach the root at %s", root);
    if (overlay >= 0) close(overlay);
    close(upper);
    for (int i = 0; i < lower_count; i++) close(lowers[i]);

    /* 0 is the writer itself: in a v1 tasks file that skips the kernel's lock of all thread groups and its grace period. */
    for (int i = 0; i < cgroup_count; i++) write_file(cgroups[i], "0");
    if (restored) {
        forget_keys();
        become_owner(base);
        if (unshare(CLONE_NEWCGROUP | CLONE_NEWIPC | CLONE_NEWUTS)) fail("make namespaces");
        if (sethostname(restored, strlen(restored))) fail("set the host name");
    }
    hand_over(kept);
    if (join && userns >= 0 && dup3(userns, USERNS_FD, 0) < 0) fail("keep the user namespace");
    if (program >= 0) {
        program = FIRST_LOWER + descriptors;
        fcntl(program, F_SETFD, FD_CLOEXEC);
        syscall(SYS_execveat, program, "", argv + optind, environ, AT_EMPTY_PATH);
        close(program);
    }
    execv(argv[optind], argv + optind);
    fail("execute %s", argv[optind]);
}
