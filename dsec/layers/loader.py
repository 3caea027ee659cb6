"""The worker that fills partly filled blobs when somebody reads them: a process of its own, a child of the holder.

    python -m dsec.layers.loader        # descriptor 3: SEQPACKET to the holder

Threads take events from the gates (`gate`: fanotify, or FUSE on older kernels; `hand` is where they wait) and put each into a free slot
of its blob's journal (`blob`). Whoever takes one whose chunks are missing fetches them: nothing is handed from thread to thread while a
reader waits. An event is answered when its chunks are there, with EIO when the store cannot give them, and by a successor when this
process dies first: an answer needs nothing but the event's number, so a successor answers what it finds in the journal, before it takes new
events (whose numbers could be the same).

When the holder goes away this process does not: readers wait for it. It fetches everything that is missing and ends when all blobs
are whole (and nothing is mounted through FUSE), or when a new holder's worker, holding the same kits, ends it.

It never touches a marked blob but through descriptors that raise no events, so it cannot wait for itself.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any

from dsec import syscalls
from dsec.errors import DsecError
from dsec.layers import objects
from dsec.layers.blob import REQUEST_S, Blob
from dsec.layers.chunks import FLUSH_S
from dsec.layers.fuse import Fuse
from dsec.layers.gate import SLOTS, Fanotify, Gate, Over
from dsec.layers.hand import FRESH, MISSING, READY, Found, Hand
from dsec.layers.lazy import CONTROL_FD, MAX_MESSAGE
from dsec.layers.mounts import bitmap

_COMM = ctypes.create_string_buffer(b"dsec-loader")
DEMAND, NEAR, AHEAD, LOCAL = 12, 4, 4, 4  # threads for what is waited for, what may be next, what a list says, what is on the disk
SERVE = "serve"
# Nobody waits for what is fetched ahead, and that is most of the work: who answers a reader, and the reader itself, come before it.
LONG_S = 0.02  # slices, in seconds
LEAVE_S = 0.5  # until a layer that is no longer used is let go of
MOUNT_S = 2.0  # from a blob's mark to its mount, at most
RETRY_S = 1.0  # a blob that cannot be served is tried again
BUSY, REST = 6, 10  # of FLUSH_S: flushed so often while chunks come; from the last chunk until the page cache of the blob is given back


class Worker:
    def __init__(self, control: socket.socket) -> None:
        self.control: socket.socket | None = control
        self.blobs: dict[int, Blob] = {}
        self.hand = Hand()
        self.pool = ThreadPoolExecutor(DEMAND, "fetch")
        self.near = ThreadPoolExecutor(NEAR, "near", syscalls.run_slice, (LONG_S,))
        self.spare = ThreadPoolExecutor(AHEAD, "ahead", syscalls.run_slice, (LONG_S,))
        self.local = ThreadPoolExecutor(LOCAL, "local")
        self.busy: list[threading.Thread] = []  # with the beginning or the end of a blob
        self.poll = select.epoll()
        self.served: dict[int, Blob] = {}  # those of which the hand knows
        self.away = 0  # threads that fetch what they have taken
        self.wake, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.stores: dict[str, Any] = {}
        self.fresh: list[Blob] = []
        self.over: list[Blob] = []  # nothing reads them any more
        self.dropped: set[str] = set()
        self.lock = threading.Lock()
        self.mounts: dict[str, SimpleQueue[int]] = {}  # of blobs with a prefetch list

    def store(self, url: str) -> Any:
        if url not in self.stores:
            self.stores[url] = objects.connect(url, timeout=REQUEST_S)
        return self.stores[url]

    def tell(self, news: dict[str, Any]) -> None:
        control = self.control
        if control is not None:
            with contextlib.suppress(OSError):  # the holder has gone; nobody else is to be told
                control.send(json.dumps({"event": "layer", **news}).encode())

    def wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.wake_write, b"1")

    def run(self) -> None:
        assert self.control is not None
        self.poll.register(self.control.fileno(), select.EPOLLIN)
        self.poll.register(self.wake, select.EPOLLIN)
        threading.Thread(target=self._flusher, daemon=True).start()
        for _ in range(DEMAND + 1):
            threading.Thread(target=self._serve, name=SERVE, daemon=True).start()
        while self.control is not None or self.blobs or any(thread.is_alive() for thread in self.busy):
            for fd, _ in self.poll.poll(5.0):
                if self.control is not None and fd == self.control.fileno():
                    self._command()
                elif fd == self.wake:
                    os.read(self.wake, 4096)
                    self._begin()
                    self._let_go()
                    for blob in [blob for blob in self.blobs.values() if self.control is None and blob.filler.left == 0]:
                        if not blob.gate.lasting:
                            self._end(blob)

    def _serve(self) -> None:
        """One of the threads that take events. It goes on with what it took, without a word to others, and leaves the gate to the next;
        one is always left to answer those whose chunks are there."""
        found = Found()
        syscalls.run_slice()
        while True:
            self.hand.wait(found)
            if (blob := self.served.get(found.number)) is not None:
                self._see_to(blob, found)

    def _see_to(self, blob: Blob, found: Found) -> None:
        if found.kind == FRESH:
            blob.bring(blob.note(found.offset, range(found.first, found.last + 1)))
            return
        runs: list[list[int]] = []
        try:
            if found.kind == MISSING:
                runs = blob.missed(found.slot)
            elif found.kind == READY:
                runs = blob.take()
            else:
                blob.trouble(OSError(found.error, os.strerror(found.error)))
        except Over:
            self.hand.arm(found.number, again=False)
            self.over.append(blob)
            self.wake_up()
            return
        self.hand.arm(found.number)
        for number, run in enumerate(runs):
            with self.lock:
                here = number == len(runs) - 1 and self.away < DEMAND
                self.away += here
            if not here:
                blob.filler.apart(run)
                continue
            try:
                blob.filler.run(run)
            finally:
                with self.lock:
                    self.away -= 1

    def _command(self) -> None:
        assert self.control is not None
        try:
            data, ancillary, _, _ = self.control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._orphaned()
            return
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload[: len(payload) - len(payload) % 4])
        message = json.loads(data)
        if message["op"] == "add":
            self.dropped.discard(message["name"])
            if message["ahead"] and message.get("way") != "fuse":
                self.mounts[message["name"]] = SimpleQueue()
            self._apart(self._adopt, message, list(fds))
        elif message["op"] == "mounted":
            if (mounts := self.mounts.get(message["name"])) is None:  # of a message that this worker has not been sent
                os.close(fds[0])
            else:
                mounts.put(fds[0])
        elif message["op"] == "quit":
            self.poll.unregister(self.control.fileno())
            self.control.close()
            self.control = None
            for blob in list(self.blobs.values()):
                self._end(blob)
        elif message["op"] == "drop":
            self.dropped.add(message["name"])
            mounts = self.mounts.pop(message["name"], None)
            while mounts is not None and not mounts.empty():  # of a blob that could not be served
                os.close(mounts.get())
            for blob in [blob for blob in self.blobs.values() if blob.name == message["name"]]:
                self._end(blob)

    def _apart(self, work: Callable[..., None], *args: Any) -> None:
        """What may sleep runs in a thread of its own."""
        thread = threading.Thread(target=work, args=args, daemon=True)
        self.busy = [other for other in self.busy if other.is_alive()] + [thread]
        thread.start()

    def _adopt(self, message: dict[str, Any], fds: list[int]) -> None:
        """In a thread: it may have to wait for another worker's end, and for the store."""
        # A description of our own, for the lock: copies of the descriptor share theirs. It ends with the blob, or with this process.
        fds.append(os.open(f"/proc/self/fd/{fds[2]}", os.O_RDWR | os.O_CLOEXEC))
        _take_over(fds[3])
        way = gate(message, fds)
        if not way.lasting and not os.path.exists(bitmap(message["data"])):  # whole already: nothing reads holes
            _answer_all(way, fds[2], 0)
            self.tell({"name": message["name"], "what": "whole", "fetched": 0, "requests": 0})
            for fd in fds:  # whoever reads meanwhile goes on when the others have let go too
                os.close(fd)
            return
        try:
            while (blob := self._blob(message, way, fds)) is None:
                _refuse(way, fds[2], RETRY_S)
                if message["name"] in self.dropped:
                    raise Over
        except Over:
            way.close()
            for fd in fds[1:]:
                os.close(fd)
            if message["name"] not in self.dropped:
                self.tell({"name": message["name"], "what": "unused"})
            return
        if blob.filler.left == 0:
            blob.whole()
        blob.recover()
        with self.lock:
            self.fresh.append(blob)
        self.wake_up()
        coming = blob.prefetch()
        blob.learn()
        if self.control is None:
            self._complete(blob)
        elif (mounts := self.mounts.get(blob.name)) is not None:
            self._warm(blob, mounts, coming)

    def _warm(self, blob: Blob, mounts: SimpleQueue[int], coming: list[Future[None]]) -> None:
        """When the list is there, since before that it would take the processor from those who bring the rest. A worker that follows a dead
        one has no mount to read through."""
        try:
            path = mounts.get(timeout=MOUNT_S)  # good for paths only
        except Empty:
            return
        try:
            mount = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=path)
        finally:
            os.close(path)
        try:
            while wait(coming, timeout=LEAVE_S).not_done:  # a store that is silent keeps no layer mounted that nobody uses
                if blob.closed:
                    return
            syscalls.run_slice(LONG_S)
            blob.warm(mount)
        finally:
            os.close(mount)

    def _blob(self, message: dict[str, Any], way: Gate, fds: list[int]) -> Blob | None:
        try:
            return Blob(self, message, way, fds)
        except (OSError, DsecError) as error:  # a directory that is not mounted yet, perhaps
            self.tell({"name": message["name"], "what": "trouble", "text": f"cannot be served: {error}"})
            return None

    def _begin(self) -> None:
        with self.lock:
            fresh, self.fresh = self.fresh, []
        for blob in fresh:
            self.blobs[blob.number] = self.served[blob.number] = blob
            quick = not blob.gate.lasting and blob.even
            self.hand.add(blob.number, blob.gate.fd, blob.view, blob.filler.have, blob.seen, blob.filler.manifest.chunk if quick else 0)

    def _let_go(self) -> None:
        while self.over:
            blob = self.over.pop()
            if blob.number in self.blobs:
                self._end(blob)
                self.tell({"name": blob.name, "what": "unused"})

    def _end(self, blob: Blob) -> None:
        del self.blobs[blob.number]
        self._apart(blob.close)

    def _orphaned(self) -> None:
        assert self.control is not None
        self.poll.unregister(self.control.fileno())
        self.control.close()
        self.control = None
        self._begin()
        for blob in self.blobs.values():
            self._complete(blob)

    def _complete(self, blob: Blob) -> None:
        threading.Thread(target=self._fill, args=(blob,), daemon=True).start()

    def _fill(self, blob: Blob) -> None:
        while blob.filler.left:
            if not os.path.exists(blob.filler.bitmap):
                blob.filler.flush()  # somebody else has completed it
                if blob.filler.left:
                    os._exit(0)  # the store is gone from this node, and with it whoever read
                break
            try:
                blob.filler.fill_all()
            except OSError as error:
                sys.stderr.write(f"loader: {blob.name}: {error}\n")
                time.sleep(1.0)
        self.wake_up()

    def _flusher(self) -> None:
        """Write down what is there when a blob is at rest, and now and then while it is not: the disk is slower than the readers."""
        while True:
            time.sleep(FLUSH_S)
            for blob in list(self.blobs.values()):
                with blob.flushing:
                    if not blob.closed:
                        self._look_after(blob)

    def _look_after(self, blob: Blob) -> None:
        fetched, blob.fetched = blob.fetched, blob.filler.fetched
        blob.rest = blob.rest + 1 if blob.fetched == fetched else 0
        blob.busy = 0 if blob.rest else blob.busy + 1
        try:
            if blob.busy % BUSY == 0:
                blob.flush()
            if blob.rest == REST:
                blob.filler.drop()
        except OSError as error:  # a full disk: what is not durable is fetched again one day
            blob.trouble(error)


