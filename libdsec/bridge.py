"""A bounded pipe of bytes between the event loop and one thread, in either direction: neither side waits busily, memory has a bound, and
when one side leaves the other one learns it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

ROOM = 4 << 20  # bytes that wait between the two sides


class Closed(Exception):
    """The other side has left."""


class Bridge:
    """In the thread it is a file (``read``, ``write``); on the loop `put`, `get` and `finish`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._news = asyncio.Event()
        self._pieces: deque[memoryview] = deque()
        self._size = 0
        self._ended = False  # no more will be written
        self._left = False  # nobody reads any more, or nobody will write the rest

    # ------------------------------------------------------------------ the thread's side
    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes, b"" at the end. Raises `Closed` when the writer gave up."""
        with self._changed:
            while not self._pieces:
                if self._left:
                    raise Closed
                if self._ended:
                    return b""
                self._changed.wait()
            parts = []
            left = size if size >= 0 else self._size
            while left and self._pieces:
                piece = self._pieces.popleft()
                if len(piece) > left:
                    self._pieces.appendleft(piece[left:])
                    piece = piece[:left]
                parts.append(piece)
                left -= len(piece)
            taken = sum(len(part) for part in parts)
            self._size -= taken
        self._wake()
        return b"".join(parts)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Waits for room. Raises `Closed` when nobody reads any more."""
        piece = memoryview(bytes(data))
        if not piece:
            return 0
        with self._changed:
            while self._size > ROOM and not self._left:
                self._changed.wait()
            if self._left:
                raise Closed
            self._pieces.append(piece)
            self._size += len(piece)
        self._wake()
        return len(piece)

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    # ------------------------------------------------------------------ the loop's side
    async def put(self, data: bytes) -> None:
        """Waits for room; bytes for a thread that has left are dropped."""
        while True:
            with self._changed:
                if self._left or self._size <= ROOM:
                    if not self._left:
                        self._pieces.append(memoryview(data))
                        self._size += len(data)
                        self._changed.notify_all()
                    return
                self._news.clear()
            await self._news.wait()

    async def get(self, most: int) -> bytes:
        """Up to ``most`` bytes (as many as there are), b"" at the end."""
        while True:
            with self._changed:
                if self._size or self._ended:
                    break
                self._news.clear()
            await self._news.wait()
        if not self._size:
            return b""
        data = self.read(most)
        with self._changed:
            self._changed.notify_all()
        return data

    def finish(self) -> None:
        """Either side: no more will be written."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._wake()

    def leave(self) -> None:
        """Either side: nobody reads any more, or the rest will not come. A thread that waits gets `Closed`."""
        with self._changed:
            self._left = True
            self._changed.notify_all()
        self._wake()
