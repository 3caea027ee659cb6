/* One operation's supervisor: a child of Aether and the subreaper of everything that its command starts.
 *
 * Because orphans of the command come to the supervisor and not to PID 1, every process of the operation is below it,
 * whatever it did with sessions, groups or double forks; a time-out ends the tree below, however it is shaped. When the
 * command itself ends the supervisor reports and leaves, and what runs on in the background belongs to PID 1. */
#include "aether.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Shared with the command's process until its exec: CLONE_VM | CLONE_VFORK, so a failure is simply left here. */
struct launch {
    const struct start *s;
    struct cred cred;
    char **argv, **envp;
    const char *path, *cwd;
    int in, out, err;
    struct core core;
    volatile int stage, error;
};

/* A new process begins where the kernel sees the least to do at that moment, which may be behind somebody's slice of some milliseconds,
 * while our own core is free: a parent that waits for its child counts as busy there until it sleeps. */
void core_keep(struct core *c) {
    cpu_set_t here;
    int cpu = sched_getcpu();
    CPU_ZERO(&here);
    if (cpu >= 0) CPU_SET(cpu, &here);
    c->kept = !sched_getaffinity(0, sizeof c->all, &c->all) && CPU_COUNT(&c->all) > 1 && !sched_setaffinity(0, sizeof here, &here);
}

void core_free(const struct core *c) {
    if (c->kept) sched_setaffinity(0, sizeof c->all, &c->all);
}

void child_clean(int keep) {
    /* The listener, the connections and other operations' pipes are none of a child's business. */
    if (keep > 3) syscall(SYS_close_range, 3u, (unsigned)keep - 1, 0u);
    syscall(SYS_close_range, (unsigned)keep + 1, ~0u, 0u);
}

static int fail(struct launch *l, int stage, int error) {
    l->error = error;
    l->stage = stage;
    _exit(127);
}

static int try_exec(const char *file, struct launch *l) {
    execve(file, l->argv, l->envp);
    int e = errno;
    /* The file is there, what it needs to run is not: a script's interpreter, or a loader that the image does not have. */
    return e == ENOENT && !access(file, F_OK) ? ELIBACC : e;
}

static int search_exec(struct launch *l) {
    const char *name = l->argv[0];
    if (strchr(name, '/')) return try_exec(name, l);
    char file[4096];
    int worst = ENOENT;
    size_t n = strlen(name);
    for (const char *p = l->path, *end; p; p = *end ? end + 1 : NULL) {
        end = strchrnul(p, ':');
        size_t k = (size_t)(end - p);
        if (k + n + 2 > sizeof file) continue;
        memcpy(file, p, k);
        if (k) file[k++] = '/';
        memcpy(file + k, name, n + 1);
        int e = try_exec(file, l);
        if (e != ENOENT && e != ENOTDIR) worst = e;
        if (e != ENOENT && e != ENOTDIR && e != EACCES) break;
    }
    return worst;
}

static int command(void *arg) {
    struct launch *l = arg;
    core_free(&l->core);
    setsid();
    if (l->s->flags & S_TTY && ioctl(l->in, TIOCSCTTY, 0)) return fail(l, AT_TTY, errno);
    if (dup2(l->in, 0) < 0 || dup2(l->out, 1) < 0 || dup2(l->err, 2) < 0) return fail(l, AT_FORK, errno);
    if (limit_nofile) setrlimit(RLIMIT_NOFILE, &(struct rlimit){limit_nofile, limit_nofile}); /* lowering always works */
    if (limit_fsize) setrlimit(RLIMIT_FSIZE, &(struct rlimit){limit_fsize, limit_fsize});
    int e = cred_apply(&l->cred);
    if (e) return fail(l, AT_USER, e);
    if (chdir(l->cwd)) return fail(l, AT_CWD, errno);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    return fail(l, AT_EXEC, search_exec(l));
}

/* The environment: the sandbox's, then what the user implies, then what the operation says; later wins. */
static void env_put(char **env, size_t *n, char *entry) {
    size_t name = (size_t)(strchr(entry, '=') - entry) + 1;
    for (size_t i = 0; i < *n; i++)
        if (!strncmp(env[i], entry, name)) {
            env[i] = entry;
            return;
        }
    env[(*n)++] = entry;
}

static char *joined(const char *name, const char *value) {
    size_t a = strlen(name), b = strlen(value);
    char *p = malloc(a + b + 1);
    if (!p) _exit(125);
    memcpy(p, name, a);
    memcpy(p + a, value, b + 1);
    return p;
}

static bool has(const char *name) {
    size_t n = strlen(name);
    for (char **e = environ; *e; e++)
        if (!strncmp(*e, name, n)) return true;
    return false;
}

