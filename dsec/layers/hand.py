"""The threads of the loader wait here for readers. With the library of ``native/hand.c`` most events are answered without Python's lock;
without it (no compiler when the project was installed) each is given to its blob.

A gate is armed for one thread at a time; what `Hand.wait` returns is for its caller alone, until it calls `Hand.arm`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import threading
import time
from pathlib import Path

from dsec import syscalls
from dsec.layers.gate import SLOTS

MISSING, FRESH, READY, TROUBLE = 1, 2, 3, 4
_ARCH = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
LIBRARY = Path(__file__).resolve().parents[1] / "backends/guest/bin" / f"hand-{_ARCH}"


def load(library: str) -> ctypes.CDLL | None:
    """The library; None where it is not, or by DSEC_DISABLE=hand."""
    with contextlib.suppress(OSError):
        if library and os.path.exists(library) and not syscalls.disabled("hand"):
            return ctypes.CDLL(library)
    return None


class Found(ctypes.Structure):
    """``kind``: MISSING, an event waits in ``slot`` for chunks; FRESH, the chunks ``first`` to ``last`` were read for the first time, from
    ``offset`` on, and nobody waits; READY, somebody waits at the gate; TROUBLE, an errno."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("number", "kind", "slot", "error")),
        *((name, ctypes.c_uint64) for name in ("first", "last", "offset")),
    )


class Place(ctypes.Structure):
    """A gate as the library knows it: ``struct gate``. ``plain``: its events are fanotify's, and its chunks are alike."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("fd", "number", "slots", "plain")),
        *((name, ctypes.c_void_p) for name in ("journal", "have", "seen")),
        *((name, ctypes.c_uint64) for name in ("chunk", "count")),
        *((name, ctypes.c_int32) for name in ("next", "inside", "closed")),
    )


class Hand:
    """``library``: where `hand.c` is; "" or nothing there: without it. One for all gates of a process."""

    def __init__(self, library: str = str(LIBRARY)) -> None:
        self._epoll = select.epoll()
        self._places: dict[int, Place] = {}
        self._at: dict[int, int] = {}  # descriptor -> number, without the library
        self._counting = threading.Lock()
        self._library = load(library)
        if self._library is not None:
            self._library.hand_wait.argtypes = (ctypes.c_int, ctypes.c_void_p)
            self._library.hand_arm.argtypes = self._library.hand_add.argtypes = (ctypes.c_int, ctypes.c_void_p)
            self._library.hand_remove.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def add(self, number: int, fd: int, journal: memoryview, have: bytearray, seen: bytearray, chunk: int) -> None:
        """A gate from now on; ``number`` is the caller's, and used once. ``journal``, ``have`` and ``seen`` (a byte for each chunk) are
        shared with the library, which makes a byte of ``seen`` 1 when its chunk is read; it tells FRESH if that was 0. ``chunk``: bytes,
        0 for a gate whose events are its blob's to take. Raises `OSError`."""
        shared = [ctypes.addressof(ctypes.c_char.from_buffer(each)) if len(each) else None for each in (journal, have, seen)]
        place = Place(fd, number, SLOTS, int(bool(chunk and have)), *shared, chunk, len(have), 0, 0, 0)
        self._places[number] = place  # for ever: a thread may have been told of it just now
        if self._library is None:
            self._at[fd] = number
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
        elif error := self._library.hand_add(self._epoll.fileno(), ctypes.addressof(place)):
            raise OSError(error, os.strerror(error))

    def wait(self, found: Found) -> None:
        """Sleeps until there is something; the caller calls `arm` soon, but for FRESH."""
        if self._library is not None:
            self._library.hand_wait(self._epoll.fileno(), ctypes.addressof(found))
            return
        while True:
            for fd, _ in self._epoll.poll(-1, 1):
                place = self._places[self._at[fd]]
                with self._counting:
                    place.inside += 1
                if not place.closed:
                    found.number, found.kind = place.number, READY
                    return
                with self._counting:
                    place.inside -= 1

    def arm(self, number: int, *, again: bool = True) -> None:
        """The next may come; ``again`` False: there will be none."""
        place = self._places[number]
        if not again:
            place.closed = 1
        if self._library is not None:
            self._library.hand_arm(self._epoll.fileno(), ctypes.addressof(place))
            return
        if not place.closed:
            with contextlib.suppress(FileNotFoundError):  # `remove` was quicker
                self._epoll.modify(place.fd, select.EPOLLIN | select.EPOLLONESHOT)
        with self._counting:
            place.inside -= 1

    def remove(self, number: int) -> None:
        """Nothing is taken any more when this returns; it may sleep for a moment."""
        place = self._places[number]
        if self._library is not None:
            self._library.hand_remove(self._epoll.fileno(), ctypes.addressof(place))
            return
        place.closed = 1
        self._epoll.unregister(place.fd)
        while place.inside:
            time.sleep(0.001)
