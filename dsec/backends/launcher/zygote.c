/* One of the holder's helpers, one a core: it stays, and starts a sandbox for each request.
 *
 * A request is one SEQPACKET message {magic, number, more, next} on descriptor 3 with descriptors: the frame, then the layers, topmost
 * first; `more` messages with further layers follow. `next` is the first id of the sandbox that is likely to be ordered after this one, or
 * 0: once nothing has been asked for a moment, all of it that does not depend on its order is made ahead (ahead.c), or its namespaces at
 * least. That lasts until the next request, which takes it when it is its own; nothing that a sandbox had is ever given to another. A request
 * with the number 0 is none: what is made ahead is let go of, with the layers that it stands on, and nobody answers.
 *
 * The answers are {number, pid, errno} and a text: one with a pidfd as soon as there is a process, so that whoever asked can call its agent
 * while that is on its way ("ahead": its namespaces had been made, "whole": all of it); and one without, when the agent is executed or a step has failed, with
 * the step and its errno. A pid of 0: no process was made.
 *
 * The sandbox's init is a child of the holder (CLONE_PARENT), and outlives this process. Descriptors below `first_free` stay for
 * ever and are all in use, so whatever a request brings or makes is above and is closed when it ends, however it ended. */
#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/sched.h>

enum { CONTROL_FD = 3, FDS_A_MESSAGE = 250, MAX_FDS = MAX_LOWERS + 1, SETUP_MS = 30000, QUIET_MS = 4, IDLE_MS = 5000, MAX_TEXT = 1000 };
static const char *const NODES[] = {"null", "zero", "full", "random", "urandom", "tty"};
enum { NODE_COUNT = sizeof NODES / sizeof *NODES };

struct request {
    uint32_t magic, number, more, next;
};
struct answer {
    uint32_t number;
    int32_t pid, error;
    char text[MAX_TEXT];
};
struct news { /* of a child that fails */
    int32_t error;
    char text[MAX_TEXT];
};

/* In memory that its children share: one that waits (ahead.c) executes the agent with arguments and environment that come later, and
 * nothing here is copied page by page because there is a child. A request's stays until its child has done with it. */
static struct shared {
    struct order order;
    const char *environment[MAX_ENV + 1];
    uint8_t frame[MAX_FRAME];
} *shared;
static struct order *order;
static size_t frame_size;
static int fds[MAX_FDS], fd_count;
static int nodes[NODE_COUNT], empty_directory, empty_namespace, first_free, news_pipe;
static int home_names; /* our own host name's namespace */
static struct nursery { /* the namespaces that a sandbox's root governs, and the process that holds them */
    struct nurse nurse;
    uint32_t base, count;
    int others, userns, pidfd;
    bool entered; /* a process made ahead has been in all of them, and has heard in its place that they are there */
} nursery;
static jmp_buf failed;
static int failed_error;
static char failed_text[MAX_TEXT];

static void jump_back(int error, const char *text) {
    failed_error = error ? error : EINVAL;
    snprintf(failed_text, sizeof failed_text, "%s", text);
    longjmp(failed, 1);
}

static void tell_zygote(int error, const char *text) {
    struct news news = {.error = error ? error : EINVAL};
    snprintf(news.text, sizeof news.text, "%s", text);
    if (write(news_pipe, &news, sizeof news) < 0) _exit(112);
    _exit(111);
}

static void end_with_words(int error, const char *text) {
    dprintf(2, "zygote: %s: %s\n", text, strerror(error));
    _exit(3);
}

/* --- what stays */

