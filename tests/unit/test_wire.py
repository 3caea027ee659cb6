"""The guest wire: what we encode is what the C side reads, and no bytes of a guest can do more than raise `WireError`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.backends.guest import wire

OP = "0123456789abcdef0123456789abcdef"
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


def test_a_frame_has_a_header_of_twelve_bytes() -> None:
    """Length, type, zero and request, little-endian."""
    raw = wire.frame(wire.Type.WAIT, 7, wire.op_bytes(OP))
    assert raw[:12].hex() == "100000000400000007000000"
    assert wire.header(raw) == (16, wire.Type.WAIT, 7)


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xff\xff\xff\x03\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0\0\0\0\0", b"\0\0\0\0\x15\0\0\0\0\0\0\0", b"\0\0\0\0\x03\0\x01\0\0\0\0\0"],
)
def test_a_header_beyond_the_protocol_is_refused(raw: bytes) -> None:
    """Too long, type 0, an unknown type, and a field that must be zero."""
    with pytest.raises(wire.WireError):
        wire.header(raw)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"argv": ()}, "argv"),
        ({"argv": ("",)}, "argv"),
        ({"argv": ("a\0b",)}, "argv"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"": "c"}}, "env"),
        ({"env": {"A": "c\0"}}, "env"),
        ({"user": "a\0"}, "user"),
        ({"cwd": "/\0"}, "cwd"),
        ({"head": (1 << 20) + 1}, "head"),
        ({"tail": -1}, "tail"),
        ({"rows": 70000}, "rows"),
        ({"timeout_ms": 1 << 32}, "timeout_ms"),
        ({"argv": ("true", "x" * (1 << 20))}, "argv"),
        ({"argv": ("\ud800",)}, "argv"),
        ({"op": "abc"}, "op"),
        ({"op": "z" * 32}, "op"),
    ],
)
def test_a_bad_start_names_its_field(change: dict[str, object], field: str) -> None:
    """Nothing that the guest would refuse leaves this side."""
    arguments: dict[str, object] = {"op": OP, "argv": ("true",)} | change
    op, argv = arguments.pop("op"), arguments.pop("argv")
    with pytest.raises(wire.WireError) as caught:
        wire.start(op, argv, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"verb": "chflags"}, "verb"),
        ({"data": b"x" * (wire.MAX_DATA + 1)}, "data"),
        ({"length": wire.MAX_DATA + 1}, "length"),
        ({"offset": -1}, "offset"),
    ],
)
def test_a_bad_file_request_names_its_field(change: dict[str, object], field: str) -> None:
    """One limit for a piece, and an error instead of a cut (c41)."""
    arguments: dict[str, object] = {"verb": "read", "path": "/x"} | change
    verb, path = arguments.pop("verb"), arguments.pop("path")
    with pytest.raises(wire.WireError) as caught:
        wire.file(verb, path, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_c15_file_names_that_are_not_utf8_survive() -> None:
    """Raw bytes travel as lone surrogates, as Python's own file functions do it."""
    assert wire.text(b"\xff\xfe".decode("utf-8", "surrogateescape"))[4:6] == b"\xff\xfe"


@given(st.binary(max_size=300), st.integers(0, 25))
@settings(max_examples=400, deadline=None)
def test_no_body_of_a_guest_raises_anything_but_wire_error(body: bytes, kind: int) -> None:
    """A hostile guest can send any bytes."""
    try:
        wire.decode(kind, body)
    except wire.WireError:
        pass


@given(st.tuples(st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50)), st.integers(-1, 255))
@settings(max_examples=100, deadline=None)
def test_done_round_trips(parts: tuple[bytes, bytes, bytes, bytes], code: int) -> None:
    """Status and the four captured parts come back as they were sent."""
    totals = (len(parts[0]) + len(parts[1]), len(parts[2]) + len(parts[3]))
    raw = wire.STATUS.pack(bytes.fromhex(OP), 1, 1, 0, code, 42, 1_500, *totals)
    raw += b"".join(len(part).to_bytes(4, "little") for part in parts) + b"".join(parts)
    done = wire.decode(wire.Type.DONE, raw)
    assert isinstance(done, wire.Done)
    assert done.parts == parts
    assert done.status == wire.Status(OP, True, True, False, False, code, 42, 1_500, totals)
    with pytest.raises(wire.WireError):
        wire.decode(wire.Type.DONE, raw + b"x")


@given(texts, texts, st.integers(0, 2**63), st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_file_replies_round_trip(name: str, target: str, size: int, data: bytes) -> None:
    """Entries and data share one frame."""
    raw = b"\1" + (3).to_bytes(4, "little") + (1).to_bytes(4, "little")
    raw += b"l" + b"\0" * 12 + size.to_bytes(8, "little") + b"\0" * 8 + wire.text(name) + wire.text(target) + data
    reply = wire.decode(wire.Type.FILE, raw)
    assert isinstance(reply, wire.File)
    assert reply == wire.File(True, 3, (wire.FileStat("link", 0, 0, 0, size, 0, name, target),), data)
