"""The Edge: owns the sandboxes of one node. Admits, records, launches, watches clocks and leases, adopts after a restart.

Order of a create: admission by the ledger; the launch, with a cap on how many start at once, while the record goes to disk; once that
is there the answer to the Scheduler and, when the sandbox's agent answers, the news to the caller. Requests for one sandbox are in
dsec/actors/verbs.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import operator
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import structlog

from dsec import faults
from dsec.actors import capacity, leases
from dsec.actors.adopting import Adoption
from dsec.actors.checkpoints import Checkpoints
from dsec.actors.commands import Commands
from dsec.actors.drain import Drain
from dsec.actors.fence import Fences
from dsec.actors.host import Host
from dsec.actors.intake import Intake, demand_of
from dsec.actors.lifecycle import On, Story
from dsec.actors.news import Reporter
from dsec.actors.outbox import EventSink, Outbox
from dsec.actors.sandbox import Sandbox
from dsec.actors.standing import LOST, Standing
from dsec.actors.store import Record, Store, Told
from dsec.actors.workers import Workers
from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import Failed, Heartbeat, NodeLoad, ReadyItem
from dsec.bus.subjects import user_of
from dsec.config import EdgeConfig
from dsec.errors import Busy, DeadlineExceeded, DsecError, NodeError, SandboxGone
from dsec.model import Exit, ExitReason, State

log = structlog.get_logger("dsec.edge")
BUS_PATIENCE = 2.0  # seconds within which a bus answers that is there
LAG_PERIOD = 0.1  # seconds between two looks at how late the loop is
_STATE = operator.attrgetter("life.state")


class Edge:
    """``await start()`` adopts and begins to heartbeat; dsec/actors/verbs.py serves it; ``await stop()`` ends it."""

    def __init__(
        self,
        control: Bus,
        bulk: Bus,
        config: EdgeConfig,
        name: str,
        store: Store,
        host: Host,
        limits: capacity.Limits,
        events: EventSink,
        fences: Fences | None = None,
        trust: float = 15.0,
    ) -> None:
        """``fences`` None: no Watcher can declare this node lost. ``trust``: seconds without touch after which one may have."""
        self.bus, self.bulk, self.config, self.name, self.store, self.host, self.events = control, bulk, config, name, store, host, events
        self.pausing = host.config.pause
        self.ledger = capacity.Ledger(limits)
        self.leases = leases.Leases(config.unclaimed_ms / 1000)
        self.reporter = Reporter(control, name, config.coalesce_ms / 1000)
        self.sandboxes: dict[str, Sandbox] = {}  # live ones by ulid
        self.ended: OrderedDict[str, tuple[Record, Story]] = OrderedDict()  # oldest end first
        self.requests: dict[tuple[str, str, str, int], str] = {}  # (principal, project, burst, index) -> ulid
        self.owners: Counter[str] = Counter()  # live sandboxes by user (`user_of`): a job's are its user's
        self.stood_on: dict[str, int] = {}  # live sandboxes by layer
        self.alone: Counter[str] = Counter()  # of those, the ones with isolation="user"
        self.drain = Drain(self)
        self.adopting = True
        self.stopping = self.over = False
        self.intake = Intake(self)
        self.outbox = Outbox(name, store, events)
        self.commands = Commands(store, self.outbox, self.spawn, self.sandboxes.__contains__)
        self.checkpoints = Checkpoints(self)
        self.workers = Workers(self)
        self.standing = Standing(self, fences, trust)
        self.reporter.in_doubt = self.standing.in_doubt
        self._mute = False  # the bus does not answer, though it seems connected
        host.layer_told = self.layer_news
        host.upcoming = self.intake.slots.upcoming
        if host.puller is not None:
            host.puller.told = self.image_news
        self._clock: list[tuple[float, str]] = []
        self._retention = config.stopped_retention_ms / 1000
        self._forgetting: deque[tuple[float, str]] = deque()  # when each that has ended is forgotten, monotonic
        self.room: deque[asyncio.Future[None]] = deque()  # resumes that wait for capacity
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beats = 0
        self._lag = 0.0
        self.lags: deque[float] = deque(maxlen=6_000)  # seconds; read by benchmarks

    # ------------------------------------------------------------------ start
    async def start(self, records: Iterable[Record], fenced: bool = False, *, rebooted: bool = False) -> None:
        """Take up what the records name. ``fenced``: this node was declared lost, so nothing is adopted, all is freed. ``rebooted``: the
        machine went down, and all with it."""
        self.bus.events.listeners.append(self._on_bus)
        self.spawn(self._beat())
        self.spawn(self._measure_lag())
        await self.outbox.recover()
        lost = LOST if fenced else Exit(reason=ExitReason.NODE_LOST, detail="its machine went down") if rebooted else None
        await Adoption(self).run(list(records), lost)
        if rebooted:
            await self.store.settle()
        await self.commands.recover(self.sandboxes.get)
        await self.checkpoints.recover()
        faults.reached("adopt.recovered")
        self.drain.take_up()
        self.adopting = False
        self.spawn(self._sweep())
        self.beat()

    # ------------------------------------------------------------------ what sandboxes tell (the Keeper protocol)
    def ready(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self.commands.created(record.ulid)
        inbox = self.intake.inboxes.pop(record.ulid, "")
        if inbox:
            item = ReadyItem(index=record.index, ulid=record.ulid, layers=record.layers, degraded=record.degraded)
            self.reporter.ready(record.burst, inbox, item)
        self.changed(sandbox, "running")

    def failed(self, sandbox: Sandbox) -> None:
        record, how = sandbox.record, sandbox.life.exit
        inbox = self.intake.inboxes.pop(record.ulid, "")
        if inbox:
            self.reporter.failed(record.burst, inbox, Failed(index=record.index, ulid=record.ulid, error=_failure(sandbox, how).body()))
        self.stopped(sandbox)

    def stopped(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self.intake.inboxes.pop(record.ulid, None)
        self.leases.remove(record.ulid)
        self.commands.left(record.ulid)
        self.workers.stopped(sandbox)
        if self.leave(sandbox):
            self.intake.slots.give_back(sandbox.slot)
            if sandbox.unrecorded:
                return
            self.ended[record.ulid] = (record, sandbox.story)
            self.forget_later(record.ulid)
        self.changed(sandbox, "stopped", sandbox.ending())

    def word(self, sandbox: Sandbox, kind: str, detail: dict[str, object] | None = None) -> list[Told]:
        self._tell(sandbox)
        event = sandbox.telling = self.outbox.make(kind, sandbox.record, detail)
        return [self.outbox.row(event)]

    def unsay(self, sandbox: Sandbox) -> None:
        event, sandbox.telling = sandbox.telling, None
        if event is not None:
            self.outbox.drop(event)

    def _tell(self, sandbox: Sandbox) -> str:
        """Tell what is on disk already; its kind, "" when there is nothing."""
        event, sandbox.telling = sandbox.telling, None
        if event is None:
            return ""
        self.outbox.send(event)
        return event.kind

    def changed(self, sandbox: Sandbox, kind: str, detail: dict[str, object] | None = None) -> None:
        if self._tell(sandbox) == kind:
            return
        event = self.outbox.make(kind, sandbox.record, detail)
        self.outbox.send_once(self.store.post(sandbox.write(), [self.outbox.row(event)]), event)

    def layer_news(self, news: dict[str, Any]) -> None:
        """Parts of a layer could not be had, so who read them got EIO; or all of it is here now."""
        if news["what"] == "trouble":
            self.outbox.emit("layer_trouble", detail={"layer": news["name"], "error": news["text"]})
        elif news["what"] == "whole":
            self.outbox.emit("layer_whole", detail={"layer": news["name"]})

    def image_news(self, what: str, image: str, detail: str) -> None:
        """An image is being pulled for a sandbox, is here, or cannot be had."""
        if what == "image_pulling":
            self.outbox.emit("image_pulling", detail={"image": image})
        elif what == "image_pulled":
            self.outbox.emit("image_pulled", detail={"image": image, "layer": detail})
        elif what == "image_shared":
            self.outbox.emit("image_shared", detail={"image": image, "layer": detail})
        else:
            self.outbox.emit("image_failed", detail={"image": image, "error": detail})

    async def opened(self, sandbox: Sandbox) -> None:
        await self.workers.opened(sandbox)

    def release(self, sandbox: Sandbox) -> None:
        if self.ledger.release(sandbox.record.ulid):
            for waiter in self.room:
                if not waiter.done():
                    waiter.set_result(None)
                    break

    async def reserve(self, sandbox: Sandbox, deadline: float | None) -> None:
        want = demand_of(sandbox.plan)
        if not self.room and not self.ledger.reserve(sandbox.record.ulid, want):
            return
        loop = asyncio.get_running_loop()
        limit = deadline if deadline is not None else loop.time() + 30.0
        turn: asyncio.Future[None] = loop.create_future()
        self.room.append(turn)
        try:
            while True:
                refused_by = self.ledger.reserve(sandbox.record.ulid, want) if self.room[0] is turn else "resuming"
                if not refused_by:
                    return
                try:
                    async with asyncio.timeout_at(limit):
                        await turn
                except TimeoutError:
                    raise Busy(
                        f"no room to resume: {self.ledger.explain(refused_by, want)}", sandbox=sandbox.id, reason=refused_by
                    ) from None
                self.room.remove(turn)
                turn = loop.create_future()
                self.room.appendleft(turn)
        finally:
            self.room.remove(turn)
            if self.room and not self.room[0].done():
                self.room[0].set_result(None)

    def watch(self, sandbox: Sandbox) -> None:
        when = sandbox.deadline if sandbox.state is State.PENDING else sandbox.clocks.next(sandbox.state)
        if when:
            heapq.heappush(self._clock, (when, sandbox.record.ulid))

    def spawn(self, coroutine: object) -> asyncio.Task[Any]:
        assert isinstance(coroutine, Coroutine)
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("edge.task_failed", error=repr(error), exc_info=error)

    # ------------------------------------------------------------------ the one sweep
    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_ms / 1000)
            now = time.monotonic()
            self._look_at_clocks(now)
            lapsed, orphans = self.leases.expired(now) if await self._may_lapse(now) else ((), ())
            for ulid in lapsed:
                if (sandbox := self.sandboxes.get(ulid)) is not None:
                    self.spawn(sandbox.on_lease())
            for ulid in orphans:
                if (sandbox := self.sandboxes.get(ulid)) is not None:
                    sandbox.feed(On.LEASE, Exit(reason=ExitReason.LEASE, detail="no lease ever named it"))
            await self.commands.flush()
            self.outbox.sweep()
            self.checkpoints.sweep_soon()
            self.workers.sweep()
            await self._forget_ended(now)

    async def _may_lapse(self, now: float) -> bool:
        """A lease lapses only where its renewal would have come in: the bus answers, and what it had for us before has been read."""
        if not self.bus.connected or not (self._mute or self.leases.due(now)):
            return True  # while the bus is away the clocks stand still
        try:
            await self.bus.flush(BUS_PATIENCE)
        except DsecError as error:
            log.warning("edge.bus_mute", error=str(error), text="no lease lapses meanwhile")
            self._mute = True
            self.leases.away(now)
            return False
        if self._mute:
            self._mute = False
            self.leases.back(time.monotonic())
            self.workers.back()
        return True

    def _look_at_clocks(self, now: float) -> None:
        again = []
        while self._clock and self._clock[0][0] <= now:
            _, ulid = heapq.heappop(self._clock)
            sandbox = self.sandboxes.get(ulid)
            if sandbox is None:
                continue
            if sandbox.state is State.PENDING:
                if sandbox.deadline and now >= sandbox.deadline:
                    sandbox.feed(On.DEADLINE, detail="not started within the create's deadline")
                continue
            event = sandbox.clocks.due(sandbox.state, now)
            if event is not None:
                self.spawn(sandbox.on_clock(event))
            else:
                again.append(sandbox)
        for sandbox in again:
            when = sandbox.clocks.next(sandbox.state)
            if when:
                # Busy ones are overdue and not due: looked at again in the next sweep, not in this one.
                heapq.heappush(self._clock, (max(when, now + 0.001), sandbox.record.ulid))

    def forget_later(self, ulid: str, age: float = 0.0) -> None:
        """One that ended ``age`` seconds ago, by a clock that may have been set since, is remembered as long as is configured."""
        self._forgetting.append((time.monotonic() + self._retention - min(max(0.0, age), self._retention), ulid))

    async def prune(self, ulids: Sequence[str]) -> None:
        """Forget these ended sandboxes. Raises `NodeError` when their records could not be removed; then they are still known."""
        await self.store.prune(ulids)
        for ulid in ulids:
            self.commands.forgotten(ulid)
            if (known := self.ended.pop(ulid, None)) is not None:
                record = known[0]
                self.requests.pop((record.principal, record.project, record.burst, record.index), None)

    async def _forget_ended(self, now: float) -> None:
        old: list[str] = []
        while self._forgetting and self._forgetting[0][0] <= now:
            old.append(self._forgetting.popleft()[1])
        try:
            if old:
                await self.prune([ulid for ulid in old if ulid in self.ended])
        except NodeError as error:
            log.error("edge.forget_failed", error=str(error))
            self._forgetting.extendleft((now, ulid) for ulid in old)

    def _on_bus(self, what: str, _detail: str) -> None:
        if what == "disconnected":
            self.leases.away(time.monotonic())
        elif what == "reconnected":
            self.leases.back(time.monotonic())
            self.beat()

    # ------------------------------------------------------------------ heartbeats
    def load(self) -> NodeLoad:
        return self.ledger.load(self.intake.starting + len(self.intake.queue))

    def enter(self, sandbox: Sandbox) -> None:
        """It lives here from now on, and its layers stay."""
        if (planner := self.host.planners.get(sandbox.record.spec.backend)) is not None:
            planner.hold(sandbox.record.layers)
        self.sandboxes[sandbox.record.ulid] = sandbox
        user = user_of(sandbox.record.principal)
        self.owners[user] += 1
        if sandbox.record.spec.isolation == "user":
            self.alone[user] += 1
        self.workers.enter(sandbox)
        for layer in sandbox.record.layers:
            self.stood_on[layer.digest] = self.stood_on.get(layer.digest, 0) + 1

    def leave(self, sandbox: Sandbox) -> bool:
        """It lives here no more; False when it did not."""
        if self.sandboxes.pop(sandbox.record.ulid, None) is None:
            return False
        self.ledger.free_disk(sandbox.record.ulid)
        if (planner := self.host.planners.get(sandbox.record.spec.backend)) is not None:
            planner.let_go(sandbox.record.layers)
        user = user_of(sandbox.record.principal)
        self.owners -= Counter((user,))
        if sandbox.record.spec.isolation == "user":
            self.alone -= Counter((user,))
        self.workers.leave(sandbox)
        for layer in sandbox.record.layers:
            self.stood_on[layer.digest] -= 1
            if not self.stood_on[layer.digest]:
                del self.stood_on[layer.digest]
        return True

    def exclusive(self) -> str:
        """The user who has this node for itself."""
        return next(iter(self.alone), "")

    def heartbeat(self, *, leaving: bool = False) -> Heartbeat:
        self._beats += 1
        lag, self._lag = self._lag, 0.0
        return Heartbeat(
            edge=self.name,
            incarnation=self.store.incarnation,
            n=self._beats,
            arch=next(iter(self.host.planners.values())).node.arch,
            backends=tuple(self.host.planners),
            drivers=self.host.drivers,
            pools=self.host.pools,
            devices=self.config.devices,
            labels=self.config.labels,
            load=self.load(),
            states={str(state): count for state, count in Counter(map(_STATE, self.sandboxes.values())).items()},
            principals=dict(self.owners),
            exclusive=self.exclusive(),
            draining=bool(self.drain.mode) or self.adopting or self.stopping or self.standing.in_doubt(),
            layers=len(self.stood_on),
            loop_lag_ms=round(lag * 1000, 3),
            leaving=leaving,
            tmpfs_upper=self.host.tmpfs_upper,
        )

    def beat(self, *, leaving: bool = False) -> None:
        try:
            self.bus.post(subjects.heartbeat(self.bus.unit, self.name), self.heartbeat(leaving=leaving))
        except DsecError as error:
            log.warning("edge.heartbeat_lost", error=str(error))

    async def _beat(self) -> None:
        while True:
            if self.bus.connected:  # beats of an outage are worth nothing: none is kept for later
                self.beat()
            await asyncio.sleep(self.config.heartbeat_ms / 1000)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            late = max(0.0, loop.time() - due)
            self.lags.append(late)
            self._lag = max(self._lag, late)

    # ------------------------------------------------------------------ stop
    async def stop_all(self, how: Exit, *, parallel: int = 0) -> None:
        """Stop every sandbox; returns when all are gone."""
        gate = asyncio.Semaphore(parallel or self.config.stop_parallel)

        async def one(sandbox: Sandbox) -> None:
            async with gate:
                with contextlib.suppress(DeadlineExceeded):
                    await sandbox.stop(0.0, how, asyncio.get_running_loop().time() + 30.0)

        for sandbox in self.intake.queue:
            if sandbox.state is State.PENDING:
                sandbox.feed(On.STOP, how)
        await asyncio.gather(*(one(sandbox) for sandbox in list(self.sandboxes.values())))

    async def stop(self) -> None:
        """End in order: with on_shutdown = "stop" every sandbox is stopped first, else they live on and the next start adopts them."""
        self.stopping = True
        if self.config.on_shutdown == "stop":
            await self.stop_all(Exit(reason=ExitReason.DRAINED, detail="the Edge was stopped"))
        nothing_lives = not self.sandboxes
        if nothing_lives:
            await self.checkpoints.sweep(last=True)
        self.reporter.flush()
        self.beat(leaving=nothing_lives)
        self.over = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.host.close(nothing_lives=nothing_lives)
        await self.commands.flush()
        await self.outbox.close()
        await self.store.close()


def _failure(sandbox: Sandbox, how: Exit | None) -> DsecError:
    """Why a create failed, as its caller hears it."""
    if sandbox.launch_error is not None:
        error = sandbox.launch_error
        error.sandbox = error.sandbox or sandbox.id
        return error
    reason, detail = (how.reason, how.detail) if how is not None else (ExitReason.BROKEN, "")
    if reason is ExitReason.DEADLINE:
        return DeadlineExceeded(detail or "not ready within the create's deadline", sandbox=sandbox.id, reason="create")
    if reason is ExitReason.LAUNCH_FAILED:
        return NodeError(detail or "the launch failed", sandbox=sandbox.id, reason=str(reason))
    return SandboxGone(f"ended before it was ready ({reason}): {detail}", sandbox=sandbox.id, reason=str(reason))
