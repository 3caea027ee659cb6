/* What the files of the launcher share. Four programs in one static binary:
 *
 *   launcher [options] -- runtime ...     builds one root and becomes an OCI runtime, or CRIU (launch.c)
 *   launcher owner ID INIT program ...    becomes CRIU with the id that owns a sandbox's user namespace (main.c)
 *   launcher                              CRIU's hook: raises a restored sandbox's loopback interface (main.c)
 *   launcher zygote                       stays, and starts a sandbox for each frame that it is sent (zygote.c)
 *
 * frame.c is pure and fuzzed; root.c makes user namespaces, uppers and overlays; child.c is what happens inside the new
 * namespaces; confine.c is what is taken away before the agent is executed; ahead.c has the next sandbox's process wait for its order. */
#pragma once
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers are the same on every architecture since Linux 5.1. */
#define SYS_OPEN_TREE 428
#define SYS_MOVE_MOUNT 429
#define SYS_FSOPEN 430
#define SYS_FSCONFIG 431
#define SYS_FSMOUNT 432
#define SYS_CLONE3 435
#define SYS_CLOSE_RANGE 436
#define SYS_MOUNT_SETATTR 442

enum { CONFIG_FLAG = 0, CONFIG_STRING = 1, CONFIG_FD = 5, CONFIG_CREATE = 6 };
enum { CLOEXEC_FS = 1, TREE_CLONE = 1, MOVE_FROM_EMPTY = 4 };
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_NOEXEC = 8, ATTR_IDMAP = 0x100000 };
enum { MAX_LOWERS = 500, MAX_GROUPS = 16, MAX_SETTINGS = 32 };

struct attributes {
    uint64_t set, clear, propagation, userns;
};

/* --- fail.c: every failure goes through one door, which differs by process: a status pipe, a jump back, a pipe to the zygote. */

extern void (*on_failure)(int error, const char *text); /* does not return */
__attribute__((noreturn, format(printf, 1, 2))) void fail(const char *format, ...);
/* The kernel explains a failed fsconfig on the context's descriptor, better than errno does. */
__attribute__((noreturn)) void fail_fs(int context, const char *what);
void write_file(const char *path, const char *text);
bool try_write(const char *path, const char *text);

/* --- root.c */

struct upper {
    enum { UPPER_TMPFS = 1, UPPER_DIRECTORY, UPPER_LOOP } kind;
    const char *size, *inodes; /* tmpfs: decimal numbers */
    const char *path;          /* directory, or image */
    uint32_t owned_by;         /* not 0: its directories get this owner on disk instead of an id map */
};

int configure(int context, int command, const char *key, const void *value, int aux);
/* A user namespace that nobody lives in: a child makes it, its maps are written, the descriptor keeps it. Its owner is the id that root
 * inside has outside: the kernel counts what a namespace uses of its tables (inotify instances and watches, namespaces) for its owner too,
 * so a sandbox that takes all there is takes it from itself alone.
 *
 * A nurse goes on to make `others` (network, IPC, UTS) in it, while its parent does something else: making a network namespace is the
 * longest step of a launch. It says so by one byte on `told`; to be joined by its pid, and dismissed. */
struct nurse {
    int pid, told, go;
};
int make_userns(uint32_t base, uint32_t count);
/* The same in two halves, for who has something to do meanwhile; with `others` the nurse lives on. The second answers the descriptor. */
void call_nurse(struct nurse *nurse, uint32_t base, int others);
int map_userns(struct nurse *nurse, uint32_t base, uint32_t count);
void dismiss(struct nurse *nurse);
/* A private copy of a mount; `path` is relative to `fd`, or empty for the mount itself. */
int clone_mount(int fd, const char *path, int userns);
int make_upper(const struct upper *upper, int userns);
int overlay_by_descriptors(const int *lowers, int count, int upper, uint32_t mounter, bool is_volatile);
/* The upper's directory for whoever packs it later. The overlay has a private copy of the mount, which stays writable. */
int keep_upper(int upper);
/* Act with these file-system ids, but with all capabilities. */
void act_as(uint32_t id);

/* --- frame.c */

enum { FRAME_MAGIC = 0x314c5344, FRAME_VERSION = 2, MAX_FRAME = 2 << 20 };
enum { MAX_ARGS = 64, MAX_ENV = 131072, MAX_MOUNTS = 32, MAX_PATHS = 64, MAX_RLIMITS = 16, MAX_NODES = 16, MAX_LINKS = 16, MAX_SOCKET = 108, MAX_FILTER = 4096 };

