"""The gate between a worker sandbox and the bus: it reads the NATS protocol as a stranger's and writes its own.

What a client inside says is taken apart, checked against its job's `Grant` and put together anew, so nothing reaches nats-server that was
not understood here; its CONNECT never does. There is no secret in the sandbox: who speaks is known by the connection. Pure: bytes in,
bytes out (`Gate`), and a bucket that says how fast (`Bucket`). The protocol is NATS's own (docs.nats.io, "Client Protocol").
"""

from __future__ import annotations

import json
import re
from typing import Any

from dsec.bus import call, codec
from dsec.bus.grants import Grant, narrow, within
from dsec.bus.messages import CreateEnvelope, CreateRequest
from dsec.bus.subjects import ROOT
from dsec.errors import Denied, DsecError, InvalidRequest

LINE = 4096  # bytes of one line, as nats-server has it
SUBSCRIPTIONS = 1_000  # of one connection
ALIKE = 4  # of them to one subject: nats-server sends what is said there to each of them, and keeps it for who does not read
TOKENS = 6  # of an inbox; so few subscriptions beside one another hear what is said to it
CREATE = 900_000  # bytes of a create, which is looked into as a whole
COSTLY = 4_096  # bytes of a create that count as a message
SPECS = 4_096  # of one create: each is made anew here, and all of them while nobody else is served
SPECS_COSTLY = 8  # of them that count as a message
REMEMBERED = 1_024  # subjects that need not be looked at again
# What a message may bear: others mean something to nats-server (it would tell a trace of the message to whatever subject one names).
HEADERS = (call.REQUEST_ID, call.DEADLINE, call.TRACE)
_SUBJECT = re.compile(r"[\x21-\x7e]{1,400}")
_VALUE = re.compile(r"[\x20-\x7e]{0,200}")
_SID = re.compile(r"[A-Za-z0-9]{1,32}")
_NUMBER = re.compile(r"[0-9]{1,9}")


def call_headers(lines: list[bytes]) -> dict[str, str]:
    """Those of ``name: value`` that a request of ours may have; the others are left out."""
    found = {}
    for line in lines:
        name, _, value = line.decode("latin-1").partition(":")
        if name in HEADERS and _VALUE.fullmatch(value.strip()):
            found[name] = value.strip()
    return found


def _plain(subject: str) -> bool:
    """Whether it is no inbox, or one of few tokens and with no `*` but the last."""
    tokens = subject.split(".")
    return tokens[0] != "_INBOX" or (len(tokens) <= TOKENS and "*" not in tokens[:-1])


def wire_headers(headers: dict[str, str]) -> bytes:
    return ("NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n").encode()


class Bucket:
    """Tokens that fill up at ``rate`` a second to at most ``burst``; one is a message, or 64 KiB."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self._left, self._at = rate, burst, burst, now

    def take(self, messages: int, size: int, now: float) -> float:
        """Seconds to wait until what was taken is there."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - messages - size / 65_536
        self._at = now
        return max(0.0, -self._left / self._rate)