/* A mount namespace with one empty, read-only directory in it. Everything that is attached at the time is left behind. */
static int make_empty_namespace(void) {
    int proc = open("/proc/self/ns", O_PATH | O_DIRECTORY | O_CLOEXEC), home = openat(proc, "mnt", O_RDONLY | O_CLOEXEC);
    if (home < 0) fail("open our mount namespace");
    if (unshare(CLONE_NEWNS) || mount(0, "/", 0, MS_REC | MS_PRIVATE, 0)) fail("make a mount namespace");
    if (mount("none", "/", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,nr_inodes=2,mode=0555")) fail("make an empty root");
    int root = open("/..", O_PATH | O_DIRECTORY | O_CLOEXEC); /* dot-dot of the root goes up to what is mounted over it */
    if (root < 0 || fchdir(root)) fail("enter the empty root");
    if (syscall(SYS_pivot_root, ".", ".")) fail("turn to the empty root");
    if (umount2(".", MNT_DETACH) || chdir("/")) fail("leave the old root");
    if (mount("none", "/", 0, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, 0)) fail("make the empty root read-only");
    int made = openat(proc, "mnt", O_RDONLY | O_CLOEXEC);
    if (made < 0) fail("open the empty mount namespace");
    if (setns(home, CLONE_NEWNS)) fail("return to our mount namespace");
    close(home), close(proc), close(root);
    return made;
}

static void prepare(void) {
    char path[32];
    struct attributes readonly = {.set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC};
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("make room for orders");
    order = &shared->order;
    empty_namespace = make_empty_namespace();
    home_names = open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC);
    if (home_names < 0) fail("open the namespace of our host name");
    for (int i = 0; i < NODE_COUNT; i++) {
        snprintf(path, sizeof path, "/dev/%s", NODES[i]);
        nodes[i] = clone_mount(AT_FDCWD, path, -1);
        /* Writing to a device is not writing to its mount; changing its mode, owner or times is. */
        struct attributes device = {.set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC};
        if (syscall(SYS_MOUNT_SETATTR, nodes[i], "", AT_EMPTY_PATH, &device, sizeof device)) fail("make %s read-only", path);
    }
    int context = syscall(SYS_FSOPEN, "tmpfs", CLOEXEC_FS);
    if (context < 0 || configure(context, CONFIG_STRING, "size", "4k", 0) || configure(context, CONFIG_STRING, "mode", "0555", 0) ||
        configure(context, CONFIG_CREATE, 0, 0, 0))
        fail("make an empty directory");
    empty_directory = syscall(SYS_FSMOUNT, context, CLOEXEC_FS, ATTR_RDONLY);
    if (empty_directory < 0 || syscall(SYS_MOUNT_SETATTR, empty_directory, "", AT_EMPTY_PATH, &readonly, sizeof readonly))
        fail("mount an empty directory");
    close(context);
    int moved = fcntl(empty_directory, F_DUPFD_CLOEXEC, 0); /* into the gap: what a request opens comes after the last that stays */
    if (moved < 0 || moved > empty_directory) fail("close the gap of descriptors");
    close(empty_directory);
    empty_directory = moved;
    first_free = moved + 1;
    for (int fd = 0; fd < 256; fd++)
        if ((fcntl(fd, F_GETFD) >= 0) != (fd < first_free)) errno = EBADF, fail("descriptor %d", fd);
}

/* --- a request */

/* False when the holder is gone. */
static bool receive(struct request *request) {
    static union {
        char bytes[CMSG_SPACE(FDS_A_MESSAGE * sizeof(int))];
        struct cmsghdr align;
    } control;
    bool first = true;
    fd_count = 0;
    do {
        struct request part;
        struct iovec piece = {&part, sizeof part};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(CONTROL_FD, &message, MSG_CMSG_CLOEXEC);
        if (got <= 0) return false;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message); /* the kernel joins all descriptors of a message */
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (int i = 0; i < count && fd_count < MAX_FDS; i++) memcpy(&fds[fd_count++], CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof(int));
        }
        if (got != sizeof part || part.magic != FRAME_MAGIC || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ||
            (!first && part.number != request->number))
            end_with_words(EPROTO, "the holder does not speak our protocol");
        *request = part;
        first = false;
    } while (request->more);
    return true;
}

static void read_order(int fd) {
    struct stat st;
    if (fstat(fd, &st)) fail("look at the frame");
    if (st.st_size < 0 || st.st_size > MAX_FRAME) errno = E2BIG, fail("refused: frame: larger than %d bytes", MAX_FRAME);
    ssize_t size = pread(fd, shared->frame, (size_t)st.st_size, 0);
    if (size != st.st_size) fail("read the frame");
    frame_size = (size_t)size;
    const char *field = "frame", *why = "";
    if (!parse_order(shared->frame, (size_t)size, shared->environment, order, &field, &why)) errno = EINVAL, fail("refused: %s: %s", field, why);
    if ((int)order->lowers != fd_count - 1) errno = EINVAL, fail("refused: lowers: %u are ordered and %d came", order->lowers, fd_count - 1);
}