static void build_vectors(struct launch *l) {
    const struct start *s = l->s;
    struct rd r = {s->strings, s->strings_end, false};
    size_t base = 0, n = 0;
    while (environ[base]) base++;
    l->argv = calloc((size_t)s->argc + 1, sizeof *l->argv);
    l->envp = calloc(base + s->envc + 8, sizeof *l->envp);
    if (!l->argv || !l->envp) _exit(125);
    for (uint32_t i = 0; i < s->argc; i++) l->argv[i] = (char *)rd_text(&r).p;
    for (size_t i = 0; i < base; i++)
        if (strchr(environ[i], '=')) l->envp[n++] = environ[i];
    if (l->cred.named || !has("HOME=")) env_put(l->envp, &n, joined("HOME=", l->cred.home));
    if (l->cred.name[0] && (l->cred.named || !has("USER="))) {
        env_put(l->envp, &n, joined("USER=", l->cred.name));
        env_put(l->envp, &n, joined("LOGNAME=", l->cred.name));
    }
    if (s->flags & S_TTY && !has("TERM=")) env_put(l->envp, &n, joined("TERM=", "xterm"));
    for (uint32_t i = 0; i < s->envc; i++) env_put(l->envp, &n, (char *)rd_text(&r).p);
    l->path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    for (size_t i = 0; i < n; i++)
        if (!strncmp(l->envp[i], "PATH=", 5)) l->path = l->envp[i] + 5;
}

static void tell(int sock, uint32_t kind, int a, int b) {
    struct report r = {kind, a, b};
    send(sock, &r, sizeof r, MSG_NOSIGNAL);
}

/* The tree below this process, from /proc. */
struct proc { pid_t pid, parent; bool below, old, dead; };
static struct proc *table;
static size_t table_n, table_cap;
static pid_t *remembered; /* what ran below us before the current run of a session; sorted */
static size_t remembered_n;

static pid_t parent_of(pid_t pid, bool *dead) {
    char path[40], text[512];
    char digits[12];
    int d = 0;
    for (pid_t v = pid; v; v /= 10) digits[d++] = (char)('0' + v % 10);
    char *p = path + 6;
    memcpy(path, "/proc/", 6);
    while (d) *p++ = digits[--d];
    memcpy(p, "/stat", 6);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    char *after = strrchr(text, ')'); /* the name may hold anything, brackets too */
    if (!after || strlen(after) < 5) return -1;
    *dead = after[2] == 'Z';
    /* A zombie counts: it may be a leader whose threads live on, and it is the link to its children. */
    return atoi(after + 4);
}

static int by_pid(const void *a, const void *b) { return ((const struct proc *)a)->pid - ((const struct proc *)b)->pid; }

/* Marks who is below us. Returns how many. */
static size_t scan_tree(void) {
    DIR *d = opendir("/proc");
    if (!d) return 0;
    table_n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        pid_t pid = atoi(e->d_name);
        if (pid <= 1) continue;
        bool dead = false;
        pid_t parent = parent_of(pid, &dead);
        if (parent < 0) continue;
        if (table_n == table_cap) {
            size_t cap = table_cap ? table_cap * 2 : 256;
            struct proc *grown = cap > 1 << 20 ? NULL : realloc(table, cap * sizeof *table);
            if (!grown) break;
            table = grown;
            table_cap = cap;
        }
        table[table_n++] = (struct proc){pid, parent, false, false, dead};
    }
    closedir(d);
    qsort(table, table_n, sizeof *table, by_pid);
    pid_t self = getpid();
    size_t below = 0;
    for (bool more = true; more;) { /* pids need not grow with depth, so repeat until nothing changes */
        more = false;
        for (size_t i = 0; i < table_n; i++) {
            if (table[i].below) continue;
            struct proc key = {.pid = table[i].parent};
            struct proc *up = bsearch(&key, table, table_n, sizeof *table, by_pid);
            if (table[i].parent == self || (up && up->below)) table[i].below = more = true, below++;
        }
    }
    return below;
}

static void signal_tree(int signum) {
    scan_tree();
    for (size_t i = 0; i < table_n; i++)
        if (table[i].below) kill(table[i].pid, signum);
}

static int plain(const void *a, const void *b) { return *(const pid_t *)a - *(const pid_t *)b; }

static void remember(void) {
    size_t below = scan_tree();
    free(remembered);
    remembered = calloc(below + 1, sizeof *remembered);
    remembered_n = 0;
    for (size_t i = 0; remembered && i < table_n && remembered_n < below; i++)
        if (table[i].below) remembered[remembered_n++] = table[i].pid;
}

/* What the current run started: all below us but the shell, what was there before it, and what those have started since.
 * How many of them were alive. */
static size_t signal_run(int signum, pid_t shell) {
    size_t alive = 0;
    scan_tree();
    for (size_t i = 0; i < table_n; i++)
        table[i].old = table[i].pid != shell && remembered && bsearch(&table[i].pid, remembered, remembered_n, sizeof(pid_t), plain);
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < table_n; i++) {
            struct proc key = {.pid = table[i].parent};
            struct proc *up = table[i].old ? NULL : bsearch(&key, table, table_n, sizeof *table, by_pid);
            if (up && up->old) table[i].old = more = true;
        }
    }
    for (size_t i = 0; i < table_n; i++)
        if (table[i].below && !table[i].old && table[i].pid != shell) {
            kill(table[i].pid, signum);
            alive += !table[i].dead;
        }
    return alive;
}

