/* What is taken away from the process that becomes the agent, last thing before it is executed. */
#include "launcher.h"
#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/seccomp.h>

static void limit(const struct order *order) {
    for (int i = 0; i < order->rlimit_count; i++) {
        const struct rlimit_order *l = &order->rlimits[i];
        struct rlimit value = {l->soft, l->hard};
        if (setrlimit((int)l->resource, &value)) fail("set resource limit %u", l->resource);
    }
}

/* The bounding set first, for it needs CAP_SETPCAP. The inheritable and the ambient set are empty: no program inside gains any. */
static void drop_capabilities(uint64_t keep) {
    for (int capability = 0; capability < 64; capability++) {
        int has = prctl(PR_CAPBSET_READ, capability, 0, 0, 0);
        if (has < 0) {
            if (!(keep >> capability)) break;
            while (!(keep >> capability & 1)) capability++;
            errno = EINVAL, fail("capability %d is unknown to this kernel", capability);
        }
        if (!(keep >> capability & 1) && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)) fail("drop capability %d", capability);
        if (keep >> capability & 1 && !has) errno = EPERM, fail("capability %d is not ours to give", capability);
    }
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) && errno != EINVAL) fail("clear the ambient capabilities");
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)keep, .permitted = (uint32_t)keep},
        {.effective = (uint32_t)(keep >> 32), .permitted = (uint32_t)(keep >> 32)},
    };
    if (syscall(SYS_capset, &header, data)) fail("set the capabilities");
}

static void filter(const struct order *order) {
    static struct sock_filter code[MAX_FILTER]; /* aligned */
    memcpy(code, order->filter, (size_t)order->filter_length * 8);
    struct sock_fprog program = {.len = (unsigned short)order->filter_length, .filter = code};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) fail("load the seccomp filter");
}

void forget_keys(void) {
    if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS) fail("make a session keyring");
}

/* Whoever makes a user namespace owns it, and pays for what it uses of the kernel's tables; its owner may do everything in it. */
void become_owner(uint32_t id) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) || syscall(SYS_setresuid, id, id, id) || syscall(SYS_capget, &header, data)) fail("become %u", id);
    for (int half = 0; half < 2; half++) data[half].effective = data[half].inheritable = data[half].permitted;
    if (syscall(SYS_capset, &header, data)) fail("keep the capabilities");
    for (int capability = 0; capability < 64; capability++)
        if (data[capability / 32].permitted >> capability % 32 & 1 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0))
            fail("hand on capability %d", capability);
}

void take_away(const struct order *order) {
    forget_keys();
    limit(order);
    drop_capabilities(order->caps);
    if (order->no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("set no_new_privs");
    if (order->filter) filter(order);
}
