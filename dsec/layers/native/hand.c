/*
 * The loader's quick hand: a library in its process that takes fanotify's events without Python's lock, and answers those whose
 * chunks are there. On a layer that is being filled that is most of them: the kernel asks for each 64 KiB that are read, again and again.
 * What is missing it leaves in its slot of the journal and tells Python.
 *
 * Many threads wait in hand_wait; each gate is armed for one of them at a time (EPOLLONESHOT), so a gate's fields need no lock. Its libc is
 * that of the process that loads it.
 */
#include <stddef.h>
#include <stdint.h>

/* The kernel's and libc's, on both of our architectures; the compiler has no headers for a library that brings no libc. */
struct pollfd;
struct event { /* epoll_event */
	uint32_t events;
	void *gate;
}
#ifdef __x86_64__
__attribute__((packed))
#endif
;
struct metadata { /* fanotify_event_metadata */
	uint32_t event_len;
	uint8_t vers, reserved;
	uint16_t metadata_len;
	uint64_t mask;
	int32_t fd, pid;
};
struct response { /* fanotify_response */
	int32_t fd;
	uint32_t response;
};
enum { EAGAIN = 11, EINTR = 4, EPOLLIN = 1, EPOLL_CTL_ADD = 1, EPOLL_CTL_DEL = 2, EPOLL_CTL_MOD = 3, FAN_ALLOW = 1 };
static const uint32_t ONE_THREAD = EPOLLIN | 1U << 30; /* EPOLLONESHOT */
extern long read(int, void *, size_t), write(int, const void *, size_t);
extern int close(int), poll(struct pollfd *, unsigned long, int), epoll_wait(int, struct event *, int, int), epoll_ctl(int, int, int, struct event *);
extern int *__errno_location(void);
#define errno (*__errno_location())

enum { SLOT = 64, RANGE = 6 /* FAN_EVENT_INFO_TYPE_RANGE, Linux 6.14 */ };
enum { MISSING = 1, FRESH = 2, READY = 3, TROUBLE = 4 };

/* Shared with Python (`hand.py`), which keeps it in memory until the process ends. */
struct gate {
	int32_t fd;
	int32_t number;     /* the loader's own, for hand_wait's caller */
	int32_t slots;      /* of the journal; a slot is free when its first word is 0 */
	int32_t plain;      /* 0: every event is Python's to take (READY) */
	uint8_t *journal;
	const uint8_t *have; /* a byte for each chunk */
	uint8_t *seen;       /* the same: 0, nobody has read it; 1, somebody has; 2, nobody has, and Python need not be told who is the first */
	uint64_t chunk;      /* bytes */
	uint64_t count;
	int32_t next;
	int32_t inside;      /* a thread is between hand_wait and hand_arm, or about to be */
	int32_t closed;
};

struct found {
	int32_t number, kind;
	int32_t slot;        /* MISSING */
	int32_t error;       /* TROUBLE */
	uint64_t first, last; /* FRESH: chunks that are there, and were not read before */
	uint64_t offset;     /* FRESH: where that read began */
};

static uint32_t *word(const struct gate *gate, int slot)
{
	return (uint32_t *)(void *)(gate->journal + (size_t)slot * SLOT);
}

static int free_slot(struct gate *gate)
{
	for (int tried = 0; tried < gate->slots; tried++) {
		int slot = gate->next;
		if (!__atomic_load_n(word(gate, slot), __ATOMIC_ACQUIRE))
			return slot;
		gate->next = slot + 1 < gate->slots ? slot + 1 : 0;
	}
	return -1;
}

/* What the event is about; 0 for one that has no descriptor. Without a range it is all of the file. */
static int parse(const uint8_t *slot, int32_t *fd, uint64_t *offset, uint64_t *count)
{
	struct metadata event;
	__builtin_memcpy(&event, slot, sizeof event);
	*fd = event.fd;
	*offset = 0;
	*count = UINT64_MAX / 2;
	for (uint32_t at = event.metadata_len; at + 24 <= event.event_len && at + 24 <= SLOT;) {
		uint16_t size;
		__builtin_memcpy(&size, slot + at + 2, sizeof size);
		if (slot[at] == RANGE) {
			__builtin_memcpy(offset, slot + at + 8, sizeof *offset);
			__builtin_memcpy(count, slot + at + 16, sizeof *count);
			break;
		}
		at += size < 4 ? 4 : size;
	}
	return event.event_len >= sizeof event && event.fd >= 0;
}

