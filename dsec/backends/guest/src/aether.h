/* Aether: the guest agent. One process, one epoll loop, no threads. This header names what its few files share.
 *
 * Rules: no allocation is sized by an untrusted number without a bound from the list below; nothing here may block on
 * the sandbox's files (file work and exec preparation happen in forked children). */
#ifndef AETHER_H
#define AETHER_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

enum {
    PROTO = 1,
    PROTO_MIN = 1,
    MAX_FRAME = 1 << 20,   /* body of any frame */
    MAX_DATA = 256 << 10,  /* payload of a data frame */
    MAX_CHUNK = 128 << 10, /* payload of one output chunk */
    MAX_CONNS = 16,
    MAX_RUNNING = 512,       /* operations that run at one time */
    MAX_FINISHED = 256,      /* operations remembered after their end */
    KEEP_FINISHED_MS = 600000,
    KEEP_BYTES = 8 << 20,    /* captured output of finished operations, all together */
    MAX_CAPTURE = 1 << 20,   /* head or tail of one stream */
    MAX_VIEWERS = 7,         /* of one operation, beside the reader that holds it */
    MAX_DOOR = 32,           /* connections that one listener has open; more wait in the kernel's queue */
    MAX_ORPHAN_PIPES = 256,  /* pipes of ended operations that a background process still holds */
    OUT_PAUSE = 256 << 10,   /* a connection with more unsent than this is not read from */
    HELLO_MS = 5000,         /* a connection that has not said HELLO by then is closed */
    HOLD_MS = 10000,         /* how long a stream waits for its (next) reader before it drops */
    IN_WAIT_MS = 2000,       /* how long an INPUT waits for room before it is told that there is none */
    KEEP_STREAM_MS = 3000,   /* how long a finished service's last bytes are kept for a reader that asks again */
    HALF_CLOSED_MS = 600000, /* how long a connection lives of which the far side has said its end */
    KILL_MS = 5000,          /* a tree that could not be killed by then is reported as ended anyway */
    HEADER = 12,
};

enum frame_type {
    F_HELLO = 1, F_START, F_STATUS, F_WAIT, F_CAPTURE, F_DONE, F_OUTPUT, F_CREDIT, F_CHUNK, F_END, F_DETACH, F_INPUT,
    F_ACCEPTED, F_SIGNAL, F_OKAY, F_RESIZE, F_OPS, F_FILE, F_ERROR, F_STOP, F_LISTEN,
};
enum error_code { E_INVALID = 1, E_NOT_FOUND, E_CONFLICT, E_DENIED, E_BUSY, E_SANDBOX, E_STALE, E_UNSUPPORTED, E_REUSED };
enum start_flag { S_STDIN = 1, S_TTY = 2, S_BACKGROUND = 4, S_STREAM = 8, S_NOTIFY = 16, S_SERVICE = 32, S_SESSION = 64, S_RUN = 128, S_WALL = 256, S_KNOWN = 511, S_SOCKET = 1 << 16, S_DOOR = 1 << 17, S_GUEST = 1 << 18 };
enum file_verb { V_READ = 1, V_WRITE, V_STAT, V_LIST, V_MKDIR, V_REMOVE, V_RENAME, V_CHMOD, V_CHOWN, V_SYMLINK, V_LINK, V_TOUCH };
enum file_flag { FF_CREATE = 1, FF_TRUNCATE = 2, FF_RECURSIVE = 4 };

/* frame.c: bounded reading and writing of frame bodies; pure, and what the fuzzer drives. */
struct rd { const uint8_t *p, *end; bool bad; };
struct text { const char *p; uint32_t n; }; /* NUL-terminated inside the frame, n without the NUL */
uint8_t rd_u8(struct rd *r);
uint16_t rd_u16(struct rd *r);
uint32_t rd_u32(struct rd *r);
uint64_t rd_u64(struct rd *r);
const uint8_t *rd_bytes(struct rd *r, size_t n);
struct text rd_text(struct rd *r);
struct wr { uint8_t *p; size_t n, cap; bool full; };
void wr_u8(struct wr *w, uint8_t v);
void wr_u16(struct wr *w, uint16_t v);
void wr_u32(struct wr *w, uint32_t v);
void wr_u64(struct wr *w, uint64_t v);
void wr_bytes(struct wr *w, const void *p, size_t n);
void wr_text(struct wr *w, const char *p, size_t n);

