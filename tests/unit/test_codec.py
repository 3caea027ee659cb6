"""Payloads: msgpack and JSON, errors that name the field, limits."""

from __future__ import annotations

import json

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.bus import codec
from dsec.bus.messages import CreateRequest, Empty, Heartbeat, InputRequest, LeaseRenew, NodeLoad
from dsec.bus.nats_client import wire_headers
from dsec.bus.transport import Msg, parse_headers
from dsec.errors import InvalidRequest
from dsec.model import SandboxSpec

SPEC = SandboxSpec(image="debian-12", labels={"job": "j1"})
CREATE = CreateRequest(burst="b", specs=(SPEC,), items=(), inbox="_INBOX.x", deadline_ms=1000)


@pytest.mark.parametrize(
    "message",
    [
        CREATE,
        Empty(),
        Heartbeat(edge="n1", incarnation="i:1", n=3, load=NodeLoad(memory_free=1 << 40)),
        InputRequest(op="o", offset=1, data=b"\0\xff"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_encoded_is_decoded(message: object, as_json: bool) -> None:
    """Every message survives both encodings, and the first byte tells which it was."""
    data = codec.encode(message, json=as_json)
    assert codec.is_json(data) is as_json
    assert codec.decode(data, type(message)) == message


def test_the_msgpack_package_reads_it() -> None:
    """Messages are plain maps for any other msgpack implementation."""
    assert (
        msgpack.unpackb(codec.encode(CREATE)) == json.loads(codec.encode(CREATE, json=True)) == codec.decode_untyped(codec.encode(CREATE))
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"specs": [{"image": "x", "resources": {"memory": "2GiB"}}]}, "specs[0].resources.memory"),
        ({"specs": [{"image": "x", "resources": {"cpus": -1}}]}, "specs[0].resources.cpus"),
        ({"specs": [{}]}, "specs[0].image"),
        ({"specs": [{"image": "x", "qos": "best"}]}, "specs[0].qos"),
        ({"specs": [{"image": "x", "env": {"A": 1}}]}, "specs[0].env[...]"),
        ({"deadline_ms": None}, "deadline_ms"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_names_the_path(change: dict[str, object], field: str, as_json: bool) -> None:
    """A field of the wrong type, out of range or missing is named by its whole path."""
    plain = msgspec.to_builtins(CREATE) | change
    data = msgspec.json.encode(plain) if as_json else msgspec.msgpack.encode(plain)
    with pytest.raises(InvalidRequest) as caught:
        codec.decode(data, CreateRequest)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x81", b"{", b"[1", b"\xff\xfe", b"\xdd\xff\xff\xff\xff", b"\x80\x80", b"{}x", b"\x91" * 5000, b"[" * 100_000]
)
def test_rubbish_is_refused(data: bytes) -> None:
    """Truncated, trailing, nested without end or plain wrong bytes are InvalidRequest, never another exception."""
    with pytest.raises(InvalidRequest):
        codec.decode(data, LeaseRenew)
    with pytest.raises(InvalidRequest):
        codec.decode_untyped(data)


@given(st.binary(max_size=200))
def test_no_payload_raises_anything_else(data: bytes) -> None:
    """Whatever arrives is a message or InvalidRequest."""
    for decode in (lambda: codec.decode(data, CreateRequest), lambda: codec.decode_untyped(data)):
        try:
            decode()
        except InvalidRequest:
            pass


def test_limits() -> None:
    """A message above the limit is refused on this side, and so is one to be decoded untyped."""
    with pytest.raises(InvalidRequest, match="above the limit"):
        codec.encode(InputRequest(op="o", offset=0, data=b"x" * codec.MAX_MESSAGE))
    with pytest.raises(InvalidRequest, match="above the limit"):
        codec.decode_untyped(b"x" * 11, limit=10)
    with pytest.raises(InvalidRequest):
        codec.encode({"x": object()})


def test_an_empty_payload_is_an_empty_message() -> None:
    """A request without payload is a message without fields, asked by a person."""
    assert codec.decode(b"", Empty) == Empty()
    assert codec.is_json(b"")


_token = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=20)
_value = st.text(st.characters(exclude_categories=["Cc", "Cs", "Z"]), max_size=40)


@given(st.dictionaries(_token, _value, max_size=5))
def test_headers_survive(headers: dict[str, str]) -> None:
    """Header blocks are read back as they were written."""
    assert parse_headers(wire_headers(headers)) == headers


@pytest.mark.parametrize(("name", "value"), [("a", "b\r\nPUB x 0"), ("a\n", "b"), ("", "b"), ("a:b", "c")])
def test_headers_cannot_forge_lines(name: str, value: str) -> None:
    """A line break in a header is refused: it could smuggle protocol commands."""
    with pytest.raises(InvalidRequest):
        wire_headers({name: value})


def test_inline_status() -> None:
    """The server's own answers carry a status in the first line."""
    msg = Msg("s", b"", raw_headers=b"NATS/1.0 503\r\n\r\n")
    assert (msg.status, msg.headers["Status"]) == ("503", "503")
    msg = Msg("s", b"", raw_headers=b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n")
    assert (msg.status, msg.headers["Description"], msg.headers["Nats-Pending-Messages"]) == ("408", "Request Timeout", "1")
    assert Msg("s", b"", raw_headers=b"NATS/1.0\r\na: b\r\n\r\n").status == ""