enum tag {
    TAG_LOWERS = 1, /* u32: how many descriptors of layers come along */
    TAG_IDS,        /* u32 base, u32 count; without it there is no user namespace */
    TAG_UPPER,      /* u32 kind, u32 owned_by, then size NUL inodes NUL path NUL */
    TAG_NAMESPACES, /* u32: CLONE_NEW* */
    TAG_HOSTNAME,   /* text NUL */
    TAG_ARGV,       /* texts */
    TAG_ENV,        /* texts */
    TAG_MOUNT,      /* u32 MS_* flags, u32 0, then fstype NUL source NUL target NUL data NUL; may be repeated */
    TAG_NODES,      /* texts: devices bound below /dev */
    TAG_LINKS,      /* texts in pairs: target, path; made where nothing is */
    TAG_MASKED,     /* texts */
    TAG_READONLY,   /* texts */
    TAG_GROUPS,     /* texts: files to write 0 to */
    TAG_GROUP2,     /* text NUL: a cgroup v2 directory to be born in */
    TAG_RLIMIT,     /* u32 resource, u32 0, u64 soft, u64 hard; may be repeated */
    TAG_CAPS,       /* u64 */
    TAG_NO_NEW_PRIVS, /* u32 0 or 1 */
    TAG_SECCOMP,    /* instructions of 8 bytes; without it there is no filter */
    TAG_OOM,        /* i32 oom_score_adj */
    TAG_MADE,       /* texts: directories of cgroups to make, those that are there are used */
    TAG_SETTINGS,   /* texts in pairs: file of a cgroup, what to write into it; in this order, before anything joins */
    TAG_SOCKET,     /* text NUL: where the agent listens */
    TAG_END
};

struct mount_order {
    uint32_t flags;
    const char *fstype, *source, *target, *data;
};
struct rlimit_order {
    uint32_t resource;
    uint64_t soft, hard;
};
struct order {
    uint32_t lowers, base, count, namespaces, no_new_privs;
    int32_t oom;
    uint64_t caps;
    struct upper upper;
    const char *hostname, *group2, *socket;
    const char *argv[MAX_ARGS + 1];
    const char **env; /* of MAX_ENV + 1 */
    struct mount_order mounts[MAX_MOUNTS];
    struct rlimit_order rlimits[MAX_RLIMITS];
    const char *nodes[MAX_NODES], *links[2 * MAX_LINKS], *masked[MAX_PATHS], *readonly[MAX_PATHS], *groups[MAX_GROUPS];
    const char *made[MAX_GROUPS], *settings[2 * MAX_SETTINGS];
    int made_count, setting_count;
    int argc, envc, mount_count, rlimit_count, node_count, link_count, masked_count, readonly_count, group_count;
    const uint8_t *filter; /* 8-byte instructions, not aligned */
    int filter_length;
    bool has_ids, has_oom;
};

/* Reads a frame; what `order` points to is in `data`, which must live as long. False, with the field's name and what is wrong
 * with it, for whatever is unknown, too large, missing, twice there or cut. */
bool parse_order(const uint8_t *data, size_t size, const char **env, struct order *order, const char **field, const char **why);

/* --- child.c, confine.c */

int raise_loopback(void); /* of the network namespace that this process is in; -1 and errno where it will not */

struct prepared {
    const struct order *order;
    int overlay, upper, listener, nurse, empty_namespace, empty_directory, news;
    int nurse_told;           /* one byte comes when its namespaces are there; -1: they are */
    int groups_made;          /* one byte comes when the cgroups are there; -1: they are */
    const int *nodes;         /* a detached mount for each of the order's nodes */
    const int *homes;         /* for each of the order's groups the directory that it is below, and what it is called there: */
    const char *const *joins; /* where the sandbox's root is entered, no path leads to it */
    /* Made ahead: `order` is what it is made like; it says on `line` that it waits, and executes the agent of `later`, in shared memory, when told. */
    const struct order *later;
    int line;
};

__attribute__((noreturn)) void become_sandbox(const struct prepared *prepared);
void name_host(const struct order *order);
void take_away(const struct order *order);
/* Take this id on the node, and keep all capabilities beyond the next exec. */
void become_owner(uint32_t id);
void forget_keys(void); /* a session keyring of its own: the one that it inherited is the node's */

/* --- ahead.c, for zygote.c */

struct started {
    int pid, pidfd, news, groups_made;
    bool ahead; /* its namespaces were there */
    bool whole; /* and all else */
};
struct ahead { /* the order that the next one is likely to be like, with its frame and its layers; the next one's first id and user namespace */
    const struct order *order;
    const uint8_t *frame;
    size_t size;
    const char **environment;
    const int *layers;
    uint32_t base;
    int userns;
    struct prepared prepared; /* as far as it is the same for all */
    void (*in_child)(int news);
};

/* Does nothing where such an order's process cannot be made ahead. */
void ahead_make(const struct ahead *ahead);
bool ahead_is_there(void);
bool ahead_fits(const struct order *order, const int *layers);
bool ahead_leave(void); /* it is not taken, and ends. False when it did not get as far as to be in all of its namespaces */
/* It gets the order's socket; then, once whoever asked was told, its other names and the word to go on. */
struct started ahead_take(const struct order *order);
void ahead_go(const struct order *order, int home_names);
void ahead_taken_over(void); /* it is the agent */
/* Ends one that is not, and leaves its host's namespace where a failure left this process in it. */
void ahead_dismiss(int home_names);
int open_home(const char *path, const char **rest);
int listen_at(const char *path);

/* --- the two programs */

int launch_main(int argc, char **argv);
int zygote_main(void);