struct header { uint32_t length; uint16_t type, zero; uint32_t request; };
bool parse_header(const uint8_t *p, struct header *h);

struct start {
    const uint8_t *op;
    uint32_t flags, timeout_ms, head, tail;
    uint16_t rows, cols;
    struct text user, cwd;
    uint32_t argc, envc;
    const uint8_t *strings, *strings_end; /* argc + envc texts */
    uint64_t digest; /* of the whole body: the same id with another order is told from a repeat */
};
uint64_t digest(const uint8_t *p, size_t n);
struct output { const uint8_t *op; uint64_t offset[2], credit[2]; bool view; };
struct input { const uint8_t *op; uint64_t offset; bool eof; const uint8_t *data; size_t n; };
struct file {
    uint8_t verb, flags;
    uint32_t mode, length;
    uint64_t offset;
    struct text path, target, user;
    const uint8_t *data;
    size_t n;
};
bool parse_start(const uint8_t *body, size_t n, struct start *out, const char **field);
int service_port(const struct start *s, const char *service);
bool parse_output(const uint8_t *body, size_t n, struct output *out);
bool parse_input(const uint8_t *body, size_t n, struct input *out);
bool parse_file(const uint8_t *body, size_t n, struct file *out, const char **field);

/* What an epoll event points to. */
enum kind { K_LISTEN, K_SIGNAL, K_CONN, K_STREAM, K_STDIN, K_SUPERVISOR, K_WORKER, K_SESSION, K_DOOR };
struct watch { enum kind kind; int fd; uint32_t events; };

struct conn {
    struct watch w;
    uint32_t serial; /* 0: free */
    uint64_t generation;
    int64_t born;
    bool hello, closing;
    uint8_t small[512], *in; /* `in` is `small` until a frame needs more */
    size_t in_n, in_cap;
    uint8_t *out;
    size_t out_n, out_at, out_cap;
    int passed; /* a descriptor that came along and that no request has taken; -1: none */
};

/* Whom an order to the supervisor is for: the command, all below the supervisor, the command's process group, what the
 * current run of a session started; or nobody: remember what is there now as no part of the next run. */
enum aim { TO_COMMAND, TO_TREE, TO_GROUP, TO_RUN, TO_MEMORY };

struct op;
struct stream {
    struct watch w;
    struct op *op; /* NULL: the operation is forgotten, the pipe is only drained */
    struct stream *next_orphan;
    struct stream *next_resting;
    bool eof, tty, lost;
    uint8_t small;                /* small reads in a row */
    int64_t read_at, rest_until;  /* milliseconds; rest_until: 0 while it does not rest */
    uint64_t total, limit; /* limit: no byte beyond it belongs to the operation */
    uint32_t head_cap, tail_cap, ring_cap;
    uint8_t *head, *ring;
};
/* Of an operation that is a shell (S_SESSION): its stdin is a socket, the lines that wait for room in it, and the current run. */
struct session {
    struct op *run;
    uint8_t *queue;
    size_t queue_n, queue_at;
    char line[64];
    size_t line_n;
};
struct reader { uint32_t serial, request; uint64_t sent[2], credit[2]; }; /* serial 0: none */
struct waiter { struct waiter *next; uint32_t serial, request; uint64_t cursor; };
struct op {
    struct op *next;
    uint8_t id[16];
    uint64_t digest; /* of the START that made it */
    struct watch sup, in; /* supervisor's socket; stdin or the PTY's master for writing */
    struct watch door;    /* of a listener */
    uint32_t guests, guest_n; /* of a listener: how many it has had, and how many are here */
    uint32_t flags;
    bool running, exited, timed_out;
    uint8_t killing;
    struct session *session; /* of a shell */
    struct op *shell;        /* of a run: the session that it runs in, until it ends */
    bool marked, remembered; /* of a run: its shell has said that it is done, what it wrote ends at `until`; the supervisor knows it */
    uint64_t until[2];
    int32_t pid, wstatus, supervisor; /* supervisor: 0 once it is reaped, since the number may then be another's */
    int64_t started, exited_at, ended, deadline, drain_by, hold_until, kill_by;
    struct stream *out[2]; /* stdout, stderr (NULL on a PTY) */
    struct waiter *waiters;
    struct reader reader, viewer[MAX_VIEWERS]; /* who holds the streams; who only looks on and may miss something */
    uint64_t delivered[2]; /* what the last reader was given: replay of a held stream begins here */
    uint64_t in_offset;
    bool in_eof, in_end; /* in_end: it ends once in_rest is written */
    uint8_t *in_rest;    /* accepted, and waiting for room in a service's pipe */
    size_t in_rest_n, in_rest_at;
    struct { uint32_t serial, request; int64_t until; } in_wait; /* an INPUT answered once the pipe takes bytes again */
    struct { uint32_t serial, request; } starter; /* a START answered once exec is known to have worked */
};