static int node_by_name(const char *name) {
    for (int i = 0; i < NODE_COUNT; i++)
        if (!strcmp(name, NODES[i])) return nodes[i];
    errno = EINVAL;
    fail("refused: nodes: %.64s is not one of ours", name);
}

/* Limits are written before anybody is in the group. What is left of it when a launch fails is found by its name.
 *
 * Each group's limits follow it at once: the last group is the memory one, and making it and mounting a file system wait for each other
 * in the kernel (shrinkers). The process has mounted its two by then. */
static void make_groups(void) {
    static bool written[MAX_SETTINGS];
    memset(written, 0, sizeof written);
    for (int i = 0; i <= order->made_count; i++) {
        const char *group = i < order->made_count ? order->made[i] : "/"; /* whatever is left */
        if (i < order->made_count && mkdir(group, 0755) && errno != EEXIST) fail("make the cgroup %s", group);
        for (int s = 0; s < order->setting_count; s += 2)
            if (!written[s / 2] && !strncmp(order->settings[s], group, strlen(group)))
                written[s / 2] = true, write_file(order->settings[s], order->settings[s + 1]);
    }
}

/* The directory that a group is made in, and the rest of the path of a file of the group's. */
int open_home(const char *path, const char **rest) {
    char home[PATH_MAX];
    size_t length = strlen(path);
    if (length >= sizeof home) errno = ENAMETOOLONG, fail("open the home of %s", path);
    for (int parts = 0; length && (path[length - 1] != '/' || ++parts < 2);) length--;
    memcpy(home, path, length);
    home[length] = 0;
    *rest = path + length;
    int fd = open(length ? home : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail("open the home of %s", path);
    return fd;
}

/* Before there is an agent: whoever calls meanwhile is served when it begins. */
int listen_at(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    mode_t before = umask(0177);
    int bound = fd < 0 ? -1 : bind(fd, (struct sockaddr *)&address, sizeof address);
    if (bound && errno == EADDRINUSE && !unlink(path)) bound = bind(fd, (struct sockaddr *)&address, sizeof address); /* an earlier try's */
    umask(before);
    if (bound || listen(fd, 64)) fail("listen at %s", path);
    return fd;
}

/* In two halves, for who has something to do meanwhile. */
static void call_for(uint32_t base, uint32_t count, int others) {
    nursery = (struct nursery){.base = base, .count = count, .others = others, .userns = -1, .pidfd = -1};
    call_nurse(&nursery.nurse, base, others);
}

static void settle_nursery(void) {
    if (nursery.userns >= 0) return; /* it was made ahead */
    nursery.userns = map_userns(&nursery.nurse, nursery.base, nursery.count);
    nursery.pidfd = (int)syscall(SYS_pidfd_open, nursery.nurse.pid, 0);
    if (nursery.pidfd < 0) fail("open the nurse of the namespaces");
}

/* Whether the order's namespaces are there, or on their way: a nurse that failed has ended. */
static bool made_ahead(int others) {
    if (nursery.nurse.pid > 0 && waitpid(nursery.nurse.pid, NULL, WNOHANG)) nursery.nurse.pid = 0;
    return nursery.nurse.pid && nursery.base == order->base && nursery.count == order->count && nursery.others == others;
}

static void begin_child(int news) {
    news_pipe = news;
    on_failure = tell_zygote;
    prctl(PR_SET_NAME, "dsec-launch");
}

static void begin_ahead(int news) {
    begin_child(news);
    prctl(PR_SET_NAME, "dsec-ahead");
    close(CONTROL_FD); /* the holder hears by it that the zygote has ended */
}

/* All that a request brought or made goes, but for its layers where something is made ahead: they move to the first free numbers, which only
 * the frame had. */
static void let_go(bool but_layers) {
    int kept = 0;
    for (; but_layers && kept < fd_count - 1; kept++) {
        dup3(fds[1 + kept], first_free + kept, O_CLOEXEC);
        fds[1 + kept] = first_free + kept;
    }
    syscall(SYS_CLOSE_RANGE, first_free + kept, ~0u, 0);
}

static void let_go_of_all(void) {
    ahead_dismiss(home_names);
    dismiss(&nursery.nurse);
    let_go(false);
}

/* A node that is asked for nothing has no groups and file systems that wait: of what was made ahead the namespaces stay. */
static void let_go_but_nursery(void) {
    nursery.entered = ahead_leave();
    if (!nursery.entered) {
        let_go_of_all();
        return;
    }
    ahead_dismiss(home_names);
    for (int fd = first_free; fd < first_free + 2 * MAX_FDS; fd++)
        if (fd != nursery.nurse.told && fd != nursery.userns && fd != nursery.pidfd) close(fd);
}

/* When this fails the next request makes them itself, and tells why it cannot. */
static void make_ahead(uint32_t base, const int *layers) {
    static int chosen[MAX_NODES];
    int others = nursery.others;
    if (setjmp(failed)) {
        act_as(0);
        let_go_of_all();
        return;
    }
    call_for(base, order->count, others);
    settle_nursery();
    for (int i = 0; i < order->node_count; i++) chosen[i] = node_by_name(order->nodes[i]);
    ahead_make(&(struct ahead){
        .order = order, .frame = shared->frame, .size = frame_size, .environment = shared->environment, .layers = layers, .base = base,
        .userns = nursery.userns, .in_child = begin_ahead,
        .prepared = {
            .nurse = nursery.pidfd, .nurse_told = nursery.nurse.told, .empty_namespace = empty_namespace, .empty_directory = empty_directory,
            .nodes = chosen,
        },
    });
    syscall(SYS_CLOSE_RANGE, layers[0], layers[order->lowers - 1], 0);
}

static struct started start(void) {
    static int chosen[MAX_NODES], homes[MAX_GROUPS], lowers[MAX_LOWERS];
    static const char *joins[MAX_GROUPS];
    if (fd_count < 2) errno = EINVAL, fail("refused: descriptors: frame and a layer are needed");
    read_order(fds[0]);
    if (ahead_fits(order, fds + 1)) return ahead_take(order);
    for (int i = 0; i < order->node_count; i++) chosen[i] = node_by_name(order->nodes[i]);
    int others = (int)order->namespaces & (CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS);
    bool ahead = order->has_ids && made_ahead(others);
    if (ahead && ahead_is_there()) ahead = nursery.entered = ahead_leave(); /* its namespaces are taken without it: nothing was done in them */
    if (order->has_ids && !ahead) dismiss(&nursery.nurse), call_for(order->base, order->count, others);
    for (int i = 0; i < order->group_count; i++) homes[i] = open_home(order->groups[i], &joins[i]);
    if (order->group2) make_groups(); /* to be born in it */
    int group2 = order->group2 ? open(order->group2, O_PATH | O_DIRECTORY | O_CLOEXEC) : 0;
    if (group2 < 0) fail("open %s", order->group2);
    int listener = listen_at(order->socket);
    if (order->has_ids) settle_nursery();
    int userns = order->has_ids ? nursery.userns : -1;
    for (uint32_t i = 0; i < order->lowers; i++) lowers[i] = clone_mount(fds[1 + i], "", userns);
    int upper = make_upper(&order->upper, userns);
    int overlay = overlay_by_descriptors(lowers, (int)order->lowers, upper, order->base, true);
    int kept = keep_upper(upper);
    struct prepared prepared = {
        .order = order, .overlay = overlay, .upper = kept, .listener = listener, .nurse = order->has_ids ? nursery.pidfd : -1,
        .nurse_told = nursery.entered ? -1 : nursery.nurse.told, .empty_namespace = empty_namespace, .empty_directory = empty_directory,
        .nodes = chosen, .homes = homes, .joins = joins,
    };
    int ends[2], made[2], pidfd = -1;
    if (pipe2(ends, O_CLOEXEC) || pipe2(made, O_CLOEXEC)) fail("make a pipe");
    struct clone_args how = {
        .flags = CLONE_NEWPID | CLONE_PARENT | CLONE_PIDFD | (order->group2 ? CLONE_INTO_CGROUP : 0), .pidfd = (uintptr_t)&pidfd,
        .cgroup = (uint64_t)group2,
    };
    long pid = syscall(SYS_CLONE3, &how, sizeof how);
    if (pid < 0) fail("make a process");
    if (pid == 0) {
        begin_child(ends[1]);
        prepared.news = ends[1];
        prepared.groups_made = order->group2 ? -1 : made[0];
        close(made[1]);
        become_sandbox(&prepared);
    }
    close(ends[1]), close(made[0]), close(listener); /* once the agent has ended nobody holds it, and who calls hears that */
    return (struct started){.pid = (int)pid, .pidfd = pidfd, .news = ends[0], .groups_made = made[1], .ahead = ahead};
}

/* Until the agent is executed, which closes the pipe, or the child says what failed. One that is killed meanwhile is told by its end. */
static void follow(const struct started *child, struct answer *answer) {
    struct news news;
    struct pollfd wait = {.fd = child->news, .events = POLLIN};
    int ready;
    while ((ready = poll(&wait, 1, SETUP_MS)) < 0 && errno == EINTR) {}
    if (ready == 0) answer->error = ETIMEDOUT, snprintf(answer->text, MAX_TEXT, "set the sandbox up within %d ms", SETUP_MS);
    else if (read(child->news, &news, sizeof news) == sizeof news) {
        answer->error = news.error;
        memcpy(answer->text, news.text, MAX_TEXT);
    }
    if (answer->error) syscall(SYS_pidfd_send_signal, child->pidfd, SIGKILL, NULL, 0);
}

static void reply(const struct answer *answer, int pidfd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec piece = {(void *)answer, offsetof(struct answer, text) + strnlen(answer->text, MAX_TEXT)};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (pidfd >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &pidfd, sizeof(int));
    }
    if (sendmsg(CONTROL_FD, &message, MSG_NOSIGNAL) < 0) _exit(0); /* the holder is gone */
}

