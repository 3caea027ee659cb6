"""A bounded file of messages that could not be delivered yet; survives a restart. Blocking: call it from a thread.

Segments of about 1 MiB, each record with its length and CRC. What has been delivered is dropped a segment at a time, so a
restart may deliver some again, and readers dedupe. When the bound is hit the oldest segment goes, and its records are counted
as lost; the count is on disk too.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from pathlib import Path

import msgspec

_HEAD = struct.Struct("<II")
SEGMENT = 1 << 20


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One message: its Nats-Msg-Id, subject and payload."""

    id: str
    subject: str
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Spool:
    """Append at the tail, read and drop at the head. One owner; ``limit`` bytes on disk at most (one segment at least)."""

    def __init__(self, directory: str | os.PathLike[str], *, limit: int = 64 << 20) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.limit = limit
        self._segments: list[int] = sorted(int(path.stem) for path in self.directory.glob("*.seg"))
        self._sizes = {number: self._path(number).stat().st_size for number in self._segments}
        self._next = self._segments[-1] + 1 if self._segments else 1
        self._tail: int | None = None  # never append after what an earlier process may have torn
        self._done = 0  # records of the head segment that have been delivered
        self._lock = threading.Lock()  # a cancelled caller's thread may still be writing when the next one comes
        self.lost = self._read_lost()

    def __bool__(self) -> bool:
        return bool(self._segments)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(self._sizes.values())

    def append(self, records: list[Record]) -> None:
        """Written and fsynced when it returns. Raises OSError (disk full, …): then nothing of it counts as stored."""
        with self._lock:
            self._append(records)

    def _append(self, records: list[Record]) -> None:
        block = b"".join(_HEAD.pack(len(body), zlib.crc32(body)) + body for body in map(_encode, records))
        if self._tail is None or self._sizes[self._tail] + len(block) > SEGMENT:
            self._tail = self._next
            self._next += 1
            self._segments.append(self._tail)
            self._sizes[self._tail] = 0
        path = self._path(self._tail)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(block)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self._sizes[self._tail])
            raise
        finally:
            os.close(descriptor)
        if not self._sizes[self._tail]:
            self._sync_directory()
        self._sizes[self._tail] += len(block)
        self._bound()

    def head(self) -> list[Record]:
        """What is left of the oldest segment, in order; an empty list when nothing is spooled."""
        with self._lock:
            return self._head()

    def _head(self) -> list[Record]:
        while self._segments:
            records = self._read(self._segments[0])[self._done :]
            if records:
                if self._segments[0] == self._tail:
                    self._tail = None  # close it, so that "all of the head" stays what it is now
                return records
            self._drop_head()
        return []

    def delivered(self, count: int) -> None:
        """The first ``count`` records of `head` are done with."""
        with self._lock:
            self._done += count
            if self._segments and self._done >= len(self._read(self._segments[0])):
                self._drop_head()

    # ------------------------------------------------------------------ inside
    def _path(self, number: int) -> Path:
        return self.directory / f"{number:010d}.seg"

    def _read(self, number: int) -> list[Record]:
        """The whole records of a segment; a torn end (crash while writing) was never acknowledged and is left out."""
        data = self._path(number).read_bytes()
        records, at = [], 0
        while at + _HEAD.size <= len(data):
            length, crc = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) < length or zlib.crc32(body) != crc:
                break
            records.append(_decode(body))
            at += _HEAD.size + length
        return records

    def _drop_head(self) -> None:
        number = self._segments.pop(0)
        self._sizes.pop(number)
        if number == self._tail:
            self._tail = None
        self._done = 0
        self._path(number).unlink(missing_ok=True)

    def _bound(self) -> None:
        lost = 0
        while self.size > self.limit and len(self._segments) > 1:
            lost += len(self._read(self._segments[0])) - self._done
            self._drop_head()
        if lost:
            self.lost += lost
            temporary = self.directory / "lost.new"
            temporary.write_text(str(self.lost))
            temporary.replace(self.directory / "lost")

    def _read_lost(self) -> int:
        try:
            return int((self.directory / "lost").read_text())
        except (OSError, ValueError):
            return 0

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
