"""Bytes to validated messages and back: msgpack maps between programs, JSON for a person who types one.

A payload that begins with ``{`` or ``[`` is JSON (as msgpack those bytes would be the bare numbers 123 and 91, never a
message) and is answered in JSON; so is an empty payload, which stands for a message without fields. Bytes inside JSON
are base64. Encoders and decoders are made once per type: building a msgspec decoder costs far more than using it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec

from dsec.errors import InvalidRequest

T = TypeVar("T")

MAX_MESSAGE = 1 << 20  # nats-server's max_payload here and by default; an encoded message above it never leaves
CHUNK = 128 * 1024  # bytes of output or file content in one message

_msgpack_encode = msgspec.msgpack.Encoder().encode
_json_encode = msgspec.json.Encoder().encode
_msgpack_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]+)`")


def is_json(data: bytes) -> bool:
    """Whether the sender speaks JSON (and so wants its answer in JSON)."""
    return not data or data[0] in b"{["


def encode(message: Any, *, json: bool = False, limit: int = MAX_MESSAGE) -> bytes:
    """The message as msgpack (or JSON). Raises `InvalidRequest` above ``limit`` bytes, so that it fails here and not at the server."""
    try:
        data = _json_encode(message) if json else _msgpack_encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"cannot be encoded: {error}", field=type(message).__name__) from error
    if len(data) > limit:
        raise InvalidRequest(
            f"message of {len(data)} bytes is above the limit of {limit}",
            field=type(message).__name__,
            fix="split it, or send large content as a file or as input",
        )
    return data


def decode(data: bytes, type_: type[T]) -> T:
    """Validated message of ``type_``. Raises `InvalidRequest` whose ``field`` is the path of what is wrong (``spec.resources.memory``)."""
    try:
        if is_json(data):
            json_decoder = _json_decoders.get(type_)
            if json_decoder is None:
                json_decoder = _json_decoders[type_] = msgspec.json.Decoder(type_)
            return json_decoder.decode(data or b"{}")  # type: ignore[no-any-return]
        decoder = _msgpack_decoders.get(type_)
        if decoder is None:
            decoder = _msgpack_decoders[type_] = msgspec.msgpack.Decoder(type_)
        return decoder.decode(data)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"payload is neither msgpack nor JSON: {error}", field="$", fix="send a msgpack map or a JSON object"
        ) from error


def _invalid(text: str) -> InvalidRequest:
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    field = path.lstrip(".")
    missing = _MISSING.search(what)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
    return InvalidRequest(what[:1].lower() + what[1:], field=field or "$")


def decode_untyped(data: bytes, *, limit: int = MAX_MESSAGE) -> Any:
    """Any payload as plain Python objects, for people (`dsec decode`) and for cross-checks by the `msgpack` package.

    Lengths inside the payload cannot make it allocate more than ``limit`` bytes. Raises `InvalidRequest`.
    """
    if len(data) > limit:
        raise InvalidRequest(f"payload of {len(data)} bytes is above the limit of {limit}", field="$")
    try:
        if data and is_json(data):
            return msgspec.json.decode(data)
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=limit,
            max_map_len=limit,
            max_ext_len=limit,
        )
    except (TypeError, ValueError, msgspec.DecodeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InvalidRequest(f"payload is neither msgpack nor JSON: {error or type(error).__name__}", field="$") from error
