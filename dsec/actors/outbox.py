"""An Edge's events: each is written down together with the change that it tells of, and told after that.

So an Edge that dies tells at its next start what the one before it had done and not told, under the same number. Consumers drop what
comes twice by (sb, incarnation, n).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import structlog

from dsec.actors.store import Record, Store, Told
from dsec.bus.messages import Event

log = structlog.get_logger("dsec.outbox")
CLOSE = 5.0  # seconds for what is being written when the Edge ends
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


class EventSink(Protocol):
    """Where events go; `dsec.bus.events.EventPublisher` is one. It calls ``told`` with those that need not be posted again."""

    told: Callable[[Sequence[Event]], object]

    def post(self, *events: Event) -> None: ...

    async def close(self) -> None: ...


class Outbox:
    """Of one Edge. ``make`` an event, write its `row` with the change, then ``send`` it; `emit` does all three."""

    def __init__(self, edge: str, store: Store, sink: EventSink) -> None:
        self._edge, self._store, self._sink = edge, store, sink
        self._n = 0
        self._open: dict[int, None] = {}  # numbers of events that are made and not told
        self._last = self._forgotten = 0
        self._writing: set[asyncio.Future[None]] = set()
        sink.told = self._told

    def make(self, kind: str, record: Record | None = None, detail: dict[str, object] | None = None) -> Event:
        """The next event; docs/events.md lists the kinds."""
        self._n += 1
        event = Event(
            kind=kind,
            sb=f"{self._edge}-{record.ulid}" if record else "",
            edge=self._edge,
            project=record.project if record else "",
            principal=record.principal if record else "",
            incarnation=self._store.incarnation,
            n=self._n,
            wall_ts=time.time(),
            mono_ns=time.monotonic_ns(),
            labels=record.spec.labels if record else {},
            detail=detail or {},
        )
        self._last = _number(event)
        self._open[self._last] = None
        return event

    @staticmethod
    def row(event: Event) -> Told:
        """What the store keeps of it."""
        return _number(event), _encode(event)

    def send(self, *events: Event) -> None:
        """They are on disk: on their way, at once."""
        self._sink.post(*events)

    def send_once(self, written: asyncio.Future[None], event: Event) -> None:
        """`send`, as soon as that is written."""
        self._writing.add(written)
        written.add_done_callback(functools.partial(self._written, event))

    def drop(self, *events: Event) -> None:
        """What they tell of could not be written, so it has not happened."""
        self._told(events)

    def emit(self, kind: str, record: Record | None = None, detail: dict[str, object] | None = None) -> None:
        event = self.make(kind, record, detail)
        self.send_once(self._store.keep([self.row(event)]), event)

    async def recover(self) -> None:
        """Tell what an Edge before this one had not."""
        events = []
        for number, body in await self._store.untold():
            try:
                events.append(_decode(body))
            except msgspec.MsgspecError as error:
                log.error("outbox.unreadable_event", number=number, error=str(error))
                continue
            self._open[number] = None
        if events:
            log.info("outbox.untold", count=len(events))
            self.send(*events)

    def sweep(self) -> None:
        """Forget on disk what has been told; called now and then."""
        upto = min(self._open, default=self._last + 1) - 1
        if upto > self._forgotten:
            self._forgotten = upto
            self._store.forget_told(upto)

    async def close(self) -> None:
        """What can be delivered is, the rest is in the spool."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=CLOSE)
            await asyncio.sleep(0)  # what is written is sent by callbacks
        await self._sink.close()
        self.sweep()

    def _written(self, event: Event, written: asyncio.Future[None]) -> None:
        self._writing.discard(written)
        if not written.cancelled() and (error := written.exception()) is not None:
            log.error("outbox.not_written", kind=event.kind, sandbox=event.sb, error=str(error), then="told all the same: it has happened")
        self.send(event)

    def _told(self, events: Sequence[Event]) -> None:
        for event in events:
            self._open.pop(_number(event), None)


def _number(event: Event) -> int:
    """Counts up through the incarnations of one state directory."""
    return int(event.incarnation.rpartition(".")[2]) << 40 | event.n
