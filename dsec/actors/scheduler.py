"""The Scheduler: takes bursts, places them, hands batches to Edges. Stateless: several share one queue group, none holds anything durable.

A request is acknowledged at once; all else reaches the caller's inbox, from the Edges (accepted, ready, failed) or from here (what was
not placed). What a Scheduler remembers of a burst only serves repeats; a client whose Scheduler died repeats the slice under the same id.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Iterable, Sequence

import msgspec
import structlog

from dsec import faults
from dsec.actors import burst as bursts
from dsec.actors.burst import Batch, Slice
from dsec.actors.placement import CAPACITY, Picture, Requirement, requirement
from dsec.bus import codec, subjects
from dsec.bus.actor import Context, Route, Verb
from dsec.bus.bus import Bus
from dsec.bus.call import Asked
from dsec.bus.incarnations import Incarnations
from dsec.bus.messages import (
    BurstNews,
    ClusterView,
    CreateAck,
    CreateEnvelope,
    CreateRequest,
    Empty,
    Failed,
    Heartbeat,
    LaunchEnvelope,
    LaunchReply,
)
from dsec.bus.subjects import Caller
from dsec.bus.transport import Msg
from dsec.config import SchedulerConfig
from dsec.errors import Busy, Conflict, DeadlineExceeded, DsecError, InvalidRequest, NodeError, Unavailable
from dsec.model import SandboxSpec, new_ulid

log = structlog.get_logger("dsec.scheduler")
_spec = msgspec.msgpack.Decoder(SandboxSpec)
COMMON_BYTES = 4096  # of a spec that may be one of many alike, whose needs are remembered
SPEC_BYTES = 400_000  # of one spec: an answer that repeats parts of it still fits one message
FEW, LATE = 16, 0.02  # so many sandboxes are acknowledged so late, in seconds: nobody waits for it, and whoever hears it on a machine that
# launches them takes a core from that
MOST_TASKS = 10_000  # batches on their way to Edges, above which no more is taken on; each takes some 6 KiB
FAILED_AT_ONCE = 1_000  # failures in one message: with their texts they stay far below the server's limit
REPEATS = 64  # batches of one repeat that are asked for at once
REPEAT = 9.0  # seconds in which an Edge must be there to tell once more what it holds: callers repeat every ten
TELL_AFTER, TELL_EVERY = 1.0, 5.0  # seconds without room after which a caller hears why, and hears it again


class Scheduler:
    """One instance. ``await start()``, then it works until ``await stop()``."""

    def __init__(self, bus: Bus, config: SchedulerConfig, rng: random.Random | None = None) -> None:
        self.bus = bus
        self.config = config
        self.name = config.name or f"scheduler-{new_ulid()[-8:]}"
        self.picture = Picture(config.power_of_k, rng)
        self._rng = rng or random.Random()
        self._slices: dict[tuple[str, str, str, int], Slice] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wakes: dict[Slice, asyncio.Event] = {}
        self._heard: dict[str, float] = {}
        self._lost: frozenset[str] = frozenset()
        self._expected: tuple[str, ...] = ()  # nodes that are there by their records, and have not been heard yet
        self._incarnations = Incarnations()
        self._sweeper: asyncio.Task[None] | None = None
        self._pending = 0  # bytes of slices that are not settled, about

    async def start(self) -> None:
        await self.bus.subscribe(subjects.heartbeat_all(self.bus.unit), Heartbeat, self._on_beat)
        await self.bus.subscribe(subjects.view(self.bus.unit), ClusterView, self._on_view)
        try:
            caller = Caller("scheduler", "default")
            self._on_view(await self.bus.call(subjects.api(self.bus.unit, "view", caller), Empty(), ClusterView, timeout=1.0), None)
        except (Unavailable, DeadlineExceeded):
            log.info("scheduler.no_watcher")  # heartbeats alone will do
        create = Verb(name="create", request=CreateEnvelope, reply=CreateAck, handler=self._create)
        await self.bus.serve(
            "dsec-scheduler",
            Route(
                subject=subjects.api_all(self.bus.unit, "create"),
                verbs=(create,),
                verb_of=lambda subject: subject.split(".")[4],
                caller_of=subjects.api_caller,
                queue="schedulers",
            ),
            description="places bursts of sandboxes on Edges",
            metadata={"instance": self.name},
        )
        self._sweeper = asyncio.create_task(self._sweep())
        log.info("scheduler.ready", name=self.name, nodes=len(self.picture))

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ the picture
    def _on_beat(self, beat: Heartbeat, _msg: Msg) -> None:
        if beat.leaving:
            self._heard.pop(beat.edge, None)
            self._drop_silent()
            return
        self._heard[beat.edge] = asyncio.get_running_loop().time()
        self._incarnations.hear(beat.edge, beat.incarnation)
        self.picture.see((beat,), only=False)

    def _on_view(self, view: ClusterView, _msg: Msg | None) -> None:
        now = asyncio.get_running_loop().time()
        lost, self._expected = frozenset(view.lost), view.expected
        for beat in view.nodes:
            self._incarnations.hear(beat.edge, beat.incarnation)
            heard = now - view.ages_ms.get(beat.edge, 0) / 1000
            self._heard[beat.edge] = max(heard, self._heard.get(beat.edge, 0.0))
        for edge in lost - self._lost:
            self._heard.pop(edge, None)
        newly_lost, self._lost = lost - self._lost, lost
        self.picture.see(view.nodes, only=False)
        self._drop_silent()
        if newly_lost:
            for wake in self._wakes.values():
                wake.set()

    def _drop_silent(self) -> None:
        horizon = asyncio.get_running_loop().time() - self.config.view_max_age_ms / 1000
        self._heard = {edge: at for edge, at in self._heard.items() if at >= horizon}
        self.picture.keep(self._heard)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            self._drop_silent()
            self._forget(loop.time() - self.config.remember_ms / 1000)

    def _forget(self, horizon: float) -> None:
        """Let go of settled slices whose deadline was before ``horizon``, and of the oldest ones beyond the memory for them. A repeat of
        what is forgotten is placed anew, and its caller keeps the first answer."""
        size = sum(s.size for s in self._slices.values())
        for key, s in list(self._slices.items()):  # oldest first
            if s.settled and (s.deadline < horizon or size > self.config.remember_bytes):
                del self._slices[key]
                size -= s.size

    # ------------------------------------------------------------------ create
    async def _create(self, context: Context, request: CreateEnvelope) -> CreateAck:
        """Checks, remembers, places, acknowledges: what goes to Edges is on its way before that. Raises what is wrong with the request as
        a whole."""
        caller = context.caller
        assert caller is not None
        if context.json:
            request = _from_json(context.msg.data)
        if not subjects.is_reply(request.inbox):
            raise InvalidRequest("not a subject for news", field="inbox", value=request.inbox[:200], fix="use an inbox of your connection")
        if request.deadline_ms <= 0:
            raise DeadlineExceeded("the deadline had passed on arrival", field="deadline_ms", value=request.deadline_ms)
        count = bursts.check_items(len(request.specs), request.items)
        key = (caller.principal, caller.project, request.burst, request.slice)
        known = self._slices.get(key)
        if known is not None:
            if not known.is_same(request.specs, request.items):
                raise Conflict("this id was used for another slice", field="burst", value=request.burst, reason="request_id_conflict")
            known.inbox = request.inbox
            if known.settled:
                self._spawn(self._again(known))
            else:
                known.repeated = True
            return CreateAck(scheduler=self.name, known=True)
        if self._pending > self.config.pending_bytes or len(self._tasks) > MOST_TASKS:
            # What waits longer than its deadline is placed for nobody: better to say so while the caller can wait or go elsewhere.
            raise Busy("more is asked for than can be placed just now", reason="scheduler")
        loop = asyncio.get_running_loop()
        taken = self._slices[key] = Slice(
            request.burst,
            request.slice,
            principal=caller.principal,
            project=caller.project,
            specs=request.specs,
            needs=_needs(request.specs),
            items=request.items,
            inbox=request.inbox,
            # A little early, so that the reason reaches the caller before its own clock ends the wait.
            deadline=loop.time() + request.deadline_ms / 1000 - min(0.25, request.deadline_ms / 10_000),
            lease=request.lease,
        )
        taken.tell_at = loop.time() + TELL_AFTER
        faults.reached("create.asked")
        self._pending += taken.size
        wake = self._wakes[taken] = asyncio.Event()
        self._spawn(self._drive(taken, wake))
        self._place(taken, wake)
        if count <= FEW:
            await asyncio.sleep(LATE)
        return CreateAck(scheduler=self.name)

    def _spawn(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("scheduler.task_failed", error=repr(error), exc_info=error)

    async def _drive(self, s: Slice, wake: asyncio.Event) -> None:
        """Place again what waits, until all of the slice, which was placed once, is accepted or has failed."""
        loop = asyncio.get_running_loop()
        try:
            while not s.settled:
                left = s.deadline - loop.time()
                if left <= 0:
                    self._tell_failed(s, s.expire())
                    return
                if s.waiting:
                    self._tell_waiting(s)
                    pause = bursts.pause_before(s.attempt, self.config.retry_ms / 1000, self.config.retry_max_ms / 1000, self._rng)
                    s.attempt += 1
                    await asyncio.sleep(min(pause, left))
                else:
                    try:
                        async with asyncio.timeout(left):
                            await wake.wait()
                    except TimeoutError:
                        continue
                    if s.waiting:  # refused: a moment, so that what was refused elsewhere in this round is placed with it
                        pause = bursts.pause_before(s.attempt, self.config.retry_ms / 1000, self.config.retry_max_ms / 1000, self._rng)
                        s.attempt += 1
                        await asyncio.sleep(max(0.0, min(pause, s.deadline - loop.time())) if s.attempt > 1 else 0)
                wake.clear()
                if s.waiting and loop.time() < s.deadline:
                    self._place(s, wake)
            if s.repeated:  # who asked anew may have missed what was told meanwhile
                self._spawn(self._again(s))
        finally:
            self._pending -= s.size
            del self._wakes[s]

    def _place(self, s: Slice, wake: asyncio.Event) -> None:
        for without, items in s.groups().items():
            chosen, unplaced = self.picture.place(s.needs, items, subjects.user_of(s.principal), without)
            if unplaced:
                if self._expected:  # one of them may be what is asked for
                    unplaced = [msgspec.structs.replace(row, final=False) for row in unplaced]
                self._tell_failed(s, s.unplaced(unplaced))
            size = self.config.slice_bytes
            todo = [batch for edge, pairs in chosen.items() for batch in bursts.batches(edge, pairs, s.specs, size)]
            for batch in todo:
                s.sent(batch)
                # One alone leaves at once; of many each has a turn of the loop for itself.
                self._spawn(self._launch(s, batch, wake, self._ask(s, batch) if len(todo) == 1 else None))

    def _ask(self, s: Slice, batch: Batch) -> Asked[LaunchReply] | None:
        """The first attempt, on its way; None where it cannot be sent now."""
        if batch.edge in self._lost:
            return None
        left = s.deadline - asyncio.get_running_loop().time()
        timeout = min(left, self.config.launch_timeout_ms / 1000)
        subject = subjects.edge(self.bus.unit, batch.edge, "launch")
        try:
            return Asked(self.bus.transport, subject, _launch_request(s, batch, left), LaunchReply, timeout=timeout)
        except DsecError:
            return None

    async def _launch(self, s: Slice, batch: Batch, wake: asyncio.Event, asked: Asked[LaunchReply] | None) -> None:
        """Hand one batch to its Edge, and ask the same Edge again for as long as its answer is unknown. ``asked``: the first attempt."""
        loop = asyncio.get_running_loop()
        subject = subjects.edge(self.bus.unit, batch.edge, "launch")
        try:
            while (left := s.deadline - loop.time()) > 0:
                if batch.edge in self._lost:
                    s.returned(batch, Unavailable("the node was lost", reason="node_lost"))
                    return
                try:
                    attempt: Awaitable[LaunchReply]
                    if asked is not None:
                        attempt, asked = asked, None
                    else:
                        timeout = min(left, self.config.launch_timeout_ms / 1000)
                        attempt = self.bus.call(subject, _launch_request(s, batch, left), LaunchReply, timeout=timeout)
                    reply = await self._incarnations.ask((batch.edge,), attempt)
                except Unavailable as error:
                    if error.reason == "no_responders":
                        self.picture.forget(batch.edge)
                        s.returned(batch, error)
                        return
                    log.warning("scheduler.unknown_outcome", edge=batch.edge, burst=s.burst, error=str(error))
                    await asyncio.sleep(self._rng.uniform(0.05, 0.2))
                except DeadlineExceeded:
                    log.warning("scheduler.unknown_outcome", edge=batch.edge, burst=s.burst, error="no answer")
                except Busy as error:  # its handlers are all busy, or it is stopping: it took nothing
                    self.picture.forget(batch.edge)
                    s.returned(batch, error)
                    return
                except DsecError as error:
                    if error.retryable:  # the node's fault: its records could not be written, nothing was made
                        self.picture.forget(batch.edge)
                        s.returned(batch, error)
                    else:
                        self._tell_failed(s, [s.fail(index, error) for index, _ in batch.pairs])
                    return
                else:
                    faults.reached("create.answered")
                    self._answered(s, batch, reply)
                    return
        except Exception as error:  # a fault of ours: the caller is told at once, instead of waiting for its deadline
            self._tell_failed(s, [s.fail(index, NodeError(f"cannot be placed: {error}", retryable=False)) for index, _ in batch.pairs])
            raise
        finally:
            wake.set()

    def _answered(self, s: Slice, batch: Batch, reply: LaunchReply) -> None:
        self.picture.answered(batch.edge, reply.load, len(batch.pairs), len(reply.accepted))
        s.accepted(batch, reply.accepted)
        if reply.refused:
            self._tell_failed(s, s.refused(batch, reply.refused))
            if any(refusal.filter not in (*CAPACITY, "layers") and not refusal.final for refusal in reply.refused):
                self.picture.forget(batch.edge)

    async def _again(self, s: Slice) -> None:
        """A repeat of a settled slice: its failures are told again, and each Edge tells again what it holds of it. One that is away is
        asked for a while: it may be restarting, and what its caller waits for is there."""
        self._tell_failed(s, s.failed.values())
        gate = asyncio.Semaphore(REPEATS)  # not one after another: those that are away hold nobody up

        async def ask(edge: str, batch: Batch) -> None:
            async with gate:
                request = _launch_request(s, batch, max(1.0, s.deadline - asyncio.get_running_loop().time()))
                subject = subjects.edge(self.bus.unit, edge, "launch")
                try:
                    await self.bus.call(subject, request, LaunchReply, timeout=REPEAT, retries=20, attempt_timeout=REPEAT / 3)
                except DsecError as error:
                    log.warning("scheduler.repeat_failed", edge=edge, burst=s.burst, error=str(error))

        size = self.config.slice_bytes
        todo = [(edge, batch) for edge, pairs in s.where.items() for batch in bursts.batches(edge, pairs, s.specs, size)]
        await asyncio.gather(*(ask(edge, batch) for edge, batch in todo))

    def _tell_waiting(self, s: Slice) -> None:
        """Now and then, what it is that a slice waits for: its caller need not guess until the deadline."""
        now = asyncio.get_running_loop().time()
        if now < s.tell_at:
            return
        s.tell_at = now + TELL_EVERY
        count, why = s.waits_for()
        self.bus.post(s.inbox, BurstNews(burst=s.burst, waiting=count, why=why))

    def _tell_failed(self, s: Slice, failed: Iterable[Failed]) -> None:
        rows = list(failed)
        for at in range(0, len(rows), FAILED_AT_ONCE):
            self.bus.post(s.inbox, BurstNews(burst=s.burst, failed=tuple(rows[at : at + FAILED_AT_ONCE])))


def _launch_request(s: Slice, batch: Batch, left: float) -> LaunchEnvelope:
    """What is about to leave."""
    faults.reached("create.sent")
    return LaunchEnvelope(
        burst=s.burst,
        principal=s.principal,
        project=s.project,
        specs=batch.specs,
        items=batch.items,
        inbox=s.inbox,
        deadline_ms=max(1, int(left * 1000)),
        lease=s.lease,
    )


def _needs(specs: Sequence[msgspec.Raw]) -> list[Requirement]:
    """What each spec requires; a spec that is not one is an `InvalidRequest` with its path."""
    needs = []
    for at, raw in enumerate(specs):
        if (size := len(memoryview(raw))) > SPEC_BYTES:
            raise InvalidRequest(f"is {size} bytes long, more than {SPEC_BYTES}", field=f"specs[{at}]", fix="put large values into files")
        try:
            needs.append(_need(bytes(raw)) if size <= COMMON_BYTES else requirement(_spec.decode(raw)))
        except msgspec.ValidationError:
            try:
                codec.decode(bytes(raw), SandboxSpec)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, field=f"specs[{at}].{error.field}", value=error.value) from None
            raise
    return needs


@functools.lru_cache(1024)
def _need(spec: bytes) -> Requirement:
    return requirement(_spec.decode(spec))


def _from_json(data: bytes) -> CreateEnvelope:
    """What a person typed, as it would have come from a program."""
    typed = codec.decode(data, CreateRequest)
    return codec.decode(codec.encode(typed), CreateEnvelope)
