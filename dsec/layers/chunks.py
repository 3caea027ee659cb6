"""Fill a sparse file chunk by chunk from somewhere slow: each chunk is fetched once, whoever asks, checked, written, and only then said
to be there.

What is there survives a crash in a bitmap beside the file (one bit a chunk). Its order is data before bits: a bit is written after
`fdatasync` of the data that it stands for, so after a power cut a chunk may be fetched twice but is never believed without its bytes.
A missing bitmap means: the file is whole. The layers' on-demand loader uses it; so can anything else that fills a file lazily.

Threads; nothing here knows of fanotify, of stores or of asyncio. Imports the standard library and the manifest only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dsec.layers.manifest import CHUNK, Manifest

RUN = 16  # chunks in one request at most: 4 MiB
FLUSH_S = 0.5
Fetch = Callable[[Sequence[tuple[int, int]]], Generator[Any, None, None]]  # neighbouring spans, one by one, with the buffer protocol
Start = Callable[[list[int]], object]
Done = Callable[[OSError | None], None]


class Altered(OSError):
    """A chunk that is not what its hash says."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.EIO, f"chunk {number} is not what the layer's manifest says")


class _Waiter:
    def __init__(self, missing: set[int], done: Done) -> None:
        self.missing = missing
        self.done = done


class Filler:
    """``fd``: the sparse file, opened for writing; ``bitmap``: path of the bits, made by `create`; ``fetch(spans)`` gives the bytes of each
    (offset, length), good until the next is asked for, or raises OSError, in a thread of ``pool`` or of whoever calls `run` and `bring`.
    ``whole()`` is called once, in one of those threads, when the last chunk is durable; never when the file was whole before. ``have``: a
    byte for each chunk, 1 when it is there.
    """

    def __init__(self, fd: int, manifest: Manifest, bitmap: str, fetch: Fetch, pool: ThreadPoolExecutor, whole: Callable[[], None]) -> None:
        self.manifest = manifest
        self.fetched = 0  # bytes that came over the wire
        self.requests = 0
        self._fd = fd
        self._fetch = fetch
        self._pool = pool
        self._whole = whole
        self._count = len(manifest.chunks)
        self._size = (self._count + 7) // 8
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._flushing = threading.Lock()  # before the other one
        self._telling = 0  # threads that are about to call somebody's ``done``
        self._closed = self._let_go = False
        self._waiters: dict[int, list[_Waiter]] = {}
        self._flying: set[int] = set()
        self._ended = False
        self._cached = False
        self.bitmap = bitmap
        try:
            self._bits = os.open(bitmap, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._bits, fcntl.LOCK_SH)  # says that somebody fills it
        except FileNotFoundError:
            self._bits, self._ended = -1, True
        self.have = bytearray(self._count)
        for number in self._brought(range(self._count)):
            self.have[number] = 1
        self._left = self._count - sum(self.have)
        self._durable = bytes(self.have)

    @staticmethod
    def create(bitmap: str) -> None:
        """An empty bitmap: no chunk is there. Its directory is synced by the caller."""
        os.close(os.open(bitmap, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    @property
    def left(self) -> int:
        """Chunks that are not there yet."""
        return self._left

    def coming(self, number: int) -> bool:
        """Whether it is there, or under way."""
        return bool(self.have[number]) or number in self._flying

    def chunks(self, offset: int, length: int) -> range:
        """The chunks that a range of bytes touches."""
        return self.manifest.covering(offset, length)

    def want(self, numbers: Iterable[int], done: Done, behind: Iterable[int] = (), start: Start | None = None) -> bool:
        """Call ``done(None)`` when all these chunks are there, ``done(error)`` when one could not be had; at once or in a thread.
        ``behind``: chunks that follow them, and come in the same request if any of them has to be fetched; returns whether that is so.
        ``start``: called with each run of chunks that is to be fetched, and must see to it that `run` is; None: in a thread of the pool."""
        runs: list[list[int]] = []
        with self._lock:
            missing = {n for n in numbers if not self.have[n]}
            closed = self._closed
            if missing and not closed:
                waiter = _Waiter(missing, done)
                for number in missing:
                    self._waiters.setdefault(number, []).append(waiter)
                asked = missing - self._flying
                runs = self._claim(asked.union(behind) if asked else ())
        if not missing or closed:
            done(OSError(errno.ESHUTDOWN, "the loader ends") if missing else None)
        for run in runs:
            (start or self.apart)(run)
        return bool(runs)

    def apart(self, run: list[int]) -> None:
        """`run` in a thread of the pool."""
        try:
            self._pool.submit(self.run, run)
        except RuntimeError:  # the pool is shut: nobody will come
            self._settle([], dict.fromkeys(run, OSError(errno.ESHUTDOWN, "the loader ends")))

    def bring(self, numbers: Iterable[int]) -> None:
        """Fetch in the calling thread those of these chunks that nobody fetches yet. Whoever waits for them is told of errors."""
        with self._lock:
            runs = [] if self._closed else self._claim(numbers)
        for run in runs:
            self.run(run)

    def _claim(self, numbers: Iterable[int]) -> list[list[int]]:
        """Say that we fetch those of these that nobody has or fetches: neighbours together. The lock is held."""
        runs: list[list[int]] = []
        for number in sorted(set(numbers)):
            if self.have[number] or number in self._flying:
                continue
            self._flying.add(number)
            if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < RUN and self._near(runs[-1][0], number):
                runs[-1].append(number)
            else:
                runs.append([number])
        return runs

    def _near(self, first: int, last: int) -> bool:
        """Whether these and what is between them are no more than one request should ask for."""
        offset, length = self.manifest.span(last)
        return offset + length - self.manifest.span(first)[0] <= RUN * CHUNK

    def ensure(self, numbers: Iterable[int]) -> None:
        """`want`, waiting in the calling thread. Raises `OSError`."""
        ready = threading.Event()
        problem: list[OSError] = []

        def done(error: OSError | None) -> None:
            if error is not None:
                problem.append(error)
            ready.set()

        self.want(numbers, done)
        ready.wait()
        if problem:
            raise problem[0]

    def fill_all(self, step: int = 4 * RUN) -> None:
        """Everything, in order, ``step`` chunks under way at a time. Raises `OSError`."""
        for start in range(0, self._count, step):
            self.ensure(range(start, min(start + step, self._count)))
        self.flush()

    def flush(self) -> None:
        """Make durable what is there: data, then bits; and learn what others have brought. Tells ``whole`` when that is all. Returns when
        that is done, also where another thread does it; does nothing once the bitmap is let go of."""
        with self._flushing:
            if not self._let_go:
                self._flush()

    def _flush(self) -> None:
        brought = self._brought(range(self._count))
        with self._lock:
            for number in brought:
                if not self.have[number] and number not in self._flying:
                    self.have[number] = 1
                    self._left -= 1
            snapshot = bytes(self.have)
            whole = self._left == 0 and not self._ended
        if snapshot != self._durable or whole:
            os.fdatasync(self._fd)
            self._cached = True
            packed = bytearray(os.pread(self._bits, self._size, 0).ljust(self._size, b"\0"))  # what others wrote stays
            for number, there in enumerate(snapshot):
                if there:
                    packed[number // 8] |= 1 << number % 8
            os.pwrite(self._bits, bytes(packed), 0)
            os.fdatasync(self._bits)
            self._durable = snapshot
        with self._lock:
            whole, self._ended = whole and not self._ended, self._ended or whole
        if whole:
            # Without the bitmap the file is whole, for everybody from now on.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.bitmap), os.fstat(self._bits)):  # not of a file that took this one's place meanwhile
                    os.unlink(self.bitmap)
            directory = os.open(os.path.dirname(self.bitmap), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self._whole()

    def drop(self) -> None:
        """Give back the memory of what is durable: who read it has a cache of its own. Not while chunks come: some are not read yet."""
        if self._cached:
            self._cached = False
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Flush and let go of the bitmap, when what is under way has ended; ``fd`` is the caller's, who may close it then."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._flying and not self._telling)
        try:
            self.flush()
            self.drop()
        finally:
            with self._flushing:
                if self._bits >= 0 and not self._let_go:
                    os.close(self._bits)
                self._let_go = True

    def _brought(self, numbers: Iterable[int]) -> list[int]:
        """Which of these are durably there, whoever brought them: several processes may fill one file. A bit lost to another's write means
        one more fetch; a bitmap that is gone says that the file is whole, unless that is gone with it."""
        if self._bits < 0:
            return list(numbers)
        packed = os.pread(self._bits, self._size, 0).ljust(self._size, b"\0")
        whole = os.fstat(self._bits).st_nlink == 0 and os.fstat(self._fd).st_nlink > 0
        return [number for number in numbers if whole or packed[number // 8] >> number % 8 & 1]

    def run(self, run: list[int]) -> None:
        """Fetch, check and write neighbouring chunks that were claimed, but for those that another process has brought since."""
        try:
            there = self._brought(run)
        except OSError:  # then it is fetched
            there = []
        if there:
            self._settle(there, {})
            run = [number for number in run if number not in there]
        if run:
            self._bring(run)

    def _bring(self, run: list[int]) -> None:
        """One request; each chunk is there as soon as it is checked and written."""
        left = list(run)
        problem = OSError(errno.EIO, "the chunk could not be had")
        try:
            with contextlib.closing(self._fetch([self.manifest.span(number) for number in run])) as pieces:
                for piece in pieces:
                    number = left[0]
                    self.fetched += len(piece)
                    good = self._write(number, piece)
                    del left[0]
                    self._settle([number] if good else [], {} if good else {number: Altered(number)})
            self.requests += 1
        except OSError as error:
            problem = error
        finally:
            # Whatever else went wrong here: a thread's errors are seen by nobody, and readers must not hang on it.
            if left:
                self._settle([], dict.fromkeys(left, problem))

    def _write(self, number: int, piece: Any) -> bool:
        """A chunk to its place; False when it is not what the manifest says. Raises `OSError`."""
        offset, length = self.manifest.span(number)
        if len(piece) != length or self.manifest.hash(piece) != self.manifest.chunks[number]:
            return False
        piece = memoryview(piece)
        while piece:
            written = os.pwrite(self._fd, piece, offset)
            piece, offset = piece[written:], offset + written
        return True

    def _settle(self, good: list[int], bad: dict[int, OSError]) -> None:
        calls: list[tuple[Done, OSError | None]] = []
        with self._lock:
            for number in good:
                self._left -= 1 - self.have[number]
                self.have[number] = 1
            self._telling += 1
            self._flying.difference_update(good, bad)
            for number in (*good, *bad):
                for waiter in self._waiters.pop(number, ()):
                    if not waiter.missing:  # told of an earlier error
                        continue
                    if number in bad:
                        waiter.missing.clear()
                        calls.append((waiter.done, bad[number]))
                        continue
                    waiter.missing.discard(number)
                    if not waiter.missing:
                        calls.append((waiter.done, None))
            whole = self._left == 0
        for done, error in calls:
            try:
                done(error)
            except OSError as trouble:  # one reader's; the others are to be told too
                sys.stderr.write(f"loader: an answer is not taken: {trouble}\n")
        with self._idle:
            self._telling -= 1
            self._idle.notify_all()
        if whole and good:
            with contextlib.suppress(OSError):  # a full disk: whoever flushes next is told
                self.flush()
