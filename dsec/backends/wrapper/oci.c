/* The OCI runtime that Docker is told of: `dockerd --add-runtime dsec=<this program>`.
 *
 * Docker's own idea of the container (an empty image, no network) names the sandbox by one variable, DSEC_BOX=<directory>, in the
 * bundle that it made. For `create` this program reads <directory>/docker.launch, which the Edge wrote, takes the listening socket
 * and the layers' mounts out of the Edge and its holder by number, enters the holder's mount namespace, and becomes the launcher, which
 * builds the root and becomes the real runtime. So the container is a child of Docker's shim and stands on our layers.
 * All mounts live in the container's own mount namespace: `delete` finds nothing to undo but the note of which runtime it was.
 *
 * docker.launch: decimal words "holder edge listener program top layers FD..." and a newline (program, top: -1 and 0 for none),
 * then NUL-terminated: the directory above the layers when top is 1, the launcher, its options, "--", the real runtime and its options.
 *
 * state, start, kill, delete, ps, events and features go to the real runtime as they are. What would change the sandbox without
 * its Edge's knowing (exec, update, pause, resume, checkpoint, restore, run) is refused with a sentence.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SYS_PIDFD_OPEN 434
#define SYS_CLOSE_RANGE 436
#define SYS_PIDFD_GETFD 438

enum { LISTEN_FD = 3, STATUS_FD = 4, FIRST_LOWER = 5, MAX_LOWERS = 500, HIGH = 800, MAX_WORDS = 256, MAX_CONFIG = 4 << 20 };

static const char *root_dir, *log_path, *log_format, *bundle, *pid_file, *id;
static char *passed[MAX_WORDS];
static int passed_count;

/* Docker shows what a runtime says on its log (JSON lines) or on standard error. */
__attribute__((noreturn)) static void fail(const char *what) {
    char line[512];
    int length = snprintf(line, sizeof line, "{\"level\":\"error\",\"msg\":\"dsec: %s%s%s\"}\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    int fd = log_path ? open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0 && write(fd, line, length) < 0) fd = -1;
    fprintf(stderr, "dsec: %s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    exit(1);
}

__attribute__((noreturn)) static void refuse(const char *what) {
    errno = 0;
    fail(what);
}

static char *read_whole(const char *path, size_t *length, int trusted) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    struct stat found;
    if (fd < 0 || fstat(fd, &found)) fail(path);
    if (trusted && (found.st_uid != geteuid() || found.st_mode & 022)) refuse("docker.launch can be written by somebody else");
    if (!S_ISREG(found.st_mode) || found.st_size > MAX_CONFIG) refuse("a file is too large");
    char *data = malloc(found.st_size + 1);
    if (!data) fail("memory");
    size_t have = 0;
    for (ssize_t got; have < (size_t)found.st_size && (got = read(fd, data + have, found.st_size - have)) > 0;) have += got;
    close(fd);
    data[have] = 0;
    *length = have;
    return data;
}

/* The directory that Docker's config.json names. */
static char *find_box(void) {
    char path[4096];
    size_t length;
    if (snprintf(path, sizeof path, "%s/config.json", bundle) >= (int)sizeof path) refuse("the bundle's path is too long");
    char *config = read_whole(path, &length, 0);
    char *box = strstr(config, "\"DSEC_BOX=");
    if (!box) refuse("this runtime starts DSec's sandboxes only (there is no DSEC_BOX); use another --runtime");
    box += strlen("\"DSEC_BOX=");
    box[strcspn(box, "\"")] = 0;
    if (*box != '/' || strchr(box, '\\')) refuse("DSEC_BOX is not a plain absolute path");
    return box;
}

static int open_process(long pid) {
    int fd = syscall(SYS_PIDFD_OPEN, pid, 0), high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, HIGH);
    if (high < 0) fail("the Edge or its holder is not there");
    close(fd);
    return high;
}

/* Descriptors are taken in order, so that each gets the lowest free number, which is the one that the launcher expects. */
static void take(int process, long number, int wanted) {
    int fd = syscall(SYS_PIDFD_GETFD, process, (int)number, 0);
    if (fd < 0) fail("take a descriptor of the Edge");
    if (fd != wanted) refuse("a descriptor has another number than the launcher expects");
    fcntl(fd, F_SETFD, 0);
}

