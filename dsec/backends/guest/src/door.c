/* A listener on the sandbox's loopback, the way out that the node opens: `dsec:listen tcp PORT`. It needs no process. Each connection that
 * it takes becomes an operation as one of `dsec:connect` is, and its id is written to the listener's output: the node that reads there
 * serves it. Its id is the listener's with a number in its last eight bytes. One that nobody serves within HOLD_MS is closed. */
#include "aether.h"
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct op *op_of_door(struct watch *w) { return (struct op *)((char *)w - offsetof(struct op, door)); }

void door_start(struct conn *c, uint32_t request, struct start *s, int port) {
    s->flags = S_SERVICE | S_SOCKET | S_DOOR; /* what it says is kept for a reader that is away, and its own end is an order */
    struct op *op = op_new(c, request, s);
    if (!op) return;
    int fd = listen_loopback(port);
    if (fd < 0) {
        send_error(c, request, errno == EADDRINUSE ? E_CONFLICT : E_SANDBOX, errno, "port", "cannot listen");
        op_drop(op);
        return;
    }
    op->door.fd = fd;
    op_enlist(op, c, request);
    watch_set(&op->door, EPOLLIN);
}

static void take_in(struct op *door, int fd) {
    uint8_t id[16];
    uint64_t number = ++door->guests;
    memcpy(id, door->id, 8);
    memcpy(id + 8, &number, 8);
    struct start s = {.op = id, .flags = S_SERVICE | S_SOCKET | S_STDIN | S_STREAM | S_GUEST};
    struct op *op = op_find(id) ? NULL : op_new(NULL, 0, &s);
    if (!op || (op->in.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3)) < 0) {
        if (op) op_drop(op);
        close(fd);
        return;
    }
    op->out[0]->w.fd = fd;
    door->guest_n++;
    op_enlist(op, NULL, 0);
    stream_interest(op->out[0]);
    stream_put(door->out[0], id, sizeof id);
}

void door_event(struct op *door) {
    bool full = false;
    while (door->running && door->guest_n < MAX_DOOR) {
        int fd = accept4(door->door.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            full = errno != EAGAIN && errno != EINTR && errno != ECONNABORTED;
            break;
        }
        take_in(door, fd);
    }
    if (full && !door->guest_n) usleep(1000); /* no descriptor is left, and none of ours will come free: slowly, then */
    watch_set(&door->door, door->guest_n < MAX_DOOR && !(full && door->guest_n) ? EPOLLIN : 0);
    output_pump(door);
}

void door_left(const struct op *guest) {
    struct op *door = door_of(guest);
    if (!door || !door->guest_n) return;
    door->guest_n--;
    watch_set(&door->door, EPOLLIN);
}
