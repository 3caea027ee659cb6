"""nats-py's client with the parts replaced that do not fit an actor system. Tested with nats-py 2.16.

What is replaced, and why:

* Delivery. nats-py queues each message and runs a subscription's callbacks one after another in a task; a full queue drops.
  `direct` subscriptions call a plain function from the reader instead: nothing queues here, TCP itself holds back the server.
* Reading and writing. nats-py has a task for each; here both are done in the round of the loop in which there is something to do
  (`nats_stream`).
* ``flush()``. nats-py writes its PING straight to the transport, past the commands that still wait for its flusher task, so
  the PONG may come back before they have left (seen under uvloop). Here the PING waits its turn.
* A PONG after a flush's time-out. nats-py sets the result of a cancelled future, which ends its read loop for good.
* Requests in flight when the connection breaks fail then, not at their own deadline.
* A connection that takes nothing any more (half-open) is dropped, not closed: closing waits for what was written.
* A fatal ``-ERR`` (authentication expired, too many connections) closes nats-py's client for ever; here it reconnects.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

if "aiohttp" in sys.modules:
    from nats.aio.client import Client, Server
else:
    # nats-py imports aiohttp for its WebSockets, which we do not offer: 90 ms of every command line. None = "not installed".
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        from nats.aio.client import Client, Server
    finally:
        del sys.modules["aiohttp"]
from nats import errors as nats_errors

from dsec.bus.nats_stream import Over, Reader
from dsec.bus.transport import Events, Msg, RawCallback
from dsec.errors import Denied, InvalidRequest, Unavailable

# The other modules take nats-py's names from here, so that this import is the first.
__all__ = ["OUTGOING_LIMIT", "DirectClient", "Server", "nats_errors", "wire_headers"]

OUTGOING_LIMIT = 2 * 1024 * 1024

_BAD_SUBJECT = re.compile(r"[\s\x00]|^$|\.\.|^\.|\.$")
_BAD_HEADER = re.compile(r"[\r\n]")
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


def wire_headers(headers: Mapping[str, str]) -> bytes:
    """The header block. Raises `InvalidRequest` for a line break, which would let a value forge protocol lines."""
    parts = ["NATS/1.0\r\n"]
    for name, value in headers.items():
        if _BAD_HEADER.search(value) or _BAD_HEADER.search(name) or ":" in name or not name:
            raise InvalidRequest("a header holds a line break or a bad name", field=name, value=value)
        parts.append(f"{name}: {value}\r\n")
    parts.append("\r\n")
    return "".join(parts).encode()


class DirectClient(Client):
    """Adds `post`, `direct` and `ask` to nats-py's client; see the module's text for what it mends."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events
        self._direct: dict[int, RawCallback] = {}
        self._asks: dict[str, tuple[asyncio.Future[Msg], str]] = {}
        self._ask_prefix = ""
        self._ask_next = 0
        self._pinged: dict[asyncio.Future[Any], float] = {}
        self._reader: Reader | None = None  # of a connection that is set up
        self.on_touch: Callable[[float], None] = lambda _: None

    # ------------------------------------------------------------------ sending
    def post(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Send one PUB or HPUB; never waits."""
        if _BAD_SUBJECT.search(subject):
            raise InvalidRequest("not a subject that can be published to", field="subject", value=subject)
        size = len(data)
        if headers:
            block = wire_headers(headers)
            total = size + len(block)
            command = f"HPUB {subject} {reply} {len(block)} {total}\r\n".encode() + block
        else:
            total = size
            command = f"PUB {subject} {reply} {size}\r\n".encode()
        if total > self._max_payload:
            raise InvalidRequest(
                f"message of {total} bytes is above the server's max_payload of {self._max_payload}",
                field="payload",
                fix="send it in pieces, or raise max_payload in nats.conf",
            )
        if self.is_closed:
            raise Unavailable("this connection is closed")
        if not self.is_connected and self._pending_data_size + total > self._max_pending_size:
            self.events.counts["dropped"] += 1
            raise Unavailable("the bus is away and the outgoing buffer is full", fix="see that nats-server runs and is reachable")
        counts = self.events.counts
        counts["out_msgs"] += 1
        counts["out_bytes"] += size
        if size > 4096:  # one copy less for bulk data
            self._send(command, data, b"\r\n")
        else:
            self._send(b"%b%b\r\n" % (command, data))

    def _send(self, *pieces: bytes) -> None:
        """At once where nothing waits before it (uvloop gathers what is written in one round of the loop), else with the next flush."""
        reader = self._reader
        if reader is not None and not self._pending and self.is_connected and reader.write(*pieces):
            return
        self._pending += pieces
        self._pending_data_size += sum(map(len, pieces))
        queue = self._flush_queue
        if queue is not None and queue.empty() and self.is_connected:
            queue.put_nowait(asyncio.get_running_loop().create_future())

    async def drain_outgoing(self) -> None:
        """Wait while more than the limit is unsent (an outage counts as sent: the buffer is bounded by `post`)."""
        while self._pending_data_size > OUTGOING_LIMIT and self.is_connected:
            await self._flush_pending(force_flush=True)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        if future is None:
            future = asyncio.get_running_loop().create_future()
        if not self._pongs:  # also after a reconnection, which forgets those that were out
            self._pinged.clear()
        self._pongs.append(future)
        self._pinged[future] = asyncio.get_running_loop().time()
        self._send(b"PING\r\n")

    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        if self._pongs:
            future = self._pongs.pop(0)
            self._pongs_received += 1
            if (sent := self._pinged.pop(future, None)) is not None:
                self.on_touch(sent)
            if not future.done():
                future.set_result(True)

    # ------------------------------------------------------------------ receiving
    def direct(self, subject: str, queue: str, callback: RawCallback, on_denied: Callable[[str], None]) -> int:
        """Subscribe; returns the subscription's number."""
        if _BAD_SUBJECT.search(subject) or _BAD_SUBJECT.search(queue or "q"):
            raise InvalidRequest("not a subject that can be subscribed to", field="subject", value=subject)
        if self.is_closed:
            raise Unavailable("this connection is closed")
        self._sid += 1
        sid = self._sid
        self._direct[sid] = callback
        # nats-py replays SUB from this table after a reconnection; no queue task is started because we never call _start.
        self._subs[sid] = _Replayed(self, sid, subject, queue, on_denied)  # type: ignore[assignment]
        self._command(f"SUB {subject} {queue} {sid}\r\n" if queue else f"SUB {subject} {sid}\r\n")
        return sid

    def undirect(self, sid: int) -> None:
        self._direct.pop(sid, None)
        if self._subs.pop(sid, None) is not None:
            self._command(f"UNSUB {sid}\r\n")

    def stop_delivery(self, sid: int) -> None:
        """UNSUB at the server, but keep delivering what it has already sent (drain)."""
        if sid in self._subs:
            self._command(f"UNSUB {sid}\r\n")

    def _command(self, text: str) -> None:
        if not self.is_connected:
            return  # replayed from _subs
        self._send(text.encode())

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> bool:
        callback = self._direct.get(sid)
        if callback is None:
            return False
        counts = self.events.counts
        counts["in_msgs"] += 1
        counts["in_bytes"] += len(data)
        try:
            callback(Msg(subject.decode(), data, reply.decode(), headers))
        except Exception as error:  # noqa: BLE001 - anything that escaped would end the connection
            self.events.emit("callback_error", f"{subject!r}: {error!r}", level="error")
        return True

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except UnicodeDecodeError as error:  # raised here it would end the read loop
            self.events.emit("error", f"subject is not UTF-8: {error}")

    # ------------------------------------------------------------------ request and answer
    def ask(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> asyncio.Future[Msg]:
        """Publish with an answer token of its own; the future fails when nobody subscribes and when the connection breaks."""
        if not self._ask_prefix:
            self._ask_prefix = self.new_inbox() + "."
            self.direct(self._ask_prefix + "*", "", self._answered, lambda _: None)
        self._ask_next += 1
        token = str(self._ask_next)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self.post(subject, data, self._ask_prefix + token, headers)
        self._asks[token] = (future, subject)
        future.add_done_callback(lambda _: self._asks.pop(token, None))
        return future

    def _answered(self, msg: Msg) -> None:
        entry = self._asks.pop(msg.subject[len(self._ask_prefix) :], None)
        if entry is None or entry[0].done():
            return
        future, subject = entry
        if msg.status == "503" and not msg.data:
            future.set_exception(Unavailable("nobody serves this subject", field="subject", value=subject, reason="no_responders"))
        else:
            future.set_result(msg)

    def fail_asks(self, make: Callable[[str], Exception]) -> None:
        """Every request in flight fails with ``make(subject)``."""
        for future, subject in list(self._asks.values()):
            if not future.done():
                future.set_exception(make(subject))

    async def _request_new_style(self, subject: str, payload: bytes, timeout: float = 1, headers: dict[str, Any] | None = None) -> Any:
        """nats-py's own requests (its JetStream API) go the same way, so that they too end when the connection breaks."""
        try:
            answer = await asyncio.wait_for(self.ask(subject, payload, headers), timeout)
        except TimeoutError:
            raise nats_errors.TimeoutError from None
        except Unavailable as error:
            if error.reason == "no_responders":
                raise nats_errors.NoRespondersError from None
            raise
        header = dict(answer.headers) or None
        return self.msg_class(_client=self, subject=answer.subject, reply=answer.reply, data=answer.data, headers=header)

    # ------------------------------------------------------------------ errors and connection
    async def _process_err(self, err_msg: str) -> None:
        denied = _DENIED.search(err_msg)
        if denied:
            self._deny(denied[1], denied[2], err_msg)
        elif self.is_connecting or ("authorization violation" in err_msg and not self.is_connected):
            await super()._process_err(err_msg)
        else:
            self.events.emit("slow_consumer" if "slow consumer" in err_msg else "error", f"nats-server: {err_msg}", level="error")
            await self._process_op_err(nats_errors.Error(f"nats: {err_msg}"))

    def _deny(self, what: str, subject: str, text: str) -> None:
        self.events.emit("denied", text, level="error")
        # Compared in lower case because nats-py's parser lower-cases the server's text.
        if what == "publish":
            for future, asked in list(self._asks.values()):
                if asked.lower() == subject and not future.done():
                    future.set_exception(Denied("the server forbids publishing to this subject", field="subject", value=asked))
        else:
            for sub in list(self._subs.values()):
                if isinstance(sub, _Replayed) and sub._subject.lower() == subject:
                    sub.on_denied(text)

    async def _attempt_reconnect(self) -> None:
        """nats-py goes on only after the errors it thought of; any other would end the reconnecting for good. And it would wait until a
        dead connection has taken what was written to it: on a half-open one that is a quarter of an hour."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        while not self.is_closed:
            try:
                await super()._attempt_reconnect()
            except Exception as error:  # noqa: BLE001 - whatever a stranger on the server's port may provoke
                self.events.emit("error", f"reconnecting: {error!r}", level="error")
                await asyncio.sleep(0.5)
            else:
                return

    async def _read_loop(self) -> None:
        """nats-py starts this on each connection that is set up."""
        streams = vars(self._transport)
        reader = self._reader = Reader(streams["_io_writer"], streams["_io_reader"], self._deliver)
        try:
            while not (self.is_closed or self.is_reconnecting):
                await self._ps.parse(await reader.others())
        except asyncio.CancelledError:
            return
        except (nats_errors.Error, Over, OSError) as error:
            await self._process_op_err(error)
        except Exception as error:  # noqa: BLE001 - nats-py would stop reading and stay "connected"
            self.events.emit("error", f"reader: {error!r}", level="error")
            await self._process_op_err(error)
        finally:
            reader.stop()
            if self._reader is reader:
                self._reader = None


class _Replayed:
    """The fields of a nats-py subscription that its reconnection and its close look at."""

    def __init__(self, client: DirectClient, sid: int, subject: str, queue: str, on_denied: Callable[[str], None]) -> None:
        self.on_denied = on_denied
        self._conn = client
        self._id = sid
        self._subject = subject
        self._queue = queue
        self._max_msgs = 0
        self._received = 0
        self._wait_for_msgs_task = None
        self._message_iterator = None
        self._pending_next_msgs_calls: dict[str, Any] = {}
        self._jsi = None

    async def _drain(self) -> None:
        self._conn.undirect(self._id)