/* crun gives its standard streams to root inside (fchown). Where Docker's shim has put a device of the node there, it would be given away
 * for everybody: in the holder's namespace the same device is behind a read-only mount, which refuses. */
static void shield_streams(void) {
    for (int fd = 0; fd < 3; fd++) {
        struct stat found;
        if (!fstat(fd, &found) && (S_ISFIFO(found.st_mode) || S_ISSOCK(found.st_mode))) continue;
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (null < 0) fail("/dev/null");
        if (null != fd && dup2(null, fd) < 0) fail("dup2");
        if (null != fd) close(null);
        else fcntl(fd, F_SETFD, 0);
        if (!fchown(fd, 0, 0) || errno != EROFS) refuse("the node's /dev/null is not behind a read-only mount here");
    }
}

static long number(char **at) {
    char *end;
    long value = strtol(*at, &end, 10);
    if (end == *at) refuse("docker.launch is not understood");
    *at = end;
    return value;
}

static void note_path(char *out, size_t room) {
    if (!root_dir || !id || strchr(id, '/') || snprintf(out, room, "%s/.dsec-%s", root_dir, id) >= (int)room)
        refuse("no --root, or no usable container id");
}

static void make_parents(char *path) {
    for (char *at = path + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(path, 0711);
            *at = '/';
        }
}

__attribute__((noreturn)) static void create(void) {
    if (!bundle || !pid_file || !id) refuse("create needs --bundle, --pid-file and an id");
    char *box = find_box(), path[4096], note[4096], layers_text[16], runtime_log[4096];
    size_t length;
    snprintf(path, sizeof path, "%s/docker.launch", box);
    snprintf(runtime_log, sizeof runtime_log, "%s/runtime.log", box);
    char *plan = read_whole(path, &length, 1), *at = plan, *end = plan + length;
    long holder = number(&at), edge = number(&at), listener = number(&at), program = number(&at), top = number(&at), layers = number(&at);
    if (layers < 0 || layers > MAX_LOWERS || top < 0 || top > 1) refuse("docker.launch is not understood");

    syscall(SYS_CLOSE_RANGE, LISTEN_FD, ~0U, 0);
    int edge_fd = open_process(edge), holder_fd = open_process(holder);
    take(edge_fd, listener, LISTEN_FD);
    int status = open(runtime_log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (status != STATUS_FD) fail(runtime_log);
    int next = FIRST_LOWER, first = 1;
    char *numbers = at;
    for (long i = 0; i < layers; i++) number(&at);
    if (*at++ != '\n') refuse("docker.launch is not understood");
    if (setns(holder_fd, CLONE_NEWNS)) fail("enter the holder's mount namespace");
    if (top) {
        int fd = open(at, O_PATH | O_DIRECTORY | O_NOFOLLOW);
        if (fd != next++) fail(at);
        at += strlen(at) + 1;
    }
    for (long i = 0; i < layers; i++) take(holder_fd, number(&numbers), next++);
    if (program >= 0) take(holder_fd, program, next);
    shield_streams();

    char *words[MAX_WORDS];
    int count = 0;
    const char *runtime = 0;
    for (; at < end; at += strlen(at) + 1) {
        if (count > MAX_WORDS - 24) refuse("docker.launch has too many words");
        if (first) {
            words[count++] = at;
            snprintf(layers_text, sizeof layers_text, "%ld", layers + top);
            if (program >= 0) words[count++] = "-x";
            words[count++] = "-l", words[count++] = layers_text;
            first = 0;
            continue;
        }
        if (!runtime && count && !strcmp(words[count - 1], "--")) runtime = at;
        words[count++] = at;
        if (runtime == at) {
            words[count++] = "--root", words[count++] = (char *)root_dir;
            if (log_path) words[count++] = "--log", words[count++] = (char *)log_path;
            if (log_format) words[count++] = "--log-format", words[count++] = (char *)log_format;
        }
    }
    if (!runtime) refuse("docker.launch names no runtime");
    char *tail[] = {"create", "--preserve-fds", "2", "--pid-file", (char *)pid_file, "--bundle", box, (char *)id, 0};
    for (int i = 0; tail[i]; i++) words[count++] = tail[i];
    words[count] = 0;

    note_path(note, sizeof note);
    make_parents(note);
    unlink(note);
    if (symlink(runtime, note)) fail(note);
    char *environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 0};
    execve(words[0], words, environment);
    fail(words[0]);
}