/* Until none is left: stopped first, so that nobody starts another meanwhile. Their parent, the shell, reaps most. */
static void kill_run(pid_t shell) {
    for (int round = 0; round < 200; round++) {
        signal_run(SIGSTOP, shell);
        if (!signal_run(SIGKILL, shell)) return;
        usleep(round < 20 ? 500 : 5000);
    }
}

/* End everything below. Stopping first beats forks that race with the walk: a stopped process makes no more, and once no
 * new one appears all can be killed. Those who were started between two looks come to us when their parents die. */
static int kill_tree(pid_t main_pid) {
    int status = SIGKILL;
    for (int round = 0; round < 400; round++) {
        size_t before = 0, now;
        for (int look = 0; look < 50 && (now = scan_tree()) != before; look++) {
            before = now;
            for (size_t i = 0; i < table_n; i++)
                if (table[i].below) kill(table[i].pid, SIGSTOP);
        }
        for (size_t i = 0; i < table_n; i++)
            if (table[i].below) kill(table[i].pid, SIGKILL);
        for (int tries = 0; tries < 10; tries++) {
            int st;
            pid_t pid;
            while ((pid = waitpid(-1, &st, WNOHANG)) > 0)
                if (pid == main_pid) status = st;
            if (pid < 0 && errno == ECHILD) return status;
            usleep(tries < 5 ? 500 : 2000);
        }
    }
    return status;
}

_Noreturn void chronus_main(const struct start *s, int sock, int in, int out, int err) {
    static struct launch l;
    static char stack[64 << 10] __attribute__((aligned(16)));
    /* Put the four descriptors next to each other above the standard ones, so that one range drops all others. */
    int from[4] = {sock, in, out, err}, high[4];
    for (int i = 0; i < 4; i++) high[i] = fcntl(from[i], F_DUPFD_CLOEXEC, 512);
    syscall(SYS_close_range, 3u, 511u, 0u);
    for (int i = 0; i < 4; i++) from[i] = high[i] < 0 ? -1 : fcntl(high[i], F_DUPFD_CLOEXEC, 3);
    syscall(SYS_close_range, 7u, ~0u, 0u);
    sock = from[0];
    l.s = s;
    l.in = from[1];
    l.out = from[2];
    l.err = from[3];
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_NAME, "chronus", 0, 0, 0);
    int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (score >= 0) { /* when memory ends, a command goes before the agent; refused where it is higher already */
        if (write(score, "900", 3) < 0) {}
        close(score);
    }
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    int events = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    const char *user = s->user.n ? s->user.p : default_user;
    if (!user_lookup(user, &l.cred)) {
        tell(sock, R_FAILED, AT_USER, ENOENT);
        _exit(0);
    }
    l.cred.named = l.cred.named && (s->user.n || default_user[0]);
    if (s->flags & S_SERVICE) {
        int stage = 0, e = service_enter(sock, (int[]){l.in, l.out, l.err}, &l.cred, &stage);
        tell(sock, e ? R_FAILED : R_STARTED, e ? stage : getpid(), e);
        if (!e) tell(sock, R_EXITED, service_run(s) << 8, 0);
        _exit(0);
    }
    build_vectors(&l);
    l.cwd = s->cwd.n ? s->cwd.p : default_workdir;
    if (!s->cwd.n) workdir_make(&l.cred);
    core_keep(&l.core);
    pid_t main_pid = clone(command, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &l);
    core_free(&l.core);
    if (main_pid < 0 || l.stage) {
        tell(sock, R_FAILED, main_pid < 0 ? AT_FORK : l.stage, main_pid < 0 ? errno : l.error);
        _exit(0);
    }
    tell(sock, R_STARTED, main_pid, 0);
    close(l.in);
    close(l.out);
    close(l.err);
    for (;;) {
        int status;
        pid_t pid;
        while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
            if (pid == main_pid) {
                tell(sock, R_EXITED, status, 0);
                _exit(0);
            }
        struct pollfd p[2] = {{sock, POLLIN, 0}, {events, POLLIN, 0}};
        poll(p, 2, -1);
        struct signalfd_siginfo info;
        if (p[1].revents) while (read(events, &info, sizeof info) > 0) {}
        struct order o;
        if (!p[0].revents) continue;
        if (recv(sock, &o, sizeof o, MSG_DONTWAIT) != sizeof o) _exit(0); /* Aether is gone, and with it the namespace */
        switch ((enum aim)o.aim) {
        case TO_COMMAND: kill(main_pid, o.signum); break;
        case TO_TREE:
            if (o.signum == SIGKILL) {
                tell(sock, R_EXITED, kill_tree(main_pid), 0);
                _exit(0);
            }
            signal_tree(o.signum);
            break;
        case TO_GROUP: kill(-main_pid, o.signum); break; /* the command leads a session, and so a group, of its own */
        case TO_RUN:
            if (o.signum == SIGKILL) kill_run(main_pid);
            else signal_run(o.signum, main_pid);
            break;
        case TO_MEMORY:
            remember();
            tell(sock, R_REMEMBERED, 0, 0);
            break;
        }
    }
}
