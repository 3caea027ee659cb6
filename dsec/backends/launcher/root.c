/* A sandbox's root: user namespace, uppers, overlay. Everything is detached: nothing is attached anywhere here. */
#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/capability.h>
#include <linux/loop.h>

int configure(int context, int command, const char *key, const void *value, int aux) {
    return syscall(SYS_FSCONFIG, context, command, key, value, aux);
}

/* The life of a nurse: it makes the user namespace, lets its maps be written, then the others in it, and holds them. */
__attribute__((noreturn)) static void nurse(int tell, int hear, uint32_t base, int others) {
    char go;
    /* The raw calls: this process has one thread, and libc's would look for others. */
    if (syscall(SYS_setgroups, 0, 0) || syscall(SYS_setresgid, base, base, base) || syscall(SYS_setresuid, base, base, base) || unshare(CLONE_NEWUSER))
        _exit(errno);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* after the change of ids, which clears it */
    if (write(tell, "", 1) != 1) _exit(errno);
    if (read(hear, &go, 1) != 1) _exit(0);
    if (others) {
        if (unshare(others)) _exit(errno);
        if (others & CLONE_NEWNET && raise_loopback()) _exit(errno);
        if (write(tell, "", 1) != 1) _exit(errno);
    }
    for (;;) pause();
}

void call_nurse(struct nurse *called, uint32_t base, int others) {
    int made[2], go[2];
    if (pipe2(made, O_CLOEXEC) || pipe2(go, O_CLOEXEC)) fail("make a pipe");
    long child = syscall(SYS_clone, (unsigned long)SIGCHLD, 0, 0, 0, 0);
    if (child < 0) fail("make a process for a user namespace");
    if (child == 0) {
        close(made[0]), close(go[1]);
        nurse(made[1], go[0], base, others);
    }
    close(made[1]), close(go[0]);
    *called = (struct nurse){.pid = (int)child, .told = made[0], .go = go[1]};
}