/* main.c */
extern int epoll_fd, listen_fd;
extern bool is_init;
bool listen_at(int fd); /* main.c: accept at this socket from now on, and at no other */
extern const char *default_user, *default_workdir;
extern uint64_t limit_nofile, limit_fsize; /* of each command; 0: as the agent's own */
extern char **environ;
int64_t now_ms(void);
int64_t now_us(void);
bool watch_set(struct watch *w, uint32_t events); /* 0 removes */
void watch_close(struct watch *w);

/* conn.c */
struct conn *conn_by_serial(uint32_t serial);
bool conn_idle(const struct conn *c); /* nothing queued: may be given a chunk */
void conn_accept(bool trust_any_peer);
void conn_event(struct conn *c, uint32_t events);
void conn_timers(int64_t now, int64_t *next);
void send_frame(struct conn *c, uint16_t type, uint32_t request, const struct iovec *parts, int count);
void send_error(struct conn *c, uint32_t request, int code, int err, const char *field, const char *message);
void send_ok(struct conn *c, uint32_t request);

/* start.c */
void op_start(struct conn *c, uint32_t request, const uint8_t *body, size_t n);
void op_wait(struct conn *c, uint32_t request, const uint8_t *id);
struct op *op_live(struct conn *c, uint32_t request, const uint8_t *id);
void op_signal(struct conn *c, uint32_t request, const uint8_t *id, int signum, bool tree);
void op_resize(struct conn *c, uint32_t request, const uint8_t *id, int rows, int cols);
void op_list(struct conn *c, uint32_t request);
void op_input(struct conn *c, uint32_t request, const uint8_t *body, size_t n);
void op_input_ready(struct op *op);
void op_input_late(struct op *op);
struct op *op_of_stdin(struct watch *w);
struct op *op_of_supervisor(struct watch *w);
void op_report(struct op *op);
void op_exited_check(struct op *op); /* end it when its output is drained */
void op_reaped(pid_t pid);
void op_timers(int64_t now, int64_t *next);
void op_shift(int64_t by);
void op_conn_lost(uint32_t serial);
void op_pump_conn(struct conn *c); /* what waits for room on this connection */
struct op *op_find(const uint8_t *id);
struct op *door_of(const struct op *guest); /* the listener that took it in, while that runs */
void op_drop(struct op *op); /* one that was made and not enlisted */
struct op *op_of_reader(uint32_t serial, uint32_t request, struct reader **reader);
struct op *op_new(struct conn *c, uint32_t request, const struct start *s); /* NULL: the caller was told why not */
void op_enlist(struct op *op, struct conn *c, uint32_t request);
void op_again(struct op *op, struct conn *c, uint32_t request, bool notify); /* the same START once more */
void op_order(struct op *op, int signum, enum aim aim);
void op_finish(struct op *op);

