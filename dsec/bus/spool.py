"""A bounded file of messages that could not be delivered yet; survives a restart. For nodes: the light client has no aiofiles.

Segments of about 1 MiB, each record with its length and CRC. What has been delivered is dropped a segment at a time, so a
restart may deliver some again, and readers dedupe. When the bound is hit the oldest segment goes, and its records are counted
as lost; the count is on disk too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import aiofiles
import aiofiles.os
import msgspec

from dsec.bus.streams import Record

T = TypeVar("T")
_HEAD = struct.Struct("<II")
SEGMENT = 1 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode
_fsync = aiofiles.os.wrap(os.fsync)
_truncate = aiofiles.os.wrap(os.truncate)


class Spool:
    """Append at the tail, read and drop at the head. One owner; ``limit`` bytes on disk at most (one segment at least).

    A step that has begun is finished though its caller is cancelled, and the next waits for it.
    """

    def __init__(self, directory: str | os.PathLike[str], *, limit: int = 64 << 20) -> None:
        self.directory = Path(directory)
        self.limit = limit
        self._segments: list[int] = []
        self._sizes: dict[int, int] = {}
        self._next = 1
        self._tail: int | None = None  # never append after what an earlier process may have torn
        self._done = 0  # records of the head segment that have been delivered
        self._lock = asyncio.Lock()
        self.lost = 0

    @classmethod
    async def open(cls, directory: str | os.PathLike[str], *, limit: int = 64 << 20) -> Self:
        """With what an earlier process left. Raises OSError."""
        spool = cls(directory, limit=limit)
        await aiofiles.os.makedirs(spool.directory, exist_ok=True)
        names = await aiofiles.os.listdir(spool.directory)
        spool._segments = sorted(int(Path(name).stem) for name in names if name.endswith(".seg"))
        for number in spool._segments:
            spool._sizes[number] = (await aiofiles.os.stat(spool._path(number))).st_size
        spool._next = spool._segments[-1] + 1 if spool._segments else 1
        try:
            async with aiofiles.open(spool.directory / "lost") as file:
                spool.lost = int(await file.read())
        except (OSError, ValueError):
            spool.lost = 0
        return spool

    def __bool__(self) -> bool:
        return bool(self._segments)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(self._sizes.values())

    async def append(self, records: list[Record]) -> None:
        """Written and fsynced when it returns. Raises OSError (disk full, …): then nothing of it counts as stored."""
        await self._whole(self._append(records))

    async def _append(self, records: list[Record]) -> None:
        block = b"".join(_HEAD.pack(len(body), zlib.crc32(body)) + body for body in map(_encode, records))
        if self._tail is None or self._sizes[self._tail] + len(block) > SEGMENT:
            self._tail = self._next
            self._next += 1
            self._segments.append(self._tail)
            self._sizes[self._tail] = 0
        path = self._path(self._tail)
        try:
            async with aiofiles.open(path, "ab", opener=_private) as file:
                await file.write(block)
                await file.flush()
                await _fsync(file.fileno())
        except OSError:
            with contextlib.suppress(FileNotFoundError):  # it was not even made
                await _truncate(path, self._sizes[self._tail])
            raise
        if not self._sizes[self._tail]:
            await self._sync_directory()
        self._sizes[self._tail] += len(block)
        await self._bound()

    async def head(self) -> list[Record]:
        """What is left of the oldest segment, in order; an empty list when nothing is spooled."""
        return await self._whole(self._head())

    async def _head(self) -> list[Record]:
        while self._segments:
            records = (await self._read(self._segments[0]))[self._done :]
            if records:
                if self._segments[0] == self._tail:
                    self._tail = None  # close it, so that "all of the head" stays what it is now
                return records
            await self._drop_head()
        return []

    async def delivered(self, count: int) -> None:
        """The first ``count`` records of `head` are done with."""
        await self._whole(self._delivered(count))

    async def _delivered(self, count: int) -> None:
        self._done += count
        if self._segments and self._done >= len(await self._read(self._segments[0])):
            await self._drop_head()

    # ------------------------------------------------------------------ inside
    async def _whole(self, step: Coroutine[Any, Any, T]) -> T:
        async def alone() -> T:
            async with self._lock:
                return await step

        return await asyncio.shield(asyncio.ensure_future(alone()))

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:010d}.seg"

    async def _read(self, number: int) -> list[Record]:
        """The whole records of a segment; a torn end (crash while writing) was never acknowledged and is left out."""
        try:
            async with aiofiles.open(self._path(number), "rb") as file:
                data = await file.read()
        except FileNotFoundError:  # the disk was full when it was to be made
            return []
        records, at = [], 0
        while at + _HEAD.size <= len(data):
            length, crc = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) < length or zlib.crc32(body) != crc:
                break
            records.append(_decode(body))
            at += _HEAD.size + length
        return records

    async def _drop_head(self) -> None:
        number = self._segments.pop(0)
        self._sizes.pop(number)
        if number == self._tail:
            self._tail = None
        self._done = 0
        with contextlib.suppress(FileNotFoundError):
            await aiofiles.os.unlink(self._path(number))

    async def _bound(self) -> None:
        lost = 0
        while self.size > self.limit and len(self._segments) > 1:
            lost += len(await self._read(self._segments[0])) - self._done
            await self._drop_head()
        if lost:
            self.lost += lost
            temporary = self.directory / "lost.new"
            async with aiofiles.open(temporary, "w") as file:
                await file.write(str(self.lost))
            await aiofiles.os.replace(temporary, self.directory / "lost")

    async def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await _fsync(descriptor)
        finally:
            os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