def gate(spec: dict[str, Any], fds: list[int]) -> Gate:
    """What the readers of a kit's blob wait at."""
    return Fuse(fds[0], fds[1], spec["data"]) if spec.get("way") == "fuse" else Fanotify(fds[0])


def _refuse(way: Gate, journal: int, seconds: float) -> None:
    """A blob that cannot be filled now: for so long every reader gets EIO instead of waiting. Raises `Over`."""
    _answer_all(way, journal, errno.EIO)
    end = time.monotonic() + seconds
    with mmap.mmap(journal, way.slot * SLOTS) as memory, memoryview(memory) as view, view[: way.slot] as part:
        while (left := end - time.monotonic()) > 0:
            if not select.select([way.fd], [], [], left)[0]:
                return
            with contextlib.suppress(OSError):
                if way.take(part) and (event := way.event(part)) is not None:
                    way.answer(event, errno.EIO)
                    way.forget(event)
            part[:4] = bytes(4)


def _answer_all(way: Gate, journal: int, error: int) -> None:
    """One answer for all that a worker before us has taken."""
    with mmap.mmap(journal, way.slot * SLOTS) as memory, memoryview(memory) as view:
        for slot in range(SLOTS):
            with view[slot * way.slot : (slot + 1) * way.slot] as part:
                if any(part[:4]) and (event := way.event(part)) is not None:
                    way.answer(event, error)
        view[:] = bytes(way.slot * SLOTS)


