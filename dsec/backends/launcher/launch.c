/* Enters a sandbox's cgroups and a private mount namespace, builds its root there and becomes the OCI runtime.
 *
 *   dsec-launch [options] -- runtime arguments...
 *     -l N           descriptors 5 ... 5+N-1 are lower mounts, detached or of this mount namespace, topmost first
 *     -u BASE:COUNT  ids of the user namespace; without it owners are taken as they are
 *     -j             the runtime joins that namespace: it finds it at descriptor 600
 *     -t BYTES:INODES  the upper is a fresh tmpfs
 *     -d DIR         the upper is DIR/u with work directory DIR/w (made when missing)
 *     -b IMAGE       the upper is the ext4 file system in this file, through a loop device that clears itself
 *     -o             the upper belongs to the namespace's ids on disk (kernels that cannot id-map this file system)
 *     -r ROOT        where the root is attached, an existing directory
 *     -p PREFIX      mount the overlay by paths PREFIX0, PREFIX1 ... (existing directories) instead of by descriptors
 *     -x             the descriptor after the lowers is the runtime's program; its path is used where that cannot be executed
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
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/capability.h>
#include <linux/loop.h>

/* Numbers are the same on every architecture since Linux 5.1. */
#define SYS_OPEN_TREE 428
#define SYS_MOVE_MOUNT 429
#define SYS_FSOPEN 430
#define SYS_FSCONFIG 431
#define SYS_FSMOUNT 432
#define SYS_MOUNT_SETATTR 442

enum { CONFIG_FLAG = 0, CONFIG_STRING = 1, CONFIG_FD = 5, CONFIG_CREATE = 6 };
enum { CLOEXEC_FS = 1, TREE_CLONE = 1, MOVE_FROM_EMPTY = 4, ATTR_RDONLY = 1, ATTR_NODEV = 4, ATTR_IDMAP = 0x100000 };
enum { STATUS_FD = 4, UPPER_FD = 4, FIRST_LOWER = 5, USERNS_FD = 600, MAX_LOWERS = 500, MAX_CGROUPS = 16 };

struct attributes {
    uint64_t set, clear, propagation, userns;
};

static int lowers[MAX_LOWERS], lower_count;
static const char *cgroups[MAX_CGROUPS];
static int cgroup_count;
static unsigned owned_by;
static int status_fd = STATUS_FD;

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    int error = errno;
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 128, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 129) length = sizeof line - 129;
    length += snprintf(line + length, sizeof line - length, ": %s\n", strerror(error));
    if (write(status_fd, line, length) < 0) _exit(112);
    _exit(111);
}

/* The kernel explains a failed fsconfig on the context's descriptor, better than errno does. */
__attribute__((noreturn)) static void fail_fs(int context, const char *what) {
    int error = errno;
    char reason[512];
    ssize_t length = read(context, reason, sizeof reason - 1);
    reason[length > 0 ? length : 0] = 0;
    errno = error;
    fail("%s%s%s", what, *reason ? ": " : "", reason);
}

static int configure(int context, int command, const char *key, const void *value, int aux) {
    return syscall(SYS_FSCONFIG, context, command, key, value, aux);
}

static int directory_at(int base, const char *name) {
    int fd = openat(base, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) fail("open %s", name);
    return fd;
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail("write %s", path);
    close(fd);
}

/* A user namespace that nobody lives in: a child makes it, its maps are written, the descriptor keeps it. The runtime joins it.
 * Its owner is the id that root inside has outside: the kernel counts what a namespace uses of its tables (inotify instances
 * and watches, namespaces) for its owner too, so a sandbox that takes all there is takes it from itself alone. */
static int make_userns(unsigned base, unsigned count) {
    int made[2];
    if (pipe2(made, O_CLOEXEC)) fail("make a pipe");
    long child = syscall(SYS_clone, (unsigned long)SIGCHLD, 0, 0, 0, 0);
    if (child < 0) fail("make a process for a user namespace");
    if (child == 0) {
        close(made[0]);
        /* The raw calls: this process has one thread, and libc's would look for others. */
        if (syscall(SYS_setgroups, 0, 0) || syscall(SYS_setresgid, base, base, base) || syscall(SYS_setresuid, base, base, base) || unshare(CLONE_NEWUSER))
            _exit(errno);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* after the change of ids, which clears it */
        if (write(made[1], "", 1) != 1) _exit(errno);
        for (;;) pause();
    }
    close(made[1]);
    char path[64], map[64];
    int status = 0;
    if (read(made[0], path, 1) != 1) {
        waitpid(child, &status, 0);
        errno = WEXITSTATUS(status);
        fail("make a user namespace");
    }
    close(made[0]);
    snprintf(map, sizeof map, "0 %u %u", base, count);
    snprintf(path, sizeof path, "/proc/%ld/uid_map", child);
    write_file(path, map);
    snprintf(path, sizeof path, "/proc/%ld/gid_map", child);
    write_file(path, map);
    snprintf(path, sizeof path, "/proc/%ld/ns/user", child);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("open %s", path);
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
    return fd;
}

