"""What nats-server sends, cut into messages."""

from __future__ import annotations

import random

import pytest

from dsec.bus import nats_stream
from dsec.bus.nats_stream import Over, Splitter

Message = tuple[int, bytes, bytes, bytes, bytes | None]

HEADERS = b"NATS/1.0\r\nA: b\r\n\r\n"
WIRE = (
    b"PING\r\n"
    b"MSG a.b 1 5\r\nhello\r\n"
    b"MSG a.b 1 in.box 0\r\n\r\n"
    b"MSG js 9 2\r\nhi\r\n"
    b"HMSG c 2 in.box %d %d\r\n%sMSG x 1 1\r\ny\r\n\r\n"
    b"HMSG c 2 %d %d\r\n%s\r\n"
    b"-ERR 'Permissions Violation'\r\n" % (len(HEADERS), len(HEADERS) + 14, HEADERS, len(HEADERS), len(HEADERS), HEADERS)
)
TAKEN = [
    (1, b"a.b", b"", b"hello", None),
    (1, b"a.b", b"in.box", b"", None),
    (2, b"c", b"in.box", b"MSG x 1 1\r\ny\r\n", HEADERS),
    (2, b"c", b"", b"", HEADERS),
]
OTHERS = [b"PING\r\n", b"MSG js 9 2\r\nhi\r\n", b"-ERR 'Permissions Violation'\r\n"]


class Sink:
    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.others: list[bytes] = []
        self.splitter = Splitter(self.take, self.others.append)

    def take(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> bool:
        if sid == 9:
            return False
        self.taken.append((sid, subject, reply, data, headers))
        return True


def test_messages_and_all_else_are_told_apart() -> None:
    """Messages reach who takes them; control lines and messages that nobody takes are handed on as they came."""
    sink = Sink()
    assert sink.splitter.feed(WIRE)
    assert sink.taken == TAKEN
    assert sink.others == OTHERS


@pytest.mark.parametrize("seed", range(20))
def test_it_does_not_matter_how_bytes_come(seed: int) -> None:
    """Cut anywhere, the same messages come out in the same order, each once."""
    chance, sink, at = random.Random(seed), Sink(), 0
    data = WIRE * 3
    while at < len(data):
        size = chance.choice((1, 2, 7, 40, 200))
        assert sink.splitter.feed(data[at : at + size])
        at += size
    assert sink.taken == TAKEN * 3
    assert sink.others == OTHERS * 3


def test_a_long_buffer_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its time is up it stops between two messages, and goes on from there."""
    monkeypatch.setattr(nats_stream, "TURN", 0.0)
    sink, turns = Sink(), 1
    data = WIRE * 200
    done = sink.splitter.feed(data)
    while not done:
        done = sink.splitter.feed(b"")
        turns += 1
    assert turns > 2
    assert sink.taken == TAKEN * 200
    assert sink.others == OTHERS * 200


@pytest.mark.parametrize(
    "data", [b"MSG a\r\n", b"MSG a one 5\r\nhello\r\n", b"HMSG a 1 x 5\r\nhello\r\n", b"MSG a 1 -3\r\n", b"x" * 70_000]
)
def test_what_is_no_protocol_is_refused(data: bytes) -> None:
    """A broken control line is an error, and one without an end is not gathered for ever."""
    with pytest.raises(Over):
        Sink().splitter.feed(data)
