"""Where readers of a partly filled blob wait until somebody has filled what they read: one small protocol, two kinds of gate.

`Fanotify` stands before a plain file (Linux 6.14); `fuse.Fuse` is a file itself, for older kernels. What is read from a gate goes straight
into a slot of the blob's journal, shared memory that the next worker reads when this one dies: everything in a slot waits for an answer.
"""

from __future__ import annotations

import os
from typing import Protocol

from dsec import syscalls

SLOTS = 1024  # reads under way a blob

Event = tuple[int, int, int]  # the number to answer, offset, length (0: unknown, then the whole chunk at the offset)


class Over(Exception):
    """Nobody can read through this gate any more: what stood on it is unmounted."""


class Gate(Protocol):
    """``fd``: readable when somebody waits. ``slot``: bytes of one slot of the journal. ``lasting``: readers come through it for as long
    as something is mounted over it, also when the blob is whole."""

    fd: int
    slot: int
    lasting: bool

    def take(self, slot: memoryview) -> bool:
        """Read one event into an empty slot; False when none waits. Raises `OSError` (no descriptor left), `Over`."""
        ...

    def event(self, slot: memoryview) -> Event | None:
        """What waits in a slot; None when it is nothing, or nothing that has to do with content (it is answered then)."""
        ...

    def answer(self, event: Event, error: int, *, wait: bool = True) -> bool:
        """Let the reader have the file's content, which is there, or an errno. False: that would wait for the disk, which ``wait``
        allows. An event that nobody waits for any more is no error."""
        ...

    def forget(self, event: Event) -> None:
        """Let go of what came with an event that this process took itself, after its answer."""
        ...

    def close(self) -> None: ...


class Fanotify:
    """The kernel matches answers by the number of the event's descriptor alone, so whoever has the group can answer."""

    slot = 64  # one event with its range; less than two
    lasting = False

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def take(self, slot: memoryview) -> bool:
        try:
            return os.readv(self.fd, [slot]) > 0
        except BlockingIOError:
            return False

    def event(self, slot: memoryview) -> Event | None:
        return syscalls.fanotify_event(slot)

    def answer(self, event: Event, error: int, *, wait: bool = True) -> bool:  # noqa: ARG002
        syscalls.fanotify_answer(self.fd, event[0], error)
        return True

    def forget(self, event: Event) -> None:
        os.close(event[0])

    def close(self) -> None:
        os.close(self.fd)
