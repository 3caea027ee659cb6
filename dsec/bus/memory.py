"""The bus inside one process, for tests of logic: NATS's subjects, wildcards, queue groups and no-responders, with faults on demand.

Never used by the demo, the benchmarks or system tests. It has no JetStream.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import ClassVar

from dsec.bus.transport import Events, Headers, Msg, RawCallback
from dsec.errors import DeadlineExceeded, InvalidRequest, Unavailable
from dsec.model import new_ulid


def matches(pattern: str, subject: str) -> bool:
    """NATS's rule: ``*`` is one token, a last ``>`` is one or more."""
    want, have = pattern.split("."), subject.split(".")
    for index, token in enumerate(want):
        if token == ">":
            return len(have) > index
        if index >= len(have) or (token != "*" and token != have[index]):
            return False
    return len(want) == len(have)


class Broker:
    """Where memory transports meet.

    ``latency`` (seconds) delays every delivery; ``drop(subject) -> bool`` loses messages; `go_down` is an outage.
    """

    _named: ClassVar[dict[str, Broker]] = {}

    def __init__(
        self, *, max_payload: int = 1 << 20, latency: float = 0.0, drop: Callable[[str], bool] | None = None, seed: int = 0
    ) -> None:
        self.max_payload = max_payload
        self.latency = latency
        self.drop = drop
        self.subscriptions: list[MemorySubscription] = []
        self.transports: list[MemoryTransport] = []
        self._random = random.Random(seed)
        self._down = False

    @classmethod
    def named(cls, name: str) -> Broker:
        """The broker of ``memory://name``; lives until the process ends."""
        return cls._named.setdefault(name, cls())

    def connect(self, name: str = "memory") -> MemoryTransport:
        return MemoryTransport(self, name)

    def go_down(self) -> None:
        """As when nats-server dies: requests in flight fail, what is posted waits."""
        self._down = True
        for transport in list(self.transports):
            transport.went_down()

    def come_up(self) -> None:
        self._down = False
        for transport in list(self.transports):
            transport.came_up()

    @property
    def is_down(self) -> bool:
        return self._down

    def route(self, msg: Msg) -> int:
        """Deliver to every plain subscriber and to one of each queue group; returns how many took it."""
        if self.drop is not None and self.drop(msg.subject):
            return 1  # lost on the way, which the sender cannot see
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        chosen: list[MemorySubscription] = []
        for subscription in self.subscriptions:
            if matches(subscription.subject, msg.subject):
                if subscription.queue:
                    groups.setdefault((subscription.queue, ""), []).append(subscription)
                else:
                    chosen.append(subscription)
        chosen += [self._random.choice(members) for members in groups.values()]
        loop = asyncio.get_running_loop()
        for subscription in chosen:
            if self.latency:
                loop.call_later(self.latency, subscription.deliver, msg)
            else:
                loop.call_soon(subscription.deliver, msg)
        return len(chosen)


class MemorySubscription:
    def __init__(self, transport: MemoryTransport, subject: str, queue: str, callback: RawCallback) -> None:
        self.subject = subject
        self.queue = queue
        self.denied = ""
        self._transport = transport
        self._callback = callback
        self._open = True
        transport.broker.subscriptions.append(self)

    def deliver(self, msg: Msg) -> None:
        if not self._open:
            return
        counts = self._transport.events.counts
        counts["in_msgs"] += 1
        counts["in_bytes"] += len(msg.data)
        try:
            self._callback(msg)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes an answer, a count and a log line
            self._transport.events.emit("callback_error", f"{msg.subject}: {error!r}", level="error")

    def leave(self) -> None:
        if self in self._transport.broker.subscriptions:
            self._transport.broker.subscriptions.remove(self)

    async def unsubscribe(self) -> None:
        self.leave()
        self._open = False

    async def drain(self) -> None:
        self.leave()
        await asyncio.sleep(self._transport.broker.latency * 1.1)
        self._open = False