def _take_over(fd: int) -> None:
    """A flock on the journal: one worker a kit. One that outlived its holder holds it still; we have its kit, so it may end."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for pid in lock_owners(fd):
                if _is_loader(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        else:
            return


def lock_owners(fd: int) -> list[int]:
    """Who holds a flock on the file, by /proc/locks."""
    status = os.fstat(fd)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with open("/proc/locks") as file:
        rows = [line.split() for line in file]
    return [int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == wanted and int(row[4]) > 0]


def _is_loader(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"dsec.layers.loader" in file.read() and pid != os.getpid()
    except OSError:
        return False


def _died(what: threading.ExceptHookArgs) -> None:
    """A thread that takes events must not be missing: the next worker answers what this one has taken."""
    threading.__excepthook__(what)
    if what.thread is not None and what.thread.name == SERVE:
        os._exit(1)


def main() -> None:
    threading.excepthook = _died
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    syscalls.prctl(syscalls.PR_SET_NAME, ctypes.addressof(_COMM))
    sys.setswitchinterval(0.0005)  # a reader waits for a hand-over between threads: 5 ms are as long as the fetch itself
    Worker(socket.socket(fileno=CONTROL_FD)).run()
    os._exit(0)  # threads that still sleep hold nothing


if __name__ == "__main__":
    main()
