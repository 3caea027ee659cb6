/* Loaded into CRIU and into nothing else: three answers that CRIU 4.1 cannot do with.
 *
 * It runs with the id that owns a sandbox's user namespace, and with all capabilities (launcher/confine.c). To CRIU everything but 0 is
 * somebody without capabilities: it would not dare to give a restored process other ids than root's.
 *
 * CRIU asks whether every namespace of a tree belongs to the tree's user namespace, for it restores them as the user namespace's own. Our
 * launcher makes the mount namespace outside of it, so that root inside governs no mount; a restored one belongs to it (docs/memory.md). So the
 * answer is yes. Whoever asks is a process of its own, which takes the ids of the tree's root, enters the user namespace, and ends with 0 if it
 * gets into the others from there; no other process of a dump takes other ids.
 *
 * CRIU asks every socket for two options that only Unix and netlink sockets have; since Linux 6.16 the others say so, where they used to say
 * that the option is off. */
#ifdef __x86_64__
enum { SYS_SETNS = 308, SYS_GETSOCKOPT = 55, SYS_SETRESUID = 117, SYS_EXIT_GROUP = 231 };
#else
enum { SYS_SETNS = 268, SYS_GETSOCKOPT = 209, SYS_SETRESUID = 147, SYS_EXIT_GROUP = 94 };
#endif
enum { NOT_SUPPORTED = 95, NEW_USERS = 0x10000000, OF_SOCKETS = 1, PASS_CREDENTIALS = 16, PASS_LABEL = 34 };

/* Of whatever C library CRIU has. */
long syscall(long number, ...);
int *__errno_location(void);

unsigned getuid(void) { return 0; }
unsigned geteuid(void) { return 0; } /* the same: libnftables ends at once where they differ */

static int asks;

int setresuid(unsigned real, unsigned effective, unsigned saved) {
    asks = 1;
    return (int)syscall(SYS_SETRESUID, real, effective, saved);
}

int setns(int fd, int kind) {
    int failed = (int)syscall(SYS_SETNS, fd, kind);
    if (!failed && asks && kind == NEW_USERS) syscall(SYS_EXIT_GROUP, 0);
    return failed;
}

int getsockopt(int fd, int level, int option, void *value, unsigned *size) {
    int failed = (int)syscall(SYS_GETSOCKOPT, fd, level, option, value, size);
    if (!failed || *__errno_location() != NOT_SUPPORTED || level != OF_SOCKETS) return failed;
    if ((option != PASS_CREDENTIALS && option != PASS_LABEL) || *size < sizeof(int)) return failed;
    *(int *)value = 0;
    *size = sizeof(int);
    return 0;
}
