#include "launcher.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void tell(int error, const char *text) {
    fprintf(stderr, "%s: %s\n", text, strerror(error));
    exit(1);
}

/* At the step of a restore at which the namespaces are there and nothing runs in them yet. */
static int loopback_main(void) {
    const char *init = getenv("CRTOOLS_INIT_PID");
    char path[64];
    on_failure = tell;
    snprintf(path, sizeof path, "/proc/%d/ns/net", init ? atoi(init) : 0);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET)) fail("enter %s", path);
    if (raise_loopback()) fail("raise the loopback interface");
    return 0;
}

/* Executes a program that ends, with all that it has begun, when `parent` does. CRIU needs that: a dump that nobody waits for would freeze
 * again, in the end, what nobody is there to thaw; and a helper of its own, which it stops to look at, would stay stopped for ever. */
static void guard(int parent, char **command) {
    sigset_t ends;
    int ended, status;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGCHLD);
    if (sigprocmask(SIG_BLOCK, &ends, NULL)) fail("wait for signals");
    if (getpgrp() != getpid() && setpgid(0, 0)) fail("make a process group");
    if (prctl(PR_SET_PDEATHSIG, SIGTERM)) fail("end with the one who asks");
    if (getppid() != parent) exit(1); /* it ended before that */
    int self = getpid(), child = fork();
    if (child < 0) fail("make a process");
    if (child == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("end with the one who asks");
        if (getppid() != self) exit(1);
        if (sigprocmask(SIG_UNBLOCK, &ends, NULL)) fail("hear signals");
        execv(command[0], command);
        fail("execute %s", command[0]);
    }
    do {
        if (sigwait(&ends, &ended)) fail("wait for signals");
        if (ended == SIGTERM) kill(0, SIGKILL); /* the group, and so this process too */
    } while (waitpid(child, &status, WNOHANG) != child);
    if (!WIFEXITED(status)) kill(0, SIGKILL); /* it had no time to clean up */
    exit(WEXITSTATUS(status));
}

/* CRIU asks for what it has in its own namespaces, and leaves those out of its images: they are made for each that is restored. */
static void owner_main(const char *id, const char *init, int parent, char **command) {
    on_failure = tell;
    int fd = (int)syscall(SYS_pidfd_open, atoi(init), 0);
    if (fd < 0 || setns(fd, CLONE_NEWIPC | CLONE_NEWUTS)) fail("enter the namespaces of %s", init);
    become_owner((uint32_t)strtoul(id, NULL, 10)); /* before the rest: a change of ids clears whose death is told */
    guard(parent, command);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "zygote")) return zygote_main();
    if (argc > 5 && !strcmp(argv[1], "owner")) owner_main(argv[2], argv[3], atoi(argv[4]), argv + 5);
    if (argc > 3 && !strcmp(argv[1], "guard")) {
        on_failure = tell;
        guard(atoi(argv[2]), argv + 3);
    }
    const char *step = getenv("CRTOOLS_SCRIPT_ACTION"); /* CRIU calls us, at each step and without a word */
    if (argc == 1 && step) return strcmp(step, "setup-namespaces") ? 0 : loopback_main();
    return launch_main(argc, argv);
}
