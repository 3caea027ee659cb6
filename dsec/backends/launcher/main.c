#include "launcher.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
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

/* CRIU asks for what it has in its own namespaces, and leaves those out of its images: they are made for each that is restored. */
static int owner_main(const char *id, const char *init, char **command) {
    on_failure = tell;
    int fd = (int)syscall(SYS_pidfd_open, atoi(init), 0);
    if (fd < 0 || setns(fd, CLONE_NEWIPC | CLONE_NEWUTS)) fail("enter the namespaces of %s", init);
    become_owner((uint32_t)strtoul(id, NULL, 10));
    /* After the change of ids, which clears it. A dump that nobody waits for would freeze again, in the end, what nobody is there to thaw. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("end with the one who asks");
    execv(command[0], command);
    fail("execute %s", command[0]);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "zygote")) return zygote_main();
    if (argc > 4 && !strcmp(argv[1], "owner")) return owner_main(argv[2], argv[3], argv + 4);
    const char *step = getenv("CRTOOLS_SCRIPT_ACTION"); /* CRIU calls us, at each step and without a word */
    if (argc == 1 && step) return strcmp(step, "setup-namespaces") ? 0 : loopback_main();
    return launch_main(argc, argv);
}
