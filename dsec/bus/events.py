"""Lifecycle events: published in batches that nobody waits for, spooled through an outage, read back without duplicates."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dsec.bus import codec, subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import Event, EventBatch
from dsec.bus.streams import EVENTS_STREAM, Record, ask, checked
from dsec.bus.transport import Msg, log
from dsec.errors import DeadlineExceeded, Denied, DsecError, InvalidRequest, NotFound, Unavailable
from dsec.model import SandboxId, new_ulid

if TYPE_CHECKING:
    from dsec.bus.spool import Spool

BATCH_EVENTS = 256
BATCH_BYTES = 256 * 1024
TRIES = 4  # for a consumer: JetStream may place it on a server that has died a moment ago, which nobody answers for
ANSWER_S = 3.0  # seconds for each of them


def batches(events: Iterable[Event]) -> list[tuple[str, str, list[Event]]]:
    """Group by (kind, project), which is what a subject can say of many, keeping each sandbox's own order."""
    groups: list[tuple[str, str, list[Event]]] = []
    open_: dict[tuple[str, str], int] = {}
    last: dict[str, int] = {}
    for event in events:
        key = (event.kind, event.project)
        index = open_.get(key)
        owner = event.sb or event.edge
        if index is None or last.get(owner, -1) > index or len(groups[index][2]) >= BATCH_EVENTS:
            index = open_[key] = len(groups)
            groups.append((event.kind, event.project, []))
        groups[index][2].append(event)
        last[owner] = index
    return groups