/* crun 1.8 refuses every command on a hybrid hierarchy, so it does not get to see the unified mount. */
static void hide_hybrid(void) {
    FILE *table = fopen("/proc/self/mountinfo", "re");
    char line[8192], points[8][4096];
    int v1 = 0, count = 0;
    while (table && fgets(line, sizeof line, table)) {
        char *right = strstr(line, " - ");
        if (!right) continue;
        v1 |= !strncmp(right + 3, "cgroup ", 7);
        if (!strncmp(right + 3, "cgroup2 ", 8) && count < 8) count += sscanf(line, "%*s %*s %*s %*s %4095s", points[count]) == 1;
    }
    if (table) fclose(table);
    if (!v1 || !count) return;
    if (unshare(CLONE_NEWNS) || mount("none", "/", 0, MS_REC | MS_SLAVE, 0)) fail("make a mount namespace");
    for (int i = 0; i < count; i++) umount2(points[i], MNT_DETACH);
}

static void pass_on(const char *command) {
    char note[4096], runtime[4096];
    if (!strcmp(command, "features") && !id) { /* asked of no container: what either runtime says */
        const char *names[] = {"crun", "runc"};
        for (int i = 0; i < 2; i++) {
            char *words[] = {(char *)names[i], "features", 0};
            execvp(names[i], words);
        }
        fail("features");
    }
    note_path(note, sizeof note);
    ssize_t length = readlink(note, runtime, sizeof runtime - 1);
    if (length <= 0) refuse("the container does not exist");
    runtime[length] = 0;
    const char *name = strrchr(runtime, '/');
    int is_crun = name && !strcmp(name, "/crun");
    char *words[MAX_WORDS + 8];
    int count = 0;
    words[count++] = runtime;
    if (is_crun) words[count++] = "--cgroup-manager", words[count++] = "disabled";
    for (int i = 0; i < passed_count; i++) words[count++] = passed[i];
    words[count] = 0;
    if (is_crun) hide_hybrid();
    if (strcmp(command, "delete")) {
        execv(runtime, words);
        fail(runtime);
    }
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
        execv(runtime, words);
        fail(runtime);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) fail("wait");
    if (WIFEXITED(status) && !WEXITSTATUS(status)) unlink(note);
    exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

/* `--name value` or `--name=value`; the value, or null when the word is another. */
static const char *option(const char *name, char **argv, int *at) {
    size_t length = strlen(name);
    if (strncmp(argv[*at], name, length)) return 0;
    if (argv[*at][length] == '=') return argv[*at] + length + 1;
    return argv[*at][length] || !argv[*at + 1] ? 0 : argv[++*at];
}

int main(int argc, char **argv) {
    const char *command = 0, *value;
    if (argc > MAX_WORDS) refuse("too many words");
    for (int i = 1; i < argc; i++) {
        int from = i;
        if (!command && (!strcmp(argv[i], "--version") || !strcmp(argv[i], "-v"))) {
            puts("dsec-oci version 1\nspec: 1.0.0");
            return 0;
        }
        if (!strcmp(argv[i], "--systemd-cgroup")) continue; /* the groups are the Edge's */
        if ((value = option("--root", argv, &i))) root_dir = value;
        else if ((value = option("--log", argv, &i))) log_path = value;
        else if ((value = option("--log-format", argv, &i))) log_format = value;
        else if ((value = option("--bundle", argv, &i))) bundle = value;
        else if ((value = option("--pid-file", argv, &i))) pid_file = value;
        else if (argv[i][0] != '-') {
            if (command) id = argv[i];
            else command = argv[i];
        }
        for (; from <= i; from++) passed[passed_count++] = argv[from];
    }
    if (!command) refuse("no command");
    /* kill ID SIGNAL: the id is the first word. */
    if (!strcmp(command, "kill"))
        for (int i = 1; i < passed_count; i++)
            if (!strcmp(passed[i], command)) {
                for (i++; i < passed_count && passed[i][0] == '-'; i++) continue;
                if (i < passed_count) id = passed[i];
                break;
            }
    if (!strcmp(command, "create")) create();
    const char *refused[] = {"exec", "update", "pause", "resume", "checkpoint", "restore", "run"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (!strcmp(command, refused[i])) refuse("this is a DSec sandbox: use `dsec exec`, `dsec pause` and the rest of dsec");
    pass_on(command);
}
