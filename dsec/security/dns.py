"""As much of DNS as a forwarder needs: who is asked for what, and how a refusal looks. Pure; RFC 1035, section 4.

Everything here comes from a sandbox or from the network, so every length is checked and no pointer is followed: the question of a query
is never compressed.
"""

from __future__ import annotations

import struct

import msgspec

HEADER = struct.Struct(">HHHHHH")
MAX_NAME = 255
QR, TC, RD, RA = 0x8000, 0x0200, 0x0100, 0x0080
FORMERR, SERVFAIL, REFUSED = 1, 2, 5


class Question(msgspec.Struct, frozen=True):
    """What a query asks: a lower-case name without the last dot, and the type's number. ``end`` is where the question ends."""

    name: str
    kind: int
    end: int


def question(message: bytes) -> Question | None:
    """The one question of a query; None for what is no query with one question in it."""
    if len(message) < HEADER.size:
        return None
    _, flags, count, *_ = HEADER.unpack_from(message)
    if flags & QR or count != 1:
        return None
    labels: list[str] = []
    at, used = HEADER.size, 0
    while True:
        if at >= len(message):
            return None
        size = message[at]
        if size == 0:
            break
        if size > 63 or at + 1 + size > len(message):
            return None
        used += size + 1
        if used > MAX_NAME:
            return None
        labels.append(message[at + 1 : at + 1 + size].decode("latin-1").lower())
        at += 1 + size
    if at + 5 > len(message):
        return None
    kind = struct.unpack_from(">H", message, at + 1)[0]
    return Question(".".join(labels), kind, at + 5)


def with_id(message: bytes, number: int) -> bytes:
    """The message under another id."""
    return struct.pack(">H", number) + message[2:]


def answers(reply: bytes, query: bytes, asked: Question) -> bool:
    """Whether ``reply`` is one to ``query``: the same id, a reply, and the same question (case apart) where it repeats one."""
    if len(reply) < HEADER.size or reply[:2] != query[:2] or not reply[2] & 0x80:
        return False
    count = struct.unpack_from(">H", reply, 4)[0]
    if count == 0:
        return True  # a server that did not understand may leave it out
    return reply[HEADER.size : asked.end].lower() == query[HEADER.size : asked.end].lower()


def refusal(query: bytes, code: int, asked: Question | None = None) -> bytes:
    """An answer that holds nothing but ``code``."""
    number, flags, *_ = HEADER.unpack_from(query)
    body = query[HEADER.size : asked.end] if asked is not None else b""
    return HEADER.pack(number, QR | RA | (flags & (RD | 0x7800)) | code, 1 if asked is not None else 0, 0, 0, 0) + body


def nameservers(text: str) -> list[str]:
    """The addresses that a resolv.conf names, in order; a link-local one keeps its ``%interface``."""
    found = []
    for line in text.splitlines():
        words = line.split("#", 1)[0].split(";", 1)[0].split()
        if len(words) >= 2 and words[0] == "nameserver":
            found.append(words[1])
    return found