class EventPublisher:
    """An Edge's or Watcher's events on their way to DSEC_EVENTS. `post` never waits; nothing on the create path depends on it.

    Batches go out with up to ``window`` unacknowledged. What cannot be delivered (bus or JetStream away, no acknowledgement in
    ``ack_timeout`` seconds) is appended to the spool in ``spool_dir`` and delivered in order when JetStream is back, also by a later
    process. `lost` counts the messages that the spool's bound has cost; 0 otherwise.
    """

    def __init__(
        self,
        bus: Bus,
        edge: str,
        spool_dir: str | os.PathLike[str],
        *,
        window: int = 32,
        linger: float = 0.05,
        ack_timeout: float = 5.0,
        spool_limit: int = 64 << 20,
        queue_limit: int = 200_000,
    ) -> None:
        self.bus = bus
        self.edge = edge
        self.window = window
        self.linger = linger
        self.ack_timeout = ack_timeout
        self.acknowledged = 0  # messages
        self.told: Callable[[Sequence[Event]], object] = lambda _: None  # called with those that are acknowledged or in the spool
        self.ensure: Callable[[], Awaitable[object]] | None = None  # makes the stream where it is not there: JetStream's disk may be lost
        self._groups: dict[str, list[Event]] = {}  # messages that are neither, by their id
        self._directory = Path(spool_dir)
        self._spool_limit = spool_limit
        self._queue_limit = queue_limit
        self._queue: deque[Event] = deque()
        self._failed: list[Record] = []
        self._outgoing: deque[Record] = deque()
        self._flights: dict[asyncio.Task[None], Record] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._spool: Spool | None = None
        self._task: asyncio.Task[None] | None = None
        self._dropped = 0
        self._pause = 0.0

    async def start(self) -> Self:
        from dsec.bus.spool import Spool  # nodes publish events; who only reads them has no aiofiles

        self._spool = await Spool.open(self._directory, limit=self._spool_limit)
        self._task = asyncio.get_running_loop().create_task(self._pump())
        return self

    async def close(self, timeout: float = 5.0) -> None:
        """Deliver what can be delivered within ``timeout`` seconds; the rest is in the spool when this returns."""
        task, self._task = self._task, None
        if task is None:
            return
        self._wake.set()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout if self.bus.connected else 0.01)
        except TimeoutError:
            pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left = list(self._flights.values())
        for flight in list(self._flights):
            flight.cancel()
        await asyncio.gather(*self._flights, return_exceptions=True)
        records = [*self._failed, *left, *self._outgoing, *self._take()]
        self._failed = []
        self._outgoing.clear()
        if records:
            await self._store(records)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def post(self, *events: Event) -> None:
        """Queue events; at once. Above the queue's limit (a disk that does not answer) the oldest are dropped and counted in `lost`."""
        self._queue.extend(events)
        while len(self._queue) > self._queue_limit:
            self.told((self._queue.popleft(),))
            self._dropped += 1
        self._idle.clear()
        self._wake.set()

    async def drained(self, timeout: float) -> None:
        """Wait until everything posted is acknowledged by JetStream (tests, orderly stops). Raises TimeoutError."""
        await asyncio.wait_for(self._idle.wait(), timeout)

    @property
    def lost(self) -> int:
        return self._dropped + (self._spool.lost if self._spool is not None else 0)

    @property
    def spooled(self) -> int:
        """Bytes in the spool."""
        return self._spool.size if self._spool is not None else 0

    # ------------------------------------------------------------------ the pump
    async def _pump(self) -> None:
        assert self._spool is not None
        while True:
            if not (self._queue or self._failed or self._spool):
                if not self._flights:
                    self._idle.set()
                await self._wake.wait()
                if self._queue:
                    await asyncio.sleep(self.linger)
            self._wake.clear()
            if self._failed or self._spool or not self.bus.connected:
                try:
                    await self._through_spool()
                except OSError as error:  # a disk that reads or removes nothing now: what was told is told again later
                    log.error("bus.spool_failed", edge=self.edge, error=str(error))
                    await asyncio.sleep(1.0)
            else:
                self._outgoing.extend(self._take())
                while self._outgoing:
                    while len(self._flights) >= self.window:
                        await asyncio.wait(self._flights, return_when=asyncio.FIRST_COMPLETED)
                    self._launch(self._outgoing.popleft())

    def _take(self) -> list[Record]:
        """The queue as messages ready to go."""
        events = list(self._queue)
        self._queue.clear()
        records: list[Record] = []
        for kind, project, group in batches(events):
            records += self._messages(kind, project, group)
        return records

    def _messages(self, kind: str, project: str, group: list[Event]) -> list[Record]:
        data = codec.encode(EventBatch(events=tuple(group)), limit=1 << 30)
        if len(data) > BATCH_BYTES and len(group) > 1:
            half = len(group) // 2
            return self._messages(kind, project, group[:half]) + self._messages(kind, project, group[half:])
        sandboxes = {event.sb for event in group}
        only = next(iter(sandboxes)) if len(sandboxes) == 1 else ""
        ulid = SandboxId.parse(only).ulid if only else ""
        first = group[0]
        id_ = f"{first.sb or first.edge}:{first.incarnation}:{first.n}:{len(group)}" if first.incarnation else new_ulid()
        self._groups[id_] = group
        return [Record(id_, subjects.event(self.bus.unit, kind, first.edge or self.edge, ulid, project or "default"), data)]

    def _launch(self, record: Record) -> None:
        task = asyncio.get_running_loop().create_task(self._fly(record))
        self._flights[task] = record
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        record = self._flights.pop(task, None)
        if not task.cancelled() and task.exception() is not None and record is not None:
            self._failed.append(record)
        self._wake.set()

    async def _fly(self, record: Record) -> None:
        """Deliver one message: acknowledged by the stream, or an error."""
        headers = {"Nats-Msg-Id": record.id}
        try:
            checked(await self.bus.transport.request(record.subject, record.data, timeout=self.ack_timeout, headers=headers))
        except DsecError as error:
            if error.retryable or isinstance(error, Denied | NotFound):
                raise
            # Nothing will ever make it acceptable (too large, bad subject): kept, it would hold up all that come after it.
            self._dropped += 1
            self._safe(record)
            self.bus.events.emit("events_lost", f"{record.subject}: {error}", level="error")
            return
        self._safe(record)
        self.acknowledged += 1

    def _safe(self, record: Record) -> None:
        self.told(self._groups.pop(record.id, ()))

    async def _through_spool(self) -> None:
        """The way during and after an outage: first to disk, then from its head, so that order is kept."""
        assert self._spool is not None
        failed, self._failed = self._failed, []
        fresh = failed + self._take()
        if fresh:
            await self._store(fresh)
        if not self.bus.connected:
            await asyncio.sleep(0.1)
            return
        records = await self._spool.head()
        done = 0
        try:
            for start in range(0, len(records), self.window):
                part = records[start : start + self.window]
                results = await asyncio.gather(*(self._fly(record) for record in part), return_exceptions=True)
                errors = [result for result in results if isinstance(result, BaseException)]
                if errors:
                    raise errors[0]
                done += len(part)
            self._pause = 0.0
        except DsecError as error:
            self._pause = min(2.0, self._pause * 2 or 0.1)
            log.warning("bus.events_wait", edge=self.edge, error=str(error), spooled=self._spool.size)
            if self.ensure is not None:
                with contextlib.suppress(DsecError):
                    await self.ensure()
        finally:
            if done:
                await self._spool.delivered(done)
        if self._pause:
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))

    async def _store(self, records: list[Record]) -> None:
        assert self._spool is not None
        before = self._spool.lost
        try:
            await self._spool.append(records)
            for record in records:
                self._safe(record)
        except OSError as error:  # a full disk: keep them in memory, as many bytes as the spool may have
            self._failed = records + self._failed
            self._let_go()
            log.error("bus.spool_failed", edge=self.edge, error=str(error), messages=len(records))
            await asyncio.sleep(1.0)
        if self._spool.lost > before:
            self.bus.events.emit("events_lost", f"{self._spool.lost} messages dropped by the spool's bound", level="error")

    def _let_go(self) -> None:
        """Of what neither the stream nor the disk takes, the oldest go beyond the bound."""
        over = sum(len(record.data) for record in self._failed) - self._spool_limit
        count = 0
        while over > 0:
            over -= len(self._failed[count].data)
            self._safe(self._failed[count])
            count += 1
        if count:
            del self._failed[:count]
            self._dropped += count
            self.bus.events.emit("events_lost", f"{count} messages dropped: neither JetStream nor the disk takes them", level="error")


