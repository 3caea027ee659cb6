"""One blob that the loader fills, and its readers: what they read is fetched, checked and written before they go on."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.errors import DsecError
from dsec.layers import manifest, objects, ranges, units
from dsec.layers.chunks import Filler, Start
from dsec.layers.gate import SLOTS, Event, Gate
from dsec.layers.mounts import bitmap

if TYPE_CHECKING:
    from dsec.layers.loader import Worker

REQUEST_S = 5.0  # a store may be silent so long; obstore's own retries are in it
FIRST, WINDOW, STEP = 4, 48, 8  # chunks of a prefetch list that are sorted together, at first and later; neighbours in one request
TROUBLE_EVERY_S = 1.0

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mapped(fd: int, size: int) -> memoryview:
    """Shared memory of a file, as long as anybody has a part of it; `mmap.mmap` keeps a descriptor for as long. Raises `OSError`."""
    if (at := _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "map the journal")
    memory = (ctypes.c_ubyte * size).from_address(at)
    weakref.finalize(memory, _libc.munmap, at, size)
    return memoryview(memory).cast("B")


def _ended(_spans: Sequence[ranges.Span]) -> ranges.Given:
    raise OSError(errno.ESHUTDOWN, "the loader ends")


class Blob:
    """One blob in the making and its readers."""

    def __init__(self, worker: Worker, spec: dict[str, Any], way: Gate, fds: list[int]) -> None:
        self.worker = worker
        self.number = next(_numbers)
        self.name: str = spec["name"]
        self.gate = way
        self.fd, self.slot, self._claim = fds[1], self.gate.slot, fds[3]
        self.view = _mapped(fds[2], self.slot * SLOTS)
        self._next = 0  # slot
        self.lock = threading.Lock()
        self.touched: list[int] = []  # read first in this order, beside those of the list
        self._touched_path: str = spec["touched"]
        self._touched_written = 0
        self._ahead: list[int] = spec["ahead"]
        self._patience: float = spec["patience"]
        self._told = 0.0
        known = manifest.load(spec["manifest"], self.name)
        self.even = known.origin is msgspec.UNSET  # chunks are alike, and small
        self._list = [n for n in dict.fromkeys(self._ahead) if 0 <= n < len(known.chunks)]
        self._listed = set(self._list)
        self._get = self._source(spec["remote"], known)
        if spec["remote"].startswith(objects.REGISTRY):  # a registry is no store to stand on: all of it comes, behind what is read
            self._ahead = list(range(len(known.chunks)))
        self.filler = Filler(self.fd, known, bitmap(spec["data"]), self.fetch, worker.pool, self.whole)
        self.seen = bytearray(len(known.chunks))  # shared with the hand
        for number in self._list:
            self.seen[number] = 2
        self._noted = bytearray(len(known.chunks))
        self._units: units.Units | None = None  # `learn`
        self._meta: str = spec.get("meta", "")
        os.close(fds[2])
        self.closed = False
        self.flushing = threading.Lock()
        self.fetched = self.rest = self.busy = 0  # for the flusher

    # --- the store -------------------------------------------------------------------------------------------------

    def fetch(self, spans: Sequence[ranges.Span]) -> ranges.Given:
        """Pieces of the blob from the store; tries again while the readers have patience. Raises `OSError` EIO."""
        end = time.monotonic() + self._patience
        pause, given = 0.05, 0
        while True:
            try:
                for piece in self._get(spans[given:]):
                    given += 1
                    yield piece
                return
            except DsecError as error:
                if not error.retryable or time.monotonic() + pause > end:
                    raise OSError(errno.EIO, str(error)) from error
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _source(self, url: str, known: manifest.Manifest) -> ranges.Pieces:
        if url.startswith(objects.REGISTRY):
            from dsec.layers import blobrange  # few layers need it, and what it needs

            return ranges.whole(blobrange.BlobRange(url, known))
        path = f"layers/{self.name.removeprefix('sha256:')}/data"
        return ranges.pieces(url, path, self.worker.store(url), REQUEST_S)

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
            self._serve(slot, event, then=waiting.release)
        for _ in left:
            waiting.acquire()
        self.worker.tell({"name": self.name, "what": "recovered", "events": len(left)})

    def take(self) -> list[list[int]]:
        """Read one event into a free slot and see to it (`missed`). One thread at a time. Raises `Over`."""
        for _ in range(SLOTS):
            part = self._part(self._next)
            if not any(part[:4]):
                break
            self._next = (self._next + 1) % SLOTS
        else:  # too many under way: the rest waits in the kernel
            time.sleep(0.001)
            return []
        try:
            taken = self.gate.take(part)
        except OSError as error:  # no descriptor left: the kernel has refused the reader
            self.trouble(error)
            return []
        return self.missed(self._next) if taken else []

    def missed(self, slot: int) -> list[list[int]]:
        """Answer the event in a slot if its chunks are there. If not, they are claimed, and the caller fetches what is returned."""
        event = self.gate.event(self._part(slot))
        if event is None:
            self._clear(slot)
            return []
        runs: list[list[int]] = []
        self._serve(slot, event, start=runs.append)
        return runs

    def _part(self, slot: int) -> memoryview:
        return self.view[slot * self.slot : (slot + 1) * self.slot]

    def _serve(self, slot: int, event: Event, *, then: Callable[[], object] | None = None, start: Start | None = None) -> None:
        """``then``: it is a dead worker's, whose descriptors went with it, and somebody waits for the answer."""
        wanted = self.filler.chunks(event[1], event[2])

        def answer(error: OSError | None, *, wait: bool) -> None:
            # The kernel takes a few errors only, and would let a reader wait for ever for another.
            number = 0 if error is None else error.errno if error.errno in (errno.ENOSPC, errno.EDQUOT) else errno.EIO
            if not self.gate.answer(event, number or 0, wait=wait):
                self.worker.local.submit(answer, error, wait=True)  # others need not wait for the disk too
                return
            self._clear(slot)  # before the number can be used again
            if then is None:
                self.gate.forget(event)
            if error is not None:
                self.trouble(error)
            if then is not None:
                then()

        more = self.note(event[1], wanted)
        behind = list(itertools.takewhile(more.__contains__, itertools.count(wanted.stop)))
        if self.filler.want(wanted, lambda error: answer(error, wait=False), behind, start):
            more = [number for number in more if number not in behind]
        self.bring(more)

    def _clear(self, slot: int) -> None:
        self._part(slot)[:4] = b"\0\0\0\0"

    def note(self, offset: int, wanted: range) -> list[int]:
        """Remember first reads, for the next node's prefetch; returns what should be fetched beside them."""
        with self.lock:
            for number in wanted:
                if not self._noted[number]:
                    self._noted[number] = self.seen[number] = 1
                    if number not in self._listed:
                        self.touched.append(number)
            if not wanted or self._units is None or self._listed.issuperset(wanted):  # the list knows what comes next
                return []
            return self._units.read(offset, wanted, self.filler.coming)

    def bring(self, numbers: list[int]) -> None:
        """Fetch what nobody waits for yet; neighbours together, when one comes after the other."""
        run: list[int] = []
        for number in numbers:
            if run and number != run[-1] + 1:
                self.worker.near.submit(self.filler.bring, run)
                run = []
            run.append(number)
        if run:
            self.worker.near.submit(self.filler.bring, run)

    def learn(self) -> None:
        """Find out what belongs together. Readers need not wait for that."""
        if self.even:
            known = self.filler.manifest
            self._units = units.Units(units.read(self._meta), known.chunk, len(known.chunks))

    def prefetch(self) -> list[Future[None]]:
        """Replay an earlier run's first reads, a few at a time and neighbours together, so that whoever reads meanwhile waits for no more
        than one request."""
        known = len(self.filler.manifest.chunks)
        numbers = [n for n in self._ahead if 0 <= n < known]
        start, window = 0, FIRST
        coming: list[Future[None]] = []
        while start < len(numbers):
            run: list[int] = []
            for number in sorted(numbers[start : start + window]):
                if run and (number != run[-1] + 1 or len(run) == STEP):
                    coming.append(self.worker.spare.submit(self.filler.bring, run))
                    run = []
                run.append(number)
            coming.append(self.worker.spare.submit(self.filler.bring, run))
            start, window = start + window, min(2 * window, WINDOW)
        return coming

    def warm(self, mount: int) -> None:
        """Have the kernel read through the mount what the list has brought and nobody has read yet: a read of it then raises no event and
        copies nothing. It counts as read. This waits for nobody but the threads that answer."""
        files = units.Mounted(self._meta, mount)
        for number in self._list:
            if self.closed:
                return
            if self.filler.have[number] and self.seen[number] != 1:
                start, length = self.filler.manifest.span(number)
                files.read(start, start + length)

    def trouble(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._told >= TROUBLE_EVERY_S:
            self._told = now
            self.worker.tell({"name": self.name, "what": "trouble", "text": str(error)})

    # --- the end ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self.filler.flush()
        self.write_touched()

    def write_touched(self) -> None:
        """What was read of the list, in its order, and then what was not on it."""
        order = [number for number in self._list if self.seen[number] == 1] + self.touched
        if self._touched_path and len(order) > self._touched_written:
            self._touched_written = len(order)
            temporary = f"{self._touched_path}.{os.getpid()}"
            with open(temporary, "w") as file:
                json.dump(order, file)
            os.rename(temporary, self._touched_path)

    def close(self) -> None:
        """Let go of the gate: it is gone when all have done so. Waits for what is under way."""
        self.worker.hand.remove(self.number)
        with self.flushing:
            self.closed = True
        try:
            self.filler.close()
        except OSError as error:  # a full disk: what is not durable is fetched again one day
            self.trouble(error)
        self.gate.close()
        self._get = _ended  # with its connections
        os.close(self.fd)
        os.close(self._claim)
        self.worker.served.pop(self.number)
        self.worker.wake_up()