class Gate:
    """One connection. `client` takes what the client sends, `server` what nats-server sends; ``up`` and ``down`` collect what goes on to
    nats-server and to the client. ``over`` says why it is to be closed, once ``down`` is delivered."""

    def __init__(self, grant: Grant, *, version: str, max_payload: int, connect: dict[str, Any]) -> None:
        self.grant = grant
        self.up = bytearray()
        self.down = bytearray()
        self.over = ""
        self.messages = 0  # that the client has sent, by what they cost
        self.refused = 0  # of them, that went nowhere
        self.connected = False  # it has said CONNECT
        self._publish, self._subscribe, self._create = grant.publish, grant.subscribe, grant.create
        self._max_payload = max_payload
        self._connect = connect
        self._allowed: set[str] = set()  # subjects that were looked at before
        self._subs: dict[str, str] = {}
        self._listens: dict[str, str] = {}  # the other way round: what was subscribed to, and as what
        self._alike: dict[str, int] = {}  # … and how often
        self._heard_of: dict[str, int] = {}  # messages that a subscription has had, and
        self._most: dict[str, int] = {}  # with how many it ends by itself
        self._line = bytearray()  # of the client, not whole yet
        self._left = 0  # bytes of a payload that are still to come, with its end of line
        self._tail = b""  # what has come of that
        self._pass = False  # and whether they go on
        self._pong = False  # to be said once they have
        self._held: bytearray | None = None  # a create, until it is whole
        self._head_left = 0  # bytes of headers that are still to come
        self._head = bytearray()  # what has come of them, and then what goes on
        self._message = ("", "", 0)  # subject, reply and size of the body that they belong to
        self._said = bytearray()  # by the server, not whole yet
        self._skip = 0  # bytes of a payload of the server's that are still to come
        self._later = b""  # what the client is told once that has come
        info = {"server_id": "dsec", "server_name": "dsec", "version": version, "proto": 1, "headers": True, "max_payload": max_payload}
        self.down += b"INFO " + json.dumps(info).encode() + b"\r\n"

    # ------------------------------------------------------------------ from the client
    def client(self, data: bytes) -> None:
        """Take bytes of the client; nothing more after ``over`` is set."""
        view = memoryview(data)
        while view and not self.over:
            if self._head_left:
                view = self._headers(view)
                continue
            if self._left:
                view = self._payload(view)
                continue
            end = data.find(b"\n", len(data) - len(view))
            piece = view if end < 0 else view[: end + 1 - (len(data) - len(view))]
            if len(self._line) + len(piece) > LINE:
                self._end("Maximum Control Line Exceeded")
                return
            self._line += piece
            view = view[len(piece) :]
            if end >= 0:
                line, self._line = bytes(self._line).rstrip(b"\r\n"), bytearray()
                self._command(line)

    def _payload(self, view: memoryview) -> memoryview:
        part = view[: self._left]
        body = part[: max(0, self._left - 2)]
        self._left -= len(part)
        self._tail += part[len(body) :]
        if self._held is not None:
            self._held += body
        elif self._pass:
            self.up += body
        if not self._left:
            tail, self._tail = self._tail, b""
            if tail != b"\r\n":
                self._end("Unknown Protocol Operation")
            elif self._held is not None:
                held, self._held = self._held, None
                self._created(bytes(held))
            elif self._pass:
                self.up += tail
            if self._pong:
                self.up += b"PONG\r\n"
                self._pong = False
        return view[len(part) :]

    def _command(self, line: bytes) -> None:
        try:
            words = line.decode("ascii").split()
        except UnicodeDecodeError:
            self._end("Unknown Protocol Operation")
            return
        self.messages += 1
        if not words:
            return
        what = words[0].upper()
        if what == "CONNECT":
            self._on_connect(line[8:])
        elif not self.connected:
            self._end("Authorization Violation")
        elif what == "PING" and len(words) == 1:
            self.up += b"PING\r\n"
        elif what == "PONG" and len(words) == 1:
            pass  # the server's PING was answered here
        elif what == "SUB" and len(words) in (3, 4):
            self._on_sub(words[1], words[2] if len(words) == 4 else "", words[-1])
        elif what == "UNSUB" and len(words) in (2, 3):
            self._on_unsub(words[1], words[2] if len(words) == 3 else "")
        elif what == "PUB" and len(words) in (3, 4):
            self._on_pub(words[1], words[2] if len(words) == 4 else "", "0", words[-1])
        elif what == "HPUB" and len(words) in (4, 5):
            self._on_pub(words[1], words[2] if len(words) == 5 else "", words[-2], words[-1])
        else:
            self._end("Unknown Protocol Operation")

    def _on_connect(self, text: bytes) -> None:
        """The client's wishes, of which one counts; who it is, it has not to say."""
        try:
            wishes = json.loads(text)
        except (ValueError, RecursionError):
            wishes = None
        if self.connected or not isinstance(wishes, dict):
            self._end("Unknown Protocol Operation")
            return
        self.connected = True
        # Without INFO of later changes (protocol 0): the servers' addresses are none of its business.
        options = {
            **self._connect,
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "protocol": 0,
            "echo": wishes.get("echo") is not False,
        }
        self.up += b"CONNECT " + json.dumps(options).encode() + b"\r\n"

    def _on_sub(self, subject: str, queue: str, sid: str) -> None:
        if not _SUBJECT.fullmatch(subject) or (queue and not _SUBJECT.fullmatch(queue)) or not _SID.fullmatch(sid):
            self._end("Unknown Protocol Operation")
        elif not within(self._subscribe, subject) or not _plain(subject):
            self.refused += 1
            self._error(f'Permissions Violation for Subscription to "{subject}"')
        elif sid not in self._subs and (len(self._subs) >= SUBSCRIPTIONS or self._alike.get(subject, 0) >= ALIKE):
            self._end("Maximum Subscriptions Exceeded")
        else:
            self._drop(sid)
            self._subs[sid], self._listens[subject], self._heard_of[sid] = subject, sid, 0
            self._alike[subject] = self._alike.get(subject, 0) + 1
            self.up += f"SUB {subject} {queue} {sid}\r\n".encode() if queue else f"SUB {subject} {sid}\r\n".encode()

    def _on_unsub(self, sid: str, most: str) -> None:
        if not _SID.fullmatch(sid) or (most and not _NUMBER.fullmatch(most)):
            self._end("Unknown Protocol Operation")
        elif sid in self._subs:
            if not int(most or 0) or self._heard_of[sid] >= int(most):
                self._drop(sid)
            else:
                self._most[sid] = int(most)
            self.up += f"UNSUB {sid} {most}\r\n".encode() if most else f"UNSUB {sid}\r\n".encode()

    def _drop(self, sid: str) -> None:
        """It is one no more."""
        subject = self._subs.pop(sid, "")
        if subject and (alike := self._alike.pop(subject) - 1):
            self._alike[subject] = alike
        if self._listens.get(subject) == sid:
            del self._listens[subject]
        self._heard_of.pop(sid, None)
        self._most.pop(sid, None)

    def _on_pub(self, subject: str, reply: str, headers: str, total: str) -> None:
        good = _SUBJECT.fullmatch(subject) and (not reply or _SUBJECT.fullmatch(reply))
        if not good or not _NUMBER.fullmatch(headers) or not _NUMBER.fullmatch(total) or int(headers) > int(total):
            self._end("Unknown Protocol Operation")
            return
        size = int(total)
        if size > self._max_payload:
            self._end("Maximum Payload Violation")
            return
        self._left, self._pass = size + 2, False
        self._head.clear()
        if reply and (not within((f"{self.grant.inbox}>",), reply) or not _plain(reply)):
            self._refuse(subject, "")
        elif not self._may_publish(subject):
            self._refuse(subject, reply)
        elif subject == self._create and size > CREATE:
            self._fail(reply, InvalidRequest("a create of more than 900 kB", field="payload", value=size, fix="send it in slices"))
        elif int(headers) > LINE:
            self._end("Maximum Control Line Exceeded")
        else:
            self._message = (subject, reply, size - int(headers))
            self._head_left, self._left = int(headers), self._message[2] + 2
            if not self._head_left:
                self._begin()

    def _headers(self, view: memoryview) -> memoryview:
        part = view[: self._head_left]
        self._head += part
        self._head_left -= len(part)
        if not self._head_left:
            lines = bytes(self._head).split(b"\r\n")
            if lines[0] != b"NATS/1.0" or lines[-2:] != [b"", b""]:
                self._end("Unknown Protocol Operation")
            else:
                said = call_headers(lines[1:-2])
                self._head = bytearray(wire_headers(said) if said else b"")
                self._begin()
        return view[len(part) :]

    def _begin(self) -> None:
        """All before the body is known: it goes on as it comes, or is held until it is whole."""
        subject, _, size = self._message
        if subject == self._create:
            self._held = bytearray()
            self.messages += size // COSTLY
        else:
            self._pass = True
            self._publish_line(size)

    def _publish_line(self, size: int) -> None:
        subject, reply, _ = self._message
        head = bytes(self._head)
        to = f"{subject} {reply}" if reply else subject
        line = f"HPUB {to} {len(head)} {len(head) + size}" if head else f"PUB {to} {size}"
        self.up += line.encode() + b"\r\n" + head

    def _may_publish(self, subject: str) -> bool:
        if subject in self._allowed:
            return True
        if "*" in subject or ">" in subject or not within(self._publish, subject):
            return False
        if len(self._allowed) >= REMEMBERED:
            self._allowed.clear()
        self._allowed.add(subject)
        return True

    def _created(self, body: bytes) -> None:
        """A create is whole: what it asks for is narrowed to what the job may have."""
        try:
            specs = len(codec.decode(body, CreateEnvelope).specs)
            self.messages += specs // SPECS_COSTLY
            if specs > SPECS:
                raise InvalidRequest("too many specs in one create", field="specs", value=specs, fix=f"{SPECS} are most: send it in slices")
            request = narrow(self.grant, codec.decode(body, CreateRequest))
            body = codec.encode(request, json=codec.is_json(body), limit=self._max_payload - len(self._head))
        except DsecError as error:
            self._fail(self._message[1], error)
            return
        self._publish_line(len(body))
        self.up += body + b"\r\n"

    # ------------------------------------------------------------------ refusing
    def _refuse(self, subject: str, reply: str) -> None:
        """As nats-server says it, or, to who waits for an answer of an actor, as that answer."""
        self.refused += 1
        error = Denied(
            "this job may not publish there", field="subject", value=subject, reason="job", fix="see docs/operations.md, Workers"
        )
        if not subject.startswith(f"{ROOT}.") or not self._answer(reply, error):
            self._error(f'Permissions Violation for Publish to "{subject}"')

    def _fail(self, reply: str, error: DsecError) -> None:
        self.refused += 1
        self._answer(reply, error)

    def _answer(self, reply: str, error: DsecError) -> bool:
        if not (sid := self._listener(reply)):
            return False
        body = error.body()
        block, data = wire_headers(call.error_headers(body)), codec.encode(body)
        self._tell(f"HMSG {reply} {sid} {len(block)} {len(block) + len(data)}\r\n".encode() + block + data + b"\r\n")
        return True

    def _listener(self, reply: str) -> str:
        """The subscription that hears of ``reply``. Not each is looked at: there may be a thousand, and a stranger asks very often."""
        above, _, _ = reply.rpartition(".")
        patterns = [reply, f"{above}.*"]
        while above:
            patterns.append(f"{above}.>")
            above = above.rpartition(".")[0]
        return next((self._listens[pattern] for pattern in patterns if pattern in self._listens), "")

    def _error(self, text: str) -> None:
        self._tell(f"-ERR '{text}'\r\n".encode())

    def _end(self, text: str) -> None:
        self._error(text)
        self.over = text

    def _tell(self, data: bytes) -> None:
        """Between two messages of the server's, never inside of one."""
        if self._skip:
            self._later += data
        else:
            self.down += data

    # ------------------------------------------------------------------ from nats-server
    def server(self, data: bytes) -> None:
        """Take bytes of nats-server. Raises `InvalidRequest` for what is not its protocol."""
        at = 0
        while at < len(data):
            if self._skip:
                part = data[at : at + self._skip]
                self.down += part
                self._skip -= len(part)
                at += len(part)
                if not self._skip and self._later:
                    self.down += self._later
                    self._later = b""
                continue
            end = data.find(b"\n", at)
            self._said += data[at:] if end < 0 else data[at : end + 1]
            if len(self._said) > 64 << 10:
                raise InvalidRequest("nats-server said a line of more than 64 KiB", field="line")
            if end < 0:
                return
            at = end + 1
            line, self._said = bytes(self._said), bytearray()
            self._heard(line)

    def _heard(self, line: bytes) -> None:
        what = line[:5].upper()
        if what.startswith((b"MSG ", b"HMSG ")):
            words = line.split()
            if len(words) < 4 or not (size := words[-1]).isdigit():
                raise InvalidRequest("nats-server sent a message without its size", field="line", value=repr(line[:80]))
            self.down += line
            self._skip = int(size) + 2
            self._count(words[2].decode("latin-1"))
        elif what.startswith(b"PING"):
            if self._left and self._pass:  # not into the middle of a message
                self._pong = True
            else:
                self.up += b"PONG\r\n"
        elif not what.startswith(b"INFO"):
            self.down += line

    def _count(self, sid: str) -> None:
        """One more message for it; nats-server ends it by itself with the last that was wished for."""
        if sid in self._heard_of:
            self._heard_of[sid] += 1
            if self._heard_of[sid] == self._most.get(sid):
                self._drop(sid)