/* Let the reader go on; true when Python is to be told that a chunk of it is read for the first time. */
static int allow(struct gate *gate, int slot, int32_t fd, struct found *out)
{
	struct response answer = {.fd = fd, .response = FAN_ALLOW};
	int fresh = 0;
	while (write(gate->fd, &answer, sizeof answer) < 0 && errno == EINTR)
		;
	__atomic_store_n(word(gate, slot), 0, __ATOMIC_RELEASE); /* before the number can be used again */
	close(fd);
	for (uint64_t chunk = out->first; chunk <= out->last; chunk++) {
		fresh |= gate->seen[chunk] == 0;
		gate->seen[chunk] = 1;
	}
	return fresh;
}

/* Take events until one concerns Python; 0 when there are no more. */
static int take(struct gate *gate, struct found *out)
{
	for (;;) {
		int32_t fd;
		uint64_t offset, count;
		int slot = free_slot(gate), there = 1;
		if (slot < 0) {
			poll(NULL, 0, 1); /* too many under way: the rest waits in the kernel */
			return 0;
		}
		long got = read(gate->fd, word(gate, slot), SLOT);
		if (got <= 0) {
			if (got == 0 || errno == EAGAIN || errno == EINTR)
				return 0;
			out->error = errno; /* no descriptor left: the kernel has refused the reader */
			return out->kind = TROUBLE;
		}
		if (!parse((uint8_t *)word(gate, slot), &fd, &offset, &count)) {
			__atomic_store_n(word(gate, slot), 0, __ATOMIC_RELEASE);
			continue;
		}
		out->offset = offset;
		out->first = offset / gate->chunk;
		out->last = (offset + (count ? count : 1) - 1) / gate->chunk;
		if (out->last >= gate->count)
			out->last = gate->count - 1;
		for (uint64_t chunk = out->first; chunk <= out->last && there; chunk++)
			there = __atomic_load_n(&gate->have[chunk], __ATOMIC_ACQUIRE);
		if (!there) {
			out->slot = slot;
			return out->kind = MISSING;
		}
		if (allow(gate, slot, fd, out))
			return out->kind = FRESH; /* an advice, and no more: nobody needs to wait for what becomes of it */
	}
}

/* Another thread may take this gate's events. */
void hand_arm(int epoll, struct gate *gate)
{
	struct event event = {.events = ONE_THREAD, .gate = gate};
	if (!__atomic_load_n(&gate->closed, __ATOMIC_SEQ_CST))
		epoll_ctl(epoll, EPOLL_CTL_MOD, gate->fd, &event);
	__atomic_sub_fetch(&gate->inside, 1, __ATOMIC_SEQ_CST); /* last: from here on the descriptor may be closed, and its number another's */
}

int hand_add(int epoll, struct gate *gate)
{
	struct event event = {.events = ONE_THREAD, .gate = gate};
	return epoll_ctl(epoll, EPOLL_CTL_ADD, gate->fd, &event) ? errno : 0;
}

/* Nothing is taken any more when this returns: the gate's descriptor may be closed. It may sleep for as long as Python holds an event. */
void hand_remove(int epoll, struct gate *gate)
{
	__atomic_store_n(&gate->closed, 1, __ATOMIC_SEQ_CST);
	epoll_ctl(epoll, EPOLL_CTL_DEL, gate->fd, NULL);
	while (__atomic_load_n(&gate->inside, __ATOMIC_SEQ_CST))
		poll(NULL, 0, 1);
}

/* Sleeps until there is something for Python, which calls hand_arm then, but for FRESH. */
void hand_wait(int epoll, struct found *out)
{
	for (;;) {
		struct event event;
		if (epoll_wait(epoll, &event, 1, -1) != 1)
			continue;
		struct gate *gate = event.gate;
		__atomic_add_fetch(&gate->inside, 1, __ATOMIC_SEQ_CST); /* a count: the next may be in before the last is out */
		if (!__atomic_load_n(&gate->closed, __ATOMIC_SEQ_CST)) {
			out->number = gate->number;
			if (!gate->plain) {
				out->kind = READY;
				return;
			}
			int kind = take(gate, out);
			if (kind == FRESH)
				hand_arm(epoll, gate);
			if (kind)
				return;
		}
		hand_arm(epoll, gate);
	}
}