/* session.c */
void session_run(struct conn *c, uint32_t request, const struct start *s);
void session_event(struct op *shell, uint32_t events);
void session_tap(struct stream *s, size_t n); /* the last n bytes of a shell's stream are also its current run's */
void session_check(struct op *shell);
void session_remembered(struct op *shell);
void session_signal(struct op *run, int signum);
void session_timer(struct op *run, int64_t now, int64_t *next);
void session_over(struct op *shell); /* the shell has ended, and its run with it */

/* stream.c */
struct stream *stream_new(int fd, struct op *op, uint32_t head, uint32_t tail, bool tty);
void stream_event(struct stream *s);
void stream_interest(struct stream *s);
void stream_finish(struct stream *s);
void stream_drain(struct stream *s);
void stream_attend(struct stream *s);
void stream_timers(int64_t now, int64_t *next);
void stream_forget(struct stream *s);
void stream_shed(struct stream *s); /* free what it captured, keep the counter */
size_t stream_kept(const struct stream *s);
size_t stream_tail(const struct stream *s);
size_t stream_at(const struct stream *s, uint64_t *offset, uint64_t end, struct iovec *out);
void stream_put(struct stream *s, const uint8_t *p, size_t n); /* into one that has no pipe of its own */
void output_attach(struct conn *c, uint32_t request, const uint8_t *body, size_t n);
void output_credit(struct conn *c, uint32_t request, const uint8_t *body, size_t n);
void output_detach(struct conn *c, uint32_t request);
bool output_pump(struct op *op);
bool output_lost(struct op *op, uint32_t serial); /* a connection ended; true when it held the streams */

/* user.c: run in forked children only, since it reads the sandbox's files. */
struct cred { uint32_t uid, gid; int groups_n; gid_t groups[64]; char name[64], home[256]; bool named; };
bool user_lookup(const char *spec, struct cred *out);
int cred_apply(const struct cred *c); /* 0 or errno; irreversible */
int workdir_make(const struct cred *c);

/* chronus.c */
enum stage { AT_FORK = 1, AT_USER, AT_CWD, AT_EXEC, AT_TTY };
struct report { uint32_t kind; int32_t a, b; }; /* R_STARTED pid | R_FAILED stage errno | R_EXITED wstatus */
enum { R_STARTED = 1, R_FAILED, R_EXITED, R_REMEMBERED };
struct order { int32_t signum; uint32_t aim; };
_Noreturn void chronus_main(const struct start *s, int sock, int in, int out, int err);
void child_clean(int keep); /* after a fork: drop every descriptor above 2 but `keep` */
struct core { cpu_set_t all; bool kept; };
void core_keep(struct core *c); /* what is forked now begins on this core: parent and child call `core_free` next */
void core_free(const struct core *c);

/* service.c: what services share, in their own process. */
bool service_known(const struct start *s);
int service_enter(int sock, const int fds[3], const struct cred *cred, int *stage);
int service_run(const struct start *s);
int open_beneath(int root, const char *path, int flags, mode_t mode);
size_t svc_read(void *to, size_t n);
bool svc_read_all(void *to, size_t n);
void svc_drain(void);
void svc_write(const void *p, size_t n);
uint8_t *svc_room(size_t *n);
void svc_filled(size_t n);
void svc_flush(void);
int svc_fail(int error, const char *about, const char *message);
void svc_note(const char *text);
int unpack_main(const char *target, const char *options);
int pack_main(const char *name, const char *options, const char *const *paths, uint32_t n);
int watch_main(const char *path, const char *options);

/* door.c */
void door_start(struct conn *c, uint32_t request, struct start *s, int port);
void door_event(struct op *door);
void door_left(const struct op *guest);
struct op *op_of_door(struct watch *w);

/* net.c */
int connect_loopback(int port);
int listen_loopback(int port);
int relay_main(const char *path);

/* pool.c (in Aether) and file.c (in the worker) */
void pool_request(struct conn *c, uint32_t request, const uint8_t *body, size_t n);
void pool_event(struct watch *w);
void pool_timers(int64_t now, int64_t *next);
void pool_conn_lost(uint32_t serial);
size_t file_handle(const uint8_t *body, size_t n, uint8_t *reply, size_t cap, uint16_t *type);
#endif