class MemoryTransport:
    """`Transport` on a `Broker`."""

    on_touch: Callable[[float], None] = staticmethod(lambda _: None)  # nothing is ever out of touch here

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.max_payload = broker.max_payload
        self.server_version = "memory"
        self.events = Events(name)
        self._closed = False
        self._waiting: list[Msg] = []
        self._up = asyncio.Event()
        if not broker.is_down:
            self._up.set()
        self._inbox = f"_INBOX.{new_ulid()}"
        self._asks: dict[str, tuple[asyncio.Future[Msg], str]] = {}
        self._next = 0
        broker.transports.append(self)
        self._answers = MemorySubscription(self, self._inbox + ".r.*", "", self._answered)

    def went_down(self) -> None:
        self._up.clear()
        self.events.emit("disconnected")
        for future, subject in list(self._asks.values()):
            if not future.done():
                future.set_exception(
                    Unavailable("the bus went away before the answer came", field="subject", value=subject, reason="disconnected")
                )

    def came_up(self) -> None:
        self._up.set()
        self.events.emit("reconnected", level="info")
        waiting, self._waiting = self._waiting, []
        for msg in waiting:
            self._send(msg)

    @property
    def connected(self) -> bool:
        return not self._closed and not self.broker.is_down

    async def wait_connected(self, timeout: float) -> None:
        if self._closed:
            raise Unavailable("this connection is closed", reason="closed")
        try:
            await asyncio.wait_for(self._up.wait(), max(0.0, timeout))
        except TimeoutError:
            raise Unavailable("no connection", reason="disconnected") from None

    def post(self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None) -> None:
        if not subject or any(character.isspace() for character in subject) or ".." in subject or subject[0] == "." or subject[-1] == ".":
            raise InvalidRequest("not a subject that can be published to", field="subject", value=subject)
        size = len(data) + sum(len(name) + len(value) + 4 for name, value in (headers or {}).items())
        if size > self.max_payload:
            raise InvalidRequest(f"message of {size} bytes is above max_payload of {self.max_payload}", field="payload")
        if self._closed:
            raise Unavailable("this connection is closed", reason="closed")
        self.events.counts["out_msgs"] += 1
        self.events.counts["out_bytes"] += len(data)
        msg = Msg(subject, bytes(data), reply, headers=dict(headers or {}))
        if self.broker.is_down:
            self._waiting.append(msg)
        else:
            self._send(msg)

    def _send(self, msg: Msg) -> None:
        if not self.broker.route(msg) and msg.reply:
            self.broker.route(Msg(msg.reply, b"", headers={"Status": "503"}))

    async def publish(self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None) -> None:
        self.post(subject, data, reply=reply, headers=headers)
        await asyncio.sleep(0)

    def request_nowait(self, subject: str, data: bytes = b"", *, headers: Headers | None = None) -> asyncio.Future[Msg]:
        if not self.connected:
            raise Unavailable("no connection", reason="disconnected")
        self._next += 1
        token = str(self._next)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self.post(subject, data, reply=f"{self._inbox}.r.{token}", headers=headers)
        self._asks[token] = (future, subject)
        future.add_done_callback(lambda _: self._asks.pop(token, None))
        return future

    def _answered(self, msg: Msg) -> None:
        future, subject = self._asks.pop(msg.subject.rsplit(".", 1)[1], (None, ""))
        if future is None or future.done():
            return
        if msg.status == "503" and not msg.data:
            future.set_exception(Unavailable("nobody serves this subject", field="subject", value=subject, reason="no_responders"))
        else:
            future.set_result(msg)

    async def request(self, subject: str, data: bytes = b"", *, timeout: float, headers: Headers | None = None) -> Msg:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        await self.wait_connected(timeout)
        future = self.request_nowait(subject, data, headers=headers)
        try:
            return await asyncio.wait_for(future, end - loop.time())
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise
            raise DeadlineExceeded(f"no answer within {timeout:.3f} s", field="subject", value=subject) from None

    async def subscribe_raw(self, subject: str, callback: RawCallback, *, queue: str = "") -> MemorySubscription:
        if not subject or any(character.isspace() for character in subject + queue):
            raise InvalidRequest("not a subject that can be subscribed to", field="subject", value=subject)
        return MemorySubscription(self, subject, queue, callback)

    async def flush(self, timeout: float = 10.0) -> None:
        await self.wait_connected(timeout)
        await asyncio.sleep(self.broker.latency)

    def new_inbox(self) -> str:
        return f"{self._inbox}.{new_ulid()}"

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ARG002 - the protocol's; nothing here takes time
        if self._closed:
            return
        await asyncio.sleep(self.broker.latency)
        self._closed = True
        self.broker.subscriptions[:] = [one for one in self.broker.subscriptions if one._transport is not self]
        if self in self.broker.transports:
            self.broker.transports.remove(self)
        for future, _ in list(self._asks.values()):
            if not future.done():
                future.set_exception(Unavailable("this connection was closed", reason="closed"))