/* Whether nothing more is asked. The agent that was just executed is called in this moment: a core is left to that, and what else is to
 * do here waits (letting go of mounts disturbs all cores). */
static bool is_quiet(int milliseconds) {
    struct pollfd next = {.fd = CONTROL_FD, .events = POLLIN};
    return poll(&next, 1, milliseconds) == 0;
}

int zygote_main(void) {
    static struct request request;
    static struct answer answer;
    static struct started child;
    on_failure = end_with_words;
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "dsec-zygote");
    if (fcntl(CONTROL_FD, F_SETFD, FD_CLOEXEC)) return 2;
    prepare();
    on_failure = jump_back;
    while (receive(&request)) {
        if (!request.number) {
            let_go_of_all();
            continue;
        }
        memset(&answer, 0, sizeof answer);
        child = (struct started){.pidfd = -1};
        answer.number = request.number;
        if (setjmp(failed)) {
            act_as(0); /* it may have failed while it was somebody else */
            answer.error = failed_error;
            memcpy(answer.text, failed_text, MAX_TEXT);
        } else {
            child = start();
            answer.pid = child.pid;
            if (child.ahead) strcpy(answer.text, child.whole ? "whole" : "ahead");
            reply(&answer, child.pidfd);
            answer.text[0] = 0;
            if (child.whole) ahead_go(order, home_names);
            else {
                if (!order->group2) make_groups(); /* while it mounts */
                if (write(child.groups_made, "", 1) < 0) {} /* if it has ended, `follow` hears why */
            }
            follow(&child, &answer);
            if (child.whole && !answer.error) ahead_taken_over();
        }
        reply(&answer, -1);
        bool quiet = !answer.error && is_quiet(QUIET_MS);
        ahead_dismiss(home_names);
        dismiss(&nursery.nurse);
        bool next = quiet && request.next && order->has_ids;
        let_go(next);
        if (next) make_ahead(request.next, fds + 1);
        if (ahead_is_there() && is_quiet(IDLE_MS)) let_go_but_nursery();
    }
    let_go_of_all();
    return 0;
}