static void idmap(int mount, int userns) {
    struct attributes attributes = {.set = ATTR_IDMAP, .userns = userns};
    if (syscall(SYS_MOUNT_SETATTR, mount, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) fail("idmap a mount");
}

/* A private copy of a mount; `path` is relative to `fd`, or empty for the mount itself. */
static int clone_mount(int fd, const char *path, int userns) {
    int copy = syscall(SYS_OPEN_TREE, fd, path, TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
    if (copy < 0) fail("clone the mount of %s", *path ? path : "a layer");
    if (userns >= 0) idmap(copy, userns);
    return copy;
}

/* The overlay's two directories, owned by id 0 of the sandbox: by an id map, or on disk where the kernel has none for it. */
static void own_upper(int mount, int userns) {
    if ((mkdirat(mount, "u", 0755) && errno != EEXIST) || (mkdirat(mount, "w", 0755) && errno != EEXIST))
        fail("make the upper's directories");
    if (owned_by && (fchownat(mount, "u", owned_by, owned_by, AT_SYMLINK_NOFOLLOW) || fchownat(mount, "w", owned_by, owned_by, AT_SYMLINK_NOFOLLOW)))
        fail("chown the upper's directories");
    if (userns >= 0 && !owned_by) idmap(mount, userns);
}

static int finish_upper(int context, const char *what, int userns) {
    if (configure(context, CONFIG_CREATE, 0, 0, 0)) fail_fs(context, what);
    int mount = syscall(SYS_FSMOUNT, context, CLOEXEC_FS, ATTR_NODEV);
    if (mount < 0) fail_fs(context, what);
    close(context);
    own_upper(mount, userns);
    return mount;
}

static int make_tmpfs(const char *size, const char *inodes, int userns) {
    int context = syscall(SYS_FSOPEN, "tmpfs", CLOEXEC_FS);
    if (context < 0) fail("fsopen tmpfs");
    if (configure(context, CONFIG_STRING, "size", size, 0) || configure(context, CONFIG_STRING, "nr_inodes", inodes, 0) ||
        configure(context, CONFIG_STRING, "mode", "0755", 0))
        fail_fs(context, "tmpfs for the upper");
    return finish_upper(context, "tmpfs for the upper", userns);
}

/* A loop device is free for others until it is configured: the one that was offered may be gone by then. */
static int attach_loop(const char *image, char *path, size_t room) {
    int backing = open(image, O_RDWR | O_CLOEXEC), control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (backing < 0) fail("open %s", image);
    if (control < 0) fail("open /dev/loop-control");
    for (int tries = 0; tries < 64; tries++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        if (number < 0) fail("find a free loop device");
        snprintf(path, room, "/dev/loop%d", number);
        int loop = open(path, O_RDWR | O_CLOEXEC);
        if (loop < 0) fail("open %s", path);
        struct loop_config config = {.fd = backing, .block_size = 4096, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
        strncpy((char *)config.info.lo_file_name, image, LO_NAME_SIZE - 1);
        if (!ioctl(loop, LOOP_CONFIGURE, &config)) {
            close(backing), close(control);
            return loop;
        }
        if (errno != EBUSY) fail("configure %s", path);
        close(loop);
    }
    errno = EBUSY;
    fail("find a free loop device");
}

static int open_ext4(const char *image, int userns) {
    char device[32];
    int loop = attach_loop(image, device, sizeof device); /* closed once the mount holds the device */
    int context = syscall(SYS_FSOPEN, "ext4", CLOEXEC_FS);
    if (context < 0) fail("fsopen ext4");
    if (configure(context, CONFIG_STRING, "source", device, 0)) fail_fs(context, "ext4 for the upper");
    int mount = finish_upper(context, "ext4 for the upper", userns);
    close(loop);
    return mount;
}

static int open_upper_directory(const char *path, int userns) {
    int mount = clone_mount(AT_FDCWD, path, -1);
    own_upper(mount, userns);
    return mount;
}

/* The overlay remembers its mounter's credentials and acts with them: the mounter's fsuid must be in the id map, or the
 * overlay is silently read-only. Changing fsuid away from 0 drops capabilities that making the overlay needs. */
static void act_as(unsigned id) {
    setfsuid(id);
    setfsgid(id);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data)) fail("capget");
    data[0].effective = data[0].permitted;
    data[1].effective = data[1].permitted;
    if (syscall(SYS_capset, &header, data)) fail("capset");
}

static int overlay_by_descriptors(int upper, unsigned mounter, int is_volatile) {
    int context = syscall(SYS_FSOPEN, "overlay", CLOEXEC_FS);
    if (context < 0) fail("fsopen overlay");
    for (int i = 0; i < lower_count; i++)
        if (configure(context, CONFIG_FD, "lowerdir+", 0, lowers[i])) fail_fs(context, "overlay lowerdir+ by descriptor");
    int u = directory_at(upper, "u"), w = directory_at(upper, "w");
    if (configure(context, CONFIG_FD, "upperdir", 0, u)) fail_fs(context, "overlay upperdir by descriptor");
    if (configure(context, CONFIG_FD, "workdir", 0, w)) fail_fs(context, "overlay workdir by descriptor");
    if (configure(context, CONFIG_STRING, "xino", "off", 0)) fail_fs(context, "overlay xino=off");
    if (configure(context, CONFIG_STRING, "metacopy", "off", 0)) fail_fs(context, "overlay metacopy=off");
    if (is_volatile && configure(context, CONFIG_FLAG, "volatile", 0, 0)) fail_fs(context, "overlay volatile");
    if (mounter) act_as(mounter);
    if (configure(context, CONFIG_CREATE, 0, 0, 0)) fail_fs(context, "make the overlay");
    if (mounter) act_as(0);
    int mount = syscall(SYS_FSMOUNT, context, CLOEXEC_FS, ATTR_NODEV);
    if (mount < 0) fail_fs(context, "fsmount overlay");
    close(context), close(u), close(w);
    return mount;
}

/* The upper's directory for whoever packs it later. The overlay has a private copy of the mount, which stays writable. */
static int keep_upper(int upper) {
    struct attributes attributes = {.set = ATTR_RDONLY};
    int kept = openat(upper, "u", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (kept < 0) fail("open the upper");
    if (syscall(SYS_MOUNT_SETATTR, upper, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) fail("make the upper's view read-only");
    return kept;
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
static void overlay_by_paths(const char *prefix, const char *root, int upper, unsigned mounter, int is_volatile, int *kept) {
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

int main(int argc, char **argv) {
    unsigned base = 0, count = 0;
    const char *size = 0, *directory = 0, *device = 0, *root = 0, *prefix = 0;
    char *inodes = 0;
    int descriptors = 0, join = 0, own = 0, program = -1, option;
    fcntl(STATUS_FD, F_SETFD, FD_CLOEXEC);
    while ((option = getopt(argc, argv, "+l:u:jt:d:b:oxr:p:g:")) != -1) switch (option) {
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
        case 'x': program = 0; break;
        case 'b': device = optarg; break;
        case 'r': root = optarg; break;
        case 'p': prefix = optarg; break;
        case 'g':
            if (cgroup_count == MAX_CGROUPS) errno = E2BIG, fail("more than %d cgroups", MAX_CGROUPS);
            cgroups[cgroup_count++] = optarg;
            break;
        default: errno = EINVAL, fail("unknown option");
    }
    if (!root || (!size && !directory && !device) || optind >= argc)
        errno = EINVAL, fail("-r, one of -t, -d and -b, and a command are needed");
    if (descriptors < 0 || descriptors > MAX_LOWERS) errno = E2BIG, fail("more than %d layers", MAX_LOWERS);

    /* Only the namespace that made a detached mount may clone it: everything is made here, and attached after the unshare. */
    owned_by = own ? base : 0;
    int userns = count ? make_userns(base, count) : -1;
    for (int i = 0; i < descriptors; i++) {
        fcntl(FIRST_LOWER + i, F_SETFD, FD_CLOEXEC);
        lowers[lower_count++] = clone_mount(FIRST_LOWER + i, "", userns);
        close(FIRST_LOWER + i);
    }
    int upper = size ? make_tmpfs(size, inodes, userns) : device ? open_ext4(device, userns) : open_upper_directory(directory, userns);
    int overlay = prefix ? -1 : overlay_by_descriptors(upper, base, !!size);
    int kept = prefix ? -1 : keep_upper(upper);

    if (unshare(CLONE_NEWNS)) fail("unshare the mount namespace");
    if (mount(0, "/", 0, MS_REC | MS_PRIVATE, 0)) fail("make mounts private");
    if (prefix) overlay_by_paths(prefix, root, upper, base, !!size, &kept);
    else if (syscall(SYS_MOVE_MOUNT, overlay, "", AT_FDCWD, root, MOVE_FROM_EMPTY)) fail("attach the root at %s", root);
    if (overlay >= 0) close(overlay);
    close(upper);
    for (int i = 0; i < lower_count; i++) close(lowers[i]);

    /* 0 is the writer itself: in a v1 tasks file that skips the kernel's lock of all thread groups and its grace period. */
    for (int i = 0; i < cgroup_count; i++) write_file(cgroups[i], "0");
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