# ------------------------------------------------------------------ reading
def start_time(since: str | float) -> float:
    """``"-10m"`` (s, m, h, d before now) or Unix seconds. Raises `InvalidRequest`."""
    if isinstance(since, int | float):
        return float(since)
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    try:
        return time.time() - float(since[1:-1]) * units[since[-1]] if since.startswith("-") else float(since)
    except (ValueError, KeyError, IndexError):
        raise InvalidRequest("not a time", field="since", value=since, fix="use -30s, -10m, -2h, -1d, all, or Unix seconds") from None


# Kinds of events (docs/events.md); one that nobody sends would be waited for without end.
KINDS = (
    *("created", "running", "paused", "resumed", "packed", "checkpointed", "stopped", "step", "node_up", "node_lost"),
    *("image_pulling", "image_pulled", "image_shared", "image_failed", "layer_trouble", "layer_whole"),
)


def known_kinds(kinds: Iterable[str]) -> frozenset[str]:
    """Raises `InvalidRequest` that names the kind which does not exist, and the one that was probably meant."""
    if isinstance(kinds, str):
        kinds = (kinds,)
    chosen = frozenset(kinds)
    for kind in sorted(chosen.difference(KINDS), key=str):
        near = difflib.get_close_matches(str(kind), KINDS, 1)
        fix = f"did you mean {near[0]!r}?" if near else f"use {', '.join(KINDS)}"
        raise InvalidRequest("no such kind of event", field="kinds", value=kind, fix=fix)
    return chosen


