"""The worker that fills partly filled blobs when somebody reads them: a process of its own, a child of the holder.

    python -m dsec.layers.loader        # descriptor 3: SEQPACKET to the holder

One thread takes events from the gates (`gate`: fanotify, or FUSE on older kernels) and puts each into a free slot of its blob's
journal; a pool of threads fetches chunks. An event is answered when its chunks are there, with EIO when the store cannot give them, and
by a successor when this process dies first: an answer needs nothing but the event's number, so a successor answers what it finds
in the journal, before it takes new events (whose numbers could be the same).

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
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from dsec import syscalls
from dsec.errors import DsecError
from dsec.layers import manifest, objects
from dsec.layers.chunks import FLUSH_S, RUN, Filler
from dsec.layers.fuse import Fuse
from dsec.layers.gate import SLOTS, Event, Fanotify, Gate, Over
from dsec.layers.lazy import CONTROL_FD, MAX_MESSAGE
from dsec.layers.mounts import bitmap

_COMM = ctypes.create_string_buffer(b"dsec-loader")
DEMAND, NEAR, AHEAD, LOCAL = 12, 4, 4, 4  # threads for what is waited for, what may be next, what a list says, what is on the disk
REQUEST_S = 5.0  # one request, with obstore's own retries
SEQUENTIAL = 4  # neighbouring reads after which reading ahead grows
STREAMS = 16
AROUND, DENSE = 16, 3  # where so many chunks of so many on either side were read, the next one will be too (half of them are)
WINDOW, STEP = 48, 8  # chunks of a prefetch list that are sorted together; neighbours of them in one request
TROUBLE_EVERY_S = 1.0
RETRY_S = 1.0  # a blob that cannot be served is tried again
BUSY, REST = 6, 10  # of FLUSH_S: flushed so often while chunks come; from the last chunk until the page cache of the blob is given back


class Blob:
    """One blob in the making and its readers."""

    def __init__(self, worker: Worker, spec: dict[str, Any], way: Gate, fds: list[int]) -> None:
        self.worker = worker
        self.name: str = spec["name"]
        self.gate = way
        self.fd, self.slot = fds[1], self.gate.slot
        self.journal = mmap.mmap(fds[2], self.slot * SLOTS)
        self.view = memoryview(self.journal)
        self.free = list(range(SLOTS))
        self.lock = threading.Lock()
        self.touched: list[int] = []
        self._seen: set[int] = set()
        self._touched_path: str = spec["touched"]
        self._touched_written = 0
        self._streams: OrderedDict[int, int] = OrderedDict()
        self._ahead: list[int] = spec["ahead"]
        self._patience: float = spec["patience"]
        self._told = 0.0
        known = manifest.load(spec["manifest"], self.name)
        self._even = known.origin is msgspec.UNSET  # chunks are alike, and small
        self._get = self._source(spec["remote"], known)
        if spec["remote"].startswith(objects.REGISTRY):  # a registry is no store to stand on: all of it comes, behind what is read
            self._ahead = list(range(len(known.chunks)))
        self.filler = Filler(self.fd, known, bitmap(spec["data"]), self.fetch, worker.pool, self.whole)
        os.close(fds[2])
        self.closed = False
        self.flushing = threading.Lock()
        self.fetched = self.rest = self.busy = 0  # for the flusher

    # --- the store -------------------------------------------------------------------------------------------------

    def fetch(self, offset: int, length: int) -> Any:
        """Bytes of the blob from the store; tries again while the readers have patience. Raises `OSError` EIO."""
        end = time.monotonic() + self._patience
        pause = 0.05
        while True:
            try:
                return self._get(offset, length)
            except DsecError as error:
                if not error.retryable or time.monotonic() + pause > end:
                    raise OSError(errno.EIO, str(error)) from error
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _source(self, url: str, known: manifest.Manifest) -> Callable[[int, int], Any]:
        if url.startswith(objects.REGISTRY):
            from dsec.layers import blobrange  # few layers need it, and what it needs

            return blobrange.BlobRange(url, known)
        import obstore

        store, key = self.worker.store(url), f"layers/{self.name.removeprefix('sha256:')}/data"

        def get(offset: int, length: int) -> Any:
            with objects.errors(self.name):
                return obstore.get_range(store, key, start=offset, length=length)

        return get

    def whole(self) -> None:
        self.write_touched()
        self.worker.tell({"name": self.name, "what": "whole", "fetched": self.filler.fetched, "requests": self.filler.requests})
        self.worker.wake_up()

    # --- events ----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Answer what a worker before us took and left behind; new events wait until then."""
        left = [n for n in range(SLOTS) if any(self._part(n)[:4])]
        if not left:
            return
        waiting = threading.Semaphore(0)
        for slot in left:
            event = self.gate.event(self._part(slot))
            if event is None:
                self._clear(slot)
                waiting.release()
                continue
            self.free.remove(slot)
            self._serve(slot, event, ours=False, then=waiting.release)
        for _ in left:
            waiting.acquire()
        self.worker.tell({"name": self.name, "what": "recovered", "events": len(left)})

    def take(self) -> None:
        """Read what is there; each event into a slot of its own. Raises `Over`."""
        while True:
            with self.lock:
                slot = self.free.pop() if self.free else -1
            if slot < 0:  # too many under way: the rest waits in the kernel
                time.sleep(0.001)
                return
            part = self._part(slot)
            try:
                taken = self.gate.take(part)
            except OSError as error:  # no descriptor left: the kernel has refused the reader
                self._trouble(error)
                taken = False
            if not taken:
                with self.lock:
                    self.free.append(slot)
                return
            event = self.gate.event(part)
            if event is None:
                self._clear(slot)
                continue
            self._serve(slot, event, ours=True)

    def _part(self, slot: int) -> memoryview:
        return self.view[slot * self.slot : (slot + 1) * self.slot]

    def _serve(self, slot: int, event: Event, *, ours: bool, then: Callable[[], object] | None = None) -> None:
        wanted = self.filler.chunks(event[1], event[2])

        def answer(error: OSError | None, *, wait: bool) -> None:
            # The kernel takes a few errors only, and would let a reader wait for ever for another.
            number = 0 if error is None else error.errno if error.errno in (errno.ENOSPC, errno.EDQUOT) else errno.EIO
            if not self.gate.answer(event, number or 0, wait=wait):
                self.worker.local.submit(answer, error, wait=True)  # others need not wait for the disk too
                return
            self._clear(slot)  # before the number can be used again
            if ours:
                self.gate.forget(event)
            if error is not None:
                self._trouble(error)
            if then is not None:
                then()

        self.filler.want(wanted, lambda error: answer(error, wait=False), beside=self._pairs(wanted))
        self._note(wanted)

    def _clear(self, slot: int) -> None:
        self._part(slot)[:4] = b"\0\0\0\0"
        with self.lock:
            self.free.append(slot)

    def _note(self, wanted: range) -> None:
        """Remember first reads for the next node's prefetch, and read ahead where reads are neighbours."""
        for number in wanted:
            if number not in self._seen:
                self._seen.add(number)
                self.touched.append(number)
        if not wanted:
            return
        length = max(self._streams.pop(wanted[0], 0), self._streams.pop(wanted[0] - 1, 0) + 1)
        self._streams[wanted[-1]] = length
        if len(self._streams) > STREAMS:
            self._streams.popitem(last=False)
        first, last = wanted[-1] + 1, len(self.filler.manifest.chunks)
        more = min(length // 2 + 1, RUN) if length >= SEQUENTIAL else 1 if first < last and self._dense(first) else 0
        missing = [number for number in range(first, min(first + more, last)) if not self.filler.has(number)]
        if missing:
            self.worker.near.submit(self.filler.bring, missing)

    def _dense(self, number: int) -> bool:
        if self.filler.has(number):
            return False
        return sum(other in self._seen for other in range(number - AROUND, number + AROUND)) >= DENSE

    def _pairs(self, wanted: range) -> range:
        """A miss brings a pair of chunks: its round trip costs more than the other half, which is read soon more often than not."""
        if not wanted or not self._even:
            return wanted
        return range(wanted[0] & ~1, min(wanted[-1] | 1, len(self.filler.manifest.chunks) - 1) + 1)

    def prefetch(self) -> None:
        """Replay an earlier run's first reads, a few at a time and neighbours together, so that whoever reads meanwhile waits for no more
        than one request."""
        known = len(self.filler.manifest.chunks)
        numbers = [n for n in self._ahead if 0 <= n < known]
        for start in range(0, len(numbers), WINDOW):
            run: list[int] = []
            for number in sorted(numbers[start : start + WINDOW]):
                if run and (number != run[-1] + 1 or len(run) == STEP):
                    self.worker.spare.submit(self.filler.bring, run)
                    run = []
                run.append(number)
            self.worker.spare.submit(self.filler.bring, run)

    def _trouble(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._told >= TROUBLE_EVERY_S:
            self._told = now
            self.worker.tell({"name": self.name, "what": "trouble", "text": str(error)})

    # --- the end ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self.filler.flush()
        self.write_touched()

    def write_touched(self) -> None:
        if self._touched_path and len(self.touched) > self._touched_written:
            self._touched_written = len(self.touched)
            temporary = f"{self._touched_path}.{os.getpid()}"
            with open(temporary, "w") as file:
                json.dump(self.touched[: self._touched_written], file)
            os.rename(temporary, self._touched_path)

    def close(self) -> None:
        """Let go of the gate: it is gone when all have done so. Waits for what is under way."""
        with self.flushing:
            self.closed = True
        try:
            self.filler.close()
        except OSError as error:  # a full disk: what is not durable is fetched again one day
            self._trouble(error)
        self.gate.close()
        os.close(self.fd)
        self.worker.wake_up()


class Worker:
    def __init__(self, control: socket.socket) -> None:
        self.control: socket.socket | None = control
        self.blobs: dict[int, Blob] = {}
        self.pool = ThreadPoolExecutor(DEMAND, "fetch")
        self.near = ThreadPoolExecutor(NEAR, "near")
        self.spare = ThreadPoolExecutor(AHEAD, "ahead")
        self.local = ThreadPoolExecutor(LOCAL, "local")
        self.busy: list[threading.Thread] = []  # with the beginning or the end of a blob
        self.poll = select.epoll()
        self.wake, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.stores: dict[str, Any] = {}
        self.fresh: list[Blob] = []
        self.dropped: set[str] = set()
        self.lock = threading.Lock()

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
        while self.control is not None or self.blobs or any(thread.is_alive() for thread in self.busy):
            for fd, _ in self.poll.poll(5.0):
                if self.control is not None and fd == self.control.fileno():
                    self._command()
                elif fd == self.wake:
                    os.read(self.wake, 4096)
                    self._begin()
                    for blob in [blob for blob in self.blobs.values() if self.control is None and blob.filler.left == 0]:
                        if not blob.gate.lasting:
                            self._end(blob)
                elif fd in self.blobs:
                    self._take(self.blobs[fd])

    def _take(self, blob: Blob) -> None:
        try:
            blob.take()
        except Over:
            self._end(blob)
            self.tell({"name": blob.name, "what": "unused"})

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
            self._apart(self._adopt, message, list(fds))
        elif message["op"] == "quit":
            self.poll.unregister(self.control.fileno())
            self.control.close()
            self.control = None
            for blob in list(self.blobs.values()):
                self._end(blob)
        elif message["op"] == "drop":
            self.dropped.add(message["name"])
            for blob in [blob for blob in self.blobs.values() if blob.name == message["name"]]:
                self._end(blob)

    def _apart(self, work: Callable[..., None], *args: Any) -> None:
        """What may sleep runs in a thread of its own."""
        thread = threading.Thread(target=work, args=args, daemon=True)
        self.busy = [other for other in self.busy if other.is_alive()] + [thread]
        thread.start()

    def _adopt(self, message: dict[str, Any], fds: list[int]) -> None:
        """In a thread: it may have to wait for another worker's end, and for the store."""
        # A description of our own, for the lock: copies of the descriptor share theirs. It ends with this process.
        _take_over(os.open(f"/proc/self/fd/{fds[2]}", os.O_RDWR | os.O_CLOEXEC))
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
        blob.prefetch()
        if self.control is None:
            self._complete(blob)

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
            self.blobs[blob.gate.fd] = blob
            self.poll.register(blob.gate.fd, select.EPOLLIN)

    def _end(self, blob: Blob) -> None:
        self.blobs.pop(blob.gate.fd, None)
        self.poll.unregister(blob.gate.fd)
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
            blob._trouble(error)


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


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    syscalls.prctl(syscalls.PR_SET_NAME, ctypes.addressof(_COMM))
    sys.setswitchinterval(0.0005)  # a reader waits for a hand-over between threads: 5 ms are as long as the fetch itself
    Worker(socket.socket(fileno=CONTROL_FD)).run()
    os._exit(0)  # threads that still sleep hold nothing


if __name__ == "__main__":
    main()