int map_userns(struct nurse *called, uint32_t base, uint32_t count) {
    char path[64], map[64];
    int status = 0;
    if (read(called->told, path, 1) != 1) {
        waitpid(called->pid, &status, 0);
        called->pid = 0;
        errno = WEXITSTATUS(status);
        fail("make a user namespace");
    }
    snprintf(map, sizeof map, "0 %u %u", base, count);
    snprintf(path, sizeof path, "/proc/%d/uid_map", called->pid);
    write_file(path, map);
    snprintf(path, sizeof path, "/proc/%d/gid_map", called->pid);
    write_file(path, map);
    if (write(called->go, "", 1) != 1) fail("go on with the namespaces");
    close(called->go);
    snprintf(path, sizeof path, "/proc/%d/ns/user", called->pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("open %s", path);
    return fd;
}

int make_userns(uint32_t base, uint32_t count) {
    struct nurse called;
    call_nurse(&called, base, 0);
    int fd = map_userns(&called, base, count);
    close(called.told);
    dismiss(&called);
    return fd;
}

void dismiss(struct nurse *nurse) {
    if (nurse->pid <= 0) return;
    kill(nurse->pid, SIGKILL);
    waitpid(nurse->pid, 0, 0);
    nurse->pid = 0;
}

static void idmap(int mount, int userns) {
    struct attributes attributes = {.set = ATTR_IDMAP, .userns = userns};
    if (syscall(SYS_MOUNT_SETATTR, mount, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) fail("idmap a mount");
}

int clone_mount(int fd, const char *path, int userns) {
    int copy = syscall(SYS_OPEN_TREE, fd, path, TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
    if (copy < 0) fail("clone the mount of %s", *path ? path : "a layer");
    if (userns >= 0) idmap(copy, userns);
    return copy;
}

/* The overlay's two directories, owned by id 0 of the sandbox: by an id map, or on disk where the kernel has none for it. */
static void own_upper(int mount, int userns, uint32_t owned_by) {
    if ((mkdirat(mount, "u", 0755) && errno != EEXIST) || (mkdirat(mount, "w", 0755) && errno != EEXIST))
        fail("make the upper's directories");
    if (owned_by && (fchownat(mount, "u", owned_by, owned_by, AT_SYMLINK_NOFOLLOW) || fchownat(mount, "w", owned_by, owned_by, AT_SYMLINK_NOFOLLOW)))
        fail("chown the upper's directories");
    if (userns >= 0 && !owned_by) idmap(mount, userns);
}

static int finish_upper(int context, const char *what, int userns, uint32_t owned_by) {
    if (configure(context, CONFIG_CREATE, 0, 0, 0)) fail_fs(context, what);
    int mount = syscall(SYS_FSMOUNT, context, CLOEXEC_FS, ATTR_NODEV);
    if (mount < 0) fail_fs(context, what);
    close(context);
    own_upper(mount, userns, owned_by);
    return mount;
}

static int make_tmpfs(const struct upper *upper, int userns) {
    int context = syscall(SYS_FSOPEN, "tmpfs", CLOEXEC_FS);
    if (context < 0) fail("fsopen tmpfs");
    if (configure(context, CONFIG_STRING, "size", upper->size, 0) || configure(context, CONFIG_STRING, "nr_inodes", upper->inodes, 0) ||
        configure(context, CONFIG_STRING, "mode", "0755", 0))
        fail_fs(context, "tmpfs for the upper");
    return finish_upper(context, "tmpfs for the upper", userns, upper->owned_by);
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

static int open_ext4(const struct upper *upper, int userns) {
    char device[32];
    int loop = attach_loop(upper->path, device, sizeof device); /* closed once the mount holds the device */
    int context = syscall(SYS_FSOPEN, "ext4", CLOEXEC_FS);
    if (context < 0) fail("fsopen ext4");
    if (configure(context, CONFIG_STRING, "source", device, 0)) fail_fs(context, "ext4 for the upper");
    int mount = finish_upper(context, "ext4 for the upper", userns, upper->owned_by);
    close(loop);
    return mount;
}

static int open_upper_directory(const struct upper *upper, int userns) {
    int mount = clone_mount(AT_FDCWD, upper->path, -1);
    own_upper(mount, userns, upper->owned_by);
    return mount;
}

int make_upper(const struct upper *upper, int userns) {
    if (upper->kind == UPPER_TMPFS) return make_tmpfs(upper, userns);
    return upper->kind == UPPER_LOOP ? open_ext4(upper, userns) : open_upper_directory(upper, userns);
}

/* The overlay remembers its mounter's credentials and acts with them: the mounter's fsuid must be in the id map, or the
 * overlay is silently read-only. Changing fsuid away from 0 drops capabilities that making the overlay needs. */
void act_as(uint32_t id) {
    setfsuid(id);
    setfsgid(id);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data)) fail("capget");
    data[0].effective = data[0].permitted;
    data[1].effective = data[1].permitted;
    if (syscall(SYS_capset, &header, data)) fail("capset");
}

static int directory_at(int base, const char *name) {
    int fd = openat(base, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) fail("open %s", name);
    return fd;
}

int overlay_by_descriptors(const int *lowers, int count, int upper, uint32_t mounter, bool is_volatile) {
    int context = syscall(SYS_FSOPEN, "overlay", CLOEXEC_FS);
    if (context < 0) fail("fsopen overlay");
    for (int i = 0; i < count; i++)
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

int keep_upper(int upper) {
    struct attributes attributes = {.set = ATTR_RDONLY};
    /* Not O_NOFOLLOW, which stays with the descriptor: CRIU opens it anew, by a link in /proc. The name is ours, out of the sandbox's reach. */
    int kept = openat(upper, "u", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (kept < 0) fail("open the upper");
    if (syscall(SYS_MOUNT_SETATTR, upper, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) fail("make the upper's view read-only");
    return kept;
}
