"""What the bus needs of a messaging system: seven verbs, fulfilled by NATS (`nats_transport`) and, for tests of logic, in memory.

The hot path is synchronous on purpose: `post` appends to the connection's outgoing buffer and `subscribe_raw` calls a
plain function from the reader, so a heartbeat or an output chunk costs no task and no future.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

log = structlog.get_logger("dsec.bus")

Headers = Mapping[str, str]


class Msg:
    """One message as it came; headers are parsed when somebody looks."""

    __slots__ = ("_headers", "_raw", "data", "reply", "subject")

    def __init__(
        self, subject: str, data: bytes, reply: str = "", raw_headers: bytes | None = None, headers: Headers | None = None
    ) -> None:
        self.subject = subject
        self.data = data
        self.reply = reply
        self._raw = raw_headers
        self._headers: Headers | None = headers

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = parse_headers(self._raw) if self._raw else {}
        return self._headers

    @property
    def status(self) -> str:
        """The server's inline status such as ``503`` (no responders); "" for an ordinary message."""
        raw = self._raw
        if raw is None:
            return (self._headers or {}).get("Status", "")
        return raw[9:12].decode("ascii", "replace") if raw[8:9] == b" " else ""

    def __repr__(self) -> str:
        return f"<Msg {self.subject} {len(self.data)} bytes reply={self.reply!r}>"


def parse_headers(raw: bytes) -> dict[str, str]:
    """``NATS/1.0[ status text]\\r\\nName: value\\r\\n…`` as a dict; malformed lines are left out, malformed UTF-8 is replaced."""
    first, _, rest = raw.partition(b"\r\n")
    out: dict[str, str] = {}
    if len(first) > 9:
        status, _, text = first[9:].decode("utf-8", "replace").partition(" ")
        out["Status"] = status
        out["Description"] = text
    for line in rest.split(b"\r\n"):
        name, sep, value = line.partition(b":")
        if sep:
            out[name.strip().decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return out


RawCallback = Callable[[Msg], None]


class Subscription(Protocol):
    subject: str

    async def unsubscribe(self) -> None:
        """No message is delivered after it returns. Idempotent."""

    async def drain(self) -> None:
        """Stop new messages at the server, deliver those already sent, then end. Idempotent."""


class Events:
    """What a connection went through: counters for metrics, listeners for actors.

    Counters: ``disconnected``, ``reconnected``, ``slow_consumer``, ``denied``, ``error``, ``callback_error``, ``dropped``,
    ``in_msgs``, ``out_msgs``, ``in_bytes``, ``out_bytes``.
    Listeners are called with (what, detail) for every event that is not a message; they must not raise nor block.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.listeners: list[Callable[[str, str], None]] = []

    def emit(self, what: str, detail: str = "", *, level: str = "warning") -> None:
        self.counts[what] += 1
        # An endless reconnect would fill the log with one line per attempt: say the first ones and then every power of two.
        count = self.counts[what]
        if count <= 8 or count & (count - 1) == 0:
            getattr(log, level)("bus." + what, connection=self.name, detail=detail, count=count)
        for listener in list(self.listeners):
            try:
                listener(what, detail)
            except Exception as error:  # noqa: BLE001 - a broken listener must not stop the reader
                self.counts["callback_error"] += 1
                log.error("bus.listener_failed", connection=self.name, what=what, error=repr(error))


class Transport(Protocol):
    """A connection. Errors: `Unavailable` (nobody answers, or no connection), `DeadlineExceeded`, `InvalidRequest` (too large, bad
    subject), `Denied` (the server's permissions)."""

    name: str
    events: Events

    @property
    def on_touch(self) -> Callable[[float], None]:
        """Called when the server has answered a ping, with the loop's time at which that was sent: until then it heard us."""

    @on_touch.setter
    def on_touch(self, call: Callable[[float], None]) -> None: ...

    @property
    def max_payload(self) -> int:
        """Bytes in one message, headers included."""

    @property
    def server_version(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    async def wait_connected(self, timeout: float) -> None:
        """Raises `Unavailable` when there is still no connection after ``timeout`` seconds."""

    def post(self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None) -> None:
        """Append to the outgoing buffer, at once. During an outage it is kept (up to 2 MiB) and sent on reconnection;
        above that `Unavailable`."""

    async def publish(self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None) -> None:
        """As `post`, but waits while more than 2 MiB are unsent: the way for bulk data."""

    def request_nowait(self, subject: str, data: bytes = b"", *, headers: Headers | None = None) -> asyncio.Future[Msg]:
        """The answer's future. It fails with `Unavailable` at once when nobody subscribes or the connection breaks; it has no time-out."""

    async def request(self, subject: str, data: bytes = b"", *, timeout: float, headers: Headers | None = None) -> Msg:
        """One answer within ``timeout`` seconds, the wait for a connection included."""

    async def subscribe_raw(self, subject: str, callback: RawCallback, *, queue: str = "") -> Subscription:
        """``callback`` is called by the reader for each message, in order; it must be quick and must not block. Survives reconnection."""

    async def flush(self, timeout: float = 10.0) -> None:
        """Returns when the server has taken everything posted before."""

    def new_inbox(self) -> str:
        """A fresh subject under this user's inbox prefix."""

    async def close(self, timeout: float = 5.0) -> None:
        """Drain: what was posted is sent, what had arrived is delivered; then the connection ends. Idempotent."""
