"""Where the loader's threads wait for readers; a socket stands for a fanotify group, and its peer for the kernel."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsec import syscalls
from dsec.backends.guest import build
from dsec.layers.gate import SLOTS, Fanotify
from dsec.layers.hand import FRESH, MISSING, READY, Found, Hand

CHUNK, COUNT = 1000, 20


class Gate:
    """One gate of a hand, with ten seconds for each answer of the other side."""

    def __init__(self, hand: Hand, number: int = 0, chunk: int = CHUNK) -> None:
        self.hand, self.number = hand, number
        self.kernel, self.group = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(10)
        self.group.setblocking(False)
        self.journal = bytearray(SLOTS * Fanotify.slot)
        self.have, self.seen = bytearray(COUNT), bytearray(COUNT)
        hand.add(number, self.group.fileno(), memoryview(self.journal), self.have, self.seen, chunk)

    def ask(self, offset: int, length: int) -> int:
        """A reader's event; the number of its descriptor."""
        fd = os.dup(self.kernel.fileno())
        header = struct.pack("=IBBHQii", 48, 3, 0, 24, syscalls.FAN_PRE_ACCESS, fd, 1)
        self.kernel.send(header + struct.pack("=BBHIQQ", syscalls.FAN_EVENT_INFO_TYPE_RANGE, 0, 24, 0, offset, length))
        return fd

    def answer(self) -> tuple[int, int]:
        fd, verdict = struct.unpack("=iI", self.kernel.recv(64))
        return fd, verdict


def wait(hand: Hand) -> Found:
    """What a thread of the hand comes back with."""
    found = Found()
    thread = threading.Thread(target=hand.wait, args=(found,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return found


@pytest.fixture(scope="module")
def library() -> str:
    return str(build.ensure(program="hand"))


@pytest.fixture
def gate(library: str) -> Iterator[Gate]:
    made = Gate(Hand(library))
    yield made
    made.hand.remove(made.number)


def closed(fd: int) -> bool:
    return not os.path.exists(f"/proc/self/fd/{fd}")


def test_first_readers_of_what_is_listed_are_answered_and_not_told_of(gate: Gate) -> None:
    """A chunk whose first reader is of no interest is noted as read, and the thread comes back with the next event that is."""
    gate.have[3] = gate.have[4] = 1
    gate.seen[3] = gate.seen[4] = 2
    listed, other = gate.ask(3500, 1000), gate.ask(7000, 1)
    found = wait(gate.hand)
    assert gate.answer() == (listed, syscalls.FAN_ALLOW)
    assert (found.kind, bytes(gate.seen[3:5])) == (MISSING, b"\1\1")
    gate.hand.arm(gate.number)
    os.close(other)


def test_readers_of_what_is_there_are_answered_and_only_the_first_ones_are_told_of(gate: Gate) -> None:
    """Each chunk is told of once, when it is read for the first time; the descriptor that came with an event is closed."""
    gate.have[3] = gate.have[4] = 1
    first = gate.ask(3500, 1000)
    found = wait(gate.hand)
    assert (found.kind, found.first, found.last) == (FRESH, 3, 4)
    assert gate.answer() == (first, syscalls.FAN_ALLOW)
    again, other = gate.ask(3000, 2000), gate.ask(5000, 1)
    found = wait(gate.hand)
    assert gate.answer() == (again, syscalls.FAN_ALLOW)
    assert found.kind == MISSING
    assert syscalls.fanotify_event(memoryview(gate.journal)[found.slot * 64 :][:64]) == (other, 5000, 1)
    assert closed(first)
    assert closed(again)
    assert not closed(other)
    gate.hand.arm(0)


def test_an_event_stays_in_its_slot_until_its_first_word_is_zero(gate: Gate) -> None:
    """The next ones are put elsewhere, and read through it all."""
    slots = []
    for number in (7, 8, 9):
        gate.ask(number * CHUNK, 1)
        found = wait(gate.hand)
        slots.append(found.slot)
        gate.hand.arm(0)
    assert len(set(slots)) == 3
    gate.have[7] = 1
    there = gate.ask(7 * CHUNK, 5)
    assert wait(gate.hand).kind == FRESH
    assert gate.answer()[0] == there
    assert [any(gate.journal[slot * 64 :][:4]) for slot in slots] == [True] * 3


def test_the_last_chunk_may_be_asked_for_beyond_its_end(gate: Gate) -> None:
    """An event without a range concerns the whole file; one that has no descriptor is nobody's."""
    gate.kernel.send(struct.pack("=IBBHQii", 24, 3, 0, 24, 0x4000, -1, 0))  # an overflow of the queue
    gate.have[:] = b"\1" * COUNT
    gate.ask(19_500, 100_000)
    found = wait(gate.hand)
    assert (found.kind, found.first, found.last) == (FRESH, 19, 19)
    fd = os.dup(gate.kernel.fileno())
    gate.kernel.send(struct.pack("=IBBHQii", 24, 3, 0, 24, syscalls.FAN_PRE_ACCESS, fd, 1))
    found = wait(gate.hand)
    assert (found.kind, found.first, found.last) == (FRESH, 0, 19)


@pytest.mark.parametrize("with_library", [True, False])
def test_a_gate_whose_events_are_its_blobs_to_take_is_one_threads_at_a_time(library: str, with_library: bool) -> None:
    """Nobody else hears of it until it is armed again; another gate is nobody's business."""
    hand = Hand(library if with_library else "")
    first, second = Gate(hand, 1, chunk=0), Gate(hand, 2, chunk=0)
    first.ask(0, 1)
    found = wait(hand)
    assert (found.number, found.kind) == (1, READY)
    second.ask(0, 1)
    found = wait(hand)
    assert (found.number, found.kind) == (2, READY)
    hand.arm(1)
    assert wait(hand).number == 1
    hand.arm(2, again=False)
    ended = threading.Thread(target=hand.remove, args=(1,), daemon=True)
    ended.start()
    ended.join(0.05)
    assert ended.is_alive()  # as long as somebody has what was taken
    hand.arm(1)
    ended.join(10)
    assert not ended.is_alive()
    hand.remove(2)


class Between:
    """An epoll that does something before it is changed."""

    def __init__(self, hand: Hand, then: Callable[[], None]) -> None:
        self._real, self._then = hand._epoll, then
        hand._epoll = self  # type: ignore[assignment]

    def modify(self, fd: int, events: int) -> None:
        self._then()
        self._real.modify(fd, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_gate_is_not_closed_while_it_is_armed() -> None:
    """Else its descriptor's number could be another's by then."""
    hand = Hand("")
    gate = Gate(hand, 1, chunk=0)
    gate.ask(0, 1)
    assert wait(hand).kind == READY
    ended = threading.Thread(target=hand.remove, args=(1,), daemon=True)

    def close() -> None:
        ended.start()
        ended.join(0.2)
        assert ended.is_alive()

    Between(hand, close)
    hand.arm(1)
    ended.join(10)
    assert not ended.is_alive()


@pytest.mark.parametrize("with_library", [True, False])
def test_a_gate_that_is_not_armed_again_tells_nothing(library: str, with_library: bool) -> None:
    """Whatever there still is; and nobody waits for who has had it."""
    hand = Hand(library if with_library else "")
    first, second = Gate(hand, 1, chunk=0), Gate(hand, 2, chunk=0)
    first.ask(0, 1)
    assert wait(hand).number == 1
    hand.arm(1, again=False)
    second.ask(0, 1)
    assert wait(hand).number == 2
    hand.arm(2)
    assert wait(hand).number == 2
    hand.arm(2, again=False)
    for number in (1, 2):
        hand.remove(number)