class EventReader:
    """``async with EventReader(bus, kinds=("stopped",), since="-10m") as reader: async for event in reader: …``

    From entering on no event is missed, through reconnections too; each comes once. Order is that of the stream, within one
    sandbox that of (incarnation, n).

    Args:
        labels: all of them must be on the event.
        kinds, sandboxes: any of these; empty = all.
        project: this project and those below it; "" = all.
        since: None = from now on; ``"all"``; or see `start_time`.
        follow: False ends after the events that exist now.

    Raises `InvalidRequest` for a kind that does not exist.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        labels: Mapping[str, str] | None = None,
        kinds: Iterable[str] = (),
        sandboxes: Iterable[str] = (),
        project: str = "",
        since: str | float | None = None,
        follow: bool = True,
        stream: str = EVENTS_STREAM,
    ) -> None:
        self.bus = bus
        self.labels = dict(labels or {})
        self.kinds = known_kinds(kinds)
        self.sandboxes = frozenset(sandboxes)
        self.project = project
        self.follow = follow
        self.stream = stream
        self._since = since
        self._sequence: int | None = None  # of the stream: the last one seen, or the one to begin after
        self._pending: int | None = None
        self._ordered = 0
        self._consumer = ""
        self._ready: deque[Event] = deque()
        self._seen: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._inbox: asyncio.Queue[Msg] = asyncio.Queue()
        self._subscription: Any = None
        self._reply = ""

    async def __aenter__(self) -> Self:
        self._reply = self.bus.new_inbox()
        self._subscription = await self.bus.subscribe_raw(self._reply, self._inbox.put_nowait)
        try:
            await self._begin()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()
        consumer, self._consumer = self._consumer, ""
        if consumer and self.bus.connected:
            try:
                await ask(self.bus, f"CONSUMER.DELETE.{self.stream}.{consumer}", timeout=1.0)
            except DsecError as error:  # it ends by itself after its inactivity threshold
                log.debug("bus.consumer_left", consumer=consumer, error=str(error))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._subscription is None:
            raise InvalidRequest("this reader is not open", fix="use `async with EventReader(…) as reader`")
        while not self._ready:
            if not self.follow and self._pending == 0:
                raise StopAsyncIteration
            try:
                await self._pull()
            except (Unavailable, NotFound, TimeoutError) as error:
                log.info("bus.events_resume", after=self._sequence, error=str(error) or type(error).__name__)
                await self._recover()
        return self._ready.popleft()

    # ------------------------------------------------------------------ the consumer
    async def _begin(self) -> None:
        for _ in range(TRIES - 1):
            with contextlib.suppress(DeadlineExceeded):
                await self._create()
                return
        await self._create()

    async def _create(self) -> None:
        unit, project = self.bus.unit, subjects.project_tokens(self.project)
        bases = [f"{subjects.ROOT}.{unit}.evt.{kind}.*.*" for kind in sorted(self.kinds) or ["*"]]
        tails = [f".{project}", f".{project}.>"] if project else [".>"]
        config: dict[str, Any] = {
            "name": f"dsec-{new_ulid()}",
            "ack_policy": "none",
            "filter_subjects": [base + tail for base in bases for tail in tails],
            "inactive_threshold": 60_000_000_000,
            "max_deliver": -1,
            "mem_storage": True,
            "num_replicas": 1,
        }
        if self._sequence is not None:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._sequence + 1}
        elif self._since is None:
            config["deliver_policy"] = "new"
        elif self._since == "all":
            config["deliver_policy"] = "all"
        else:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start_time(self._since)))
            config |= {"deliver_policy": "by_start_time", "opt_start_time": stamp}
        name = config["name"]
        order = {"stream_name": self.stream, "config": config}
        answer = await ask(self.bus, f"CONSUMER.CREATE.{self.stream}.{name}", order, timeout=ANSWER_S)
        self._consumer = name
        self._pending = int(answer.get("num_pending", 0))
        if self._since is None and self._sequence is None:
            # From here on "new" is a number, so that nothing is missed when the consumer has to be made again.
            self._sequence = int((answer.get("delivered") or {}).get("stream_seq", 0))

    async def _recover(self) -> None:
        wait = 0.1
        while True:
            await asyncio.sleep(random.uniform(0, wait))
            wait = min(2.0, wait * 2)
            try:
                await self.bus.transport.wait_connected(60.0)
                while not self._inbox.empty():
                    self._inbox.get_nowait()
                self._ordered = 0
                await self._create()
            except (Unavailable, TimeoutError):
                continue
            return

    async def _pull(self) -> None:
        """Take one message; ask for 256 more when none are on order. Raises TimeoutError or `NotFound` when the consumer is gone."""
        if self._ordered == 0:
            body = b'{"batch":256,"expires":5000000000,"idle_heartbeat":1000000000}'
            self.bus.transport.post(f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self._consumer}", body, reply=self._reply)
            self._ordered = 256
        # A heartbeat comes each second: silence of three means that the consumer or the server is gone.
        msg = await asyncio.wait_for(self._inbox.get(), 3.0)
        status = msg.status
        if status == "100":
            return
        if status in {"404", "408"}:
            self._ordered = 0
        elif status:
            raise NotFound(f"consumer ended: {status} {msg.headers.get('Description', '')}")
        else:
            self._ordered -= 1
            self._take(msg)

    def _take(self, msg: Msg) -> None:
        tokens = msg.reply.split(".")  # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
        sequence = int(tokens[-4])
        if self._sequence is not None and sequence <= self._sequence:  # left over from a consumer before this one
            return
        self._sequence = sequence
        self._pending = int(tokens[-1])
        try:
            batch = codec.decode(msg.data, EventBatch)
        except InvalidRequest as error:
            self.bus.events.emit("error", f"{msg.subject}: {error}")
            return
        for event in batch.events:
            if self._wanted(event):
                self._ready.append(event)

    def _wanted(self, event: Event) -> bool:
        key = (event.sb or event.edge, event.incarnation, event.n)
        if event.incarnation:
            if key in self._seen:
                return False
            self._seen[key] = None
            if len(self._seen) > 100_000:
                self._seen.popitem(last=False)
        return (
            (not self.kinds or event.kind in self.kinds)
            and (not self.sandboxes or event.sb in self.sandboxes)
            and all(event.labels.get(name) == value for name, value in self.labels.items())
        )


async def events(bus: Bus, **filters: Any) -> AsyncIterator[Event]:
    """`EventReader` as a plain async generator; it begins (``since=None``: from now on) at the first step."""
    async with EventReader(bus, **filters) as reader:
        async for event in reader:
            yield event
