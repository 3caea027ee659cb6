"""The Edge's intake of creates: admission by the ledger, the record on disk, the answer, and the queue in front of the launches.

The record is on its way to the disk while the launch goes on; who asked hears of neither before it is there. An Edge that dies in between
leaves what it has begun to the next one, which reaps whatever no record names (`Backend.reap`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from dsec import faults
from dsec.actors import capacity
from dsec.actors.cancelled import Cancelled
from dsec.actors.host import Resolved
from dsec.actors.lifecycle import On
from dsec.actors.sandbox import Sandbox
from dsec.actors.store import Record
from dsec.backends.base import LaunchPlan
from dsec.bus.messages import CancelRequest, Event, Failed, LaunchItem, LaunchReply, LaunchRequest, Placed, ReadyItem, Refusal
from dsec.bus.subjects import Caller, is_reply, lease_of, user_of
from dsec.errors import Busy, Conflict, Denied, DsecError, InvalidRequest, NodeError, NotFound, SandboxGone, Unsupported
from dsec.model import Exit, ExitReason, SandboxId, SandboxSpec, State, new_ulid

if TYPE_CHECKING:
    from dsec.actors.edge import Edge

TURNS = 2  # of the loop until a launch has been handed on: the thread that writes records would take the interpreter from it
FEW, LATE = 16, 0.02  # so many sandboxes are answered for so late, in seconds: nobody waits for it, and a core would leave a launch for it
ROUND = 64  # admissions between two looks of the loop at others: about 10 ms
STARTING = (State.PENDING, State.CREATING)


def demand_of(plan: LaunchPlan) -> capacity.Demand:
    return capacity.demand(plan.resources, plan.disk_mode)


def check_policies(spec: SandboxSpec) -> None:
    """What the Edge itself carries out for a sandbox; the rest of the spec is the planner's. Raises `InvalidRequest`."""
    choices = {"on_idle": ("pause", "stop"), "on_client_loss": ("stop", "pause", "keep"), "isolation": ("shared", "user")}
    for field, allowed in choices.items():
        if (value := getattr(spec, field)) not in allowed:
            raise InvalidRequest("not a choice", field=field, value=value, fix=f"use {' or '.join(allowed)}")
    for field in ("idle_timeout_ms", "ttl_ms", "exec_timeout_ms"):
        if (value := getattr(spec, field)) < 0:
            raise InvalidRequest("a time below zero", field=field, value=value, fix="use 0 for none")


class Slots:
    """Small numbers, each held by one live sandbox: they choose ranges of ids."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0
        self._promised: deque[int] = deque()

    def take(self) -> int:
        return self._promised.popleft() if self._promised else self._any()

    def upcoming(self, count: int) -> tuple[int, ...]:
        """Those that the next ones will take, in this order."""
        while len(self._promised) < count:
            self._promised.append(self._any())
        return tuple(self._promised)[:count]

    def _any(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def taken(self, slot: int) -> None:
        """An adopted sandbox holds it; numbers below it stay unused until this Edge starts again."""
        self._next = max(self._next, slot + 1)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class Intake:
    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.slots = Slots()
        self.queue: deque[Sandbox] = deque()
        self.starting = 0
        self.cancelled = Cancelled()
        self.inboxes: dict[str, str] = {}  # ulid -> where its news go, until it is ready
        self._inserts: dict[str, asyncio.Future[None]] = {}
        self._ahead = True  # launches begin while their records are being written; not when the last one could not be

    async def launch(self, request: LaunchRequest) -> LaunchReply:
        """Admission, record, answer. Repeats (same burst and index) change nothing and are told again how they stand."""
        edge = self.edge
        now = time.monotonic()
        if not is_reply(request.inbox):
            raise InvalidRequest("not a subject for news", field="inbox", value=request.inbox[:200], fix="use an inbox of your connection")
        refused: list[Refusal] = []
        new: list[Sandbox] = []
        created: list[Event] = []
        known: list[tuple[int, str]] = []
        resolved: dict[int, Resolved | DsecError] = {}
        for item in request.items:
            ulid = edge.requests.get((request.principal, request.project, request.burst, item.index))
            if ulid is not None:
                known.append((item.index, ulid))
        repeats = {index for index, _ in known}
        fresh = [item for item in request.items if item.index not in repeats]
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for number in {item.spec for item in fresh}:
                if not 0 <= number < len(request.specs):
                    raise NotFound("names a spec that the batch does not have", field="items.spec", value=number)
                resolved[number] = await self._resolve(request.specs[number], request.principal, request.project)
            for done, item in enumerate(fresh):
                if done % ROUND == ROUND - 1:
                    await asyncio.sleep(0)  # a large batch must not hold the loop; each admission is whole in itself
                ulid = edge.requests.get((request.principal, request.project, request.burst, item.index))
                if ulid is not None:  # a repeat of this very batch came in between
                    known.append((item.index, ulid))
                    continue
                outcome = self._admit(request, item, resolved[item.spec], now)
                if isinstance(outcome, Refusal):
                    refused.append(outcome)
                else:
                    new.append(outcome)
                    outcome.recorded = self._inserts[outcome.record.ulid] = stored
            faults.reached("create.admitted")
            created = [edge.outbox.make("created", sandbox.record) for sandbox in new]
            if self._ahead:
                self._enqueue(new)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            for done, sandbox in enumerate(new):
                if done % ROUND == ROUND - 1:
                    await asyncio.sleep(0)
                sandbox.record.plan = msgspec.msgpack.encode(sandbox.plan)
            await edge.store.insert([sandbox.record for sandbox in new], [edge.outbox.row(event) for event in created])
            faults.reached("create.recorded")
            if not self._ahead:
                self._enqueue(new)
                self._ahead = bool(new)
        except BaseException as error:
            self._ahead = False
            edge.outbox.drop(*created)
            stored.set_exception(error if isinstance(error, DsecError) else NodeError("record not written", reason="store"))
            stored.exception()
            for sandbox in new:
                self._undo(sandbox, error)
            raise
        finally:
            for number, found in resolved.items():
                if isinstance(found, Resolved):  # each sandbox that was admitted holds them now
                    edge.host.planner(request.specs[number]).let_go(found.refs)
            for sandbox in new:
                self._inserts.pop(sandbox.record.ulid, None)
            if not stored.done():
                stored.set_result(None)
        edge.outbox.send(*created)
        self._announce(request, new)
        faults.reached("create.announced")
        await self._known(request, known)
        if not refused and len(request.items) <= FEW:
            await asyncio.sleep(LATE)
        accepted = [sandbox.record.index for sandbox in new] + [index for index, _ in known]
        return LaunchReply(edge=edge.name, accepted=tuple(accepted), refused=tuple(refused), load=edge.load())

    async def _resolve(self, spec: SandboxSpec, principal: str, project: str) -> Resolved | DsecError:
        edge = self.edge
        try:
            check_policies(spec)
            if spec.checkpoint:
                return await edge.checkpoints.resolve(spec, principal, project)
            return await edge.host.planner(spec).resolve(spec)
        except DsecError as error:
            return error

    def _admit(self, request: LaunchRequest, item: LaunchItem, resolved: Resolved | DsecError, now: float) -> Sandbox | Refusal:
        edge = self.edge
        if self.cancelled.has((request.principal, request.project), request.burst, item.index):
            late = Conflict("its caller has given this create up", field="burst", value=request.burst, reason="cancelled")
            return Refusal(index=item.index, error=late.body(), filter="cancelled", final=True)
        spec = request.specs[item.spec]
        if isinstance(resolved, NotFound) or (isinstance(resolved, DsecError) and resolved.reason == "registry"):
            # Another node may have the layer, or a way to its registry; when none has, the caller gets these words.
            return Refusal(index=item.index, error=resolved.body(), filter="layers")
        if isinstance(resolved, DsecError):
            return Refusal(index=item.index, error=resolved.body(), final=not resolved.retryable, filter="spec")
        if refused_by := self._closed_to(request.principal, spec):
            closed = Busy(f"{edge.name} takes no more sandboxes now: {refused_by}", reason=refused_by)
            return Refusal(index=item.index, error=closed.body(), filter=refused_by)
        ulid = new_ulid()
        slot = self.slots.take()
        try:
            plan = edge.host.plan(spec, SandboxId(edge.name, ulid), slot, resolved)
            spec, plan = edge.workers.prepare(spec, request.principal, request.project, SandboxId(edge.name, ulid), plan)
        except DsecError as error:
            self.slots.give_back(slot)
            if isinstance(error, Unsupported):  # as with a layer: another node may have what this one has not
                return Refusal(index=item.index, error=error.body(), filter="layers")
            return Refusal(index=item.index, error=error.body(), final=not error.retryable, filter="spec")
        want = demand_of(plan)
        if refused_by := edge.ledger.reserve(ulid, want):
            self.slots.give_back(slot)
            never = edge.ledger.never_fits(want)
            full = Busy(f"no room on {edge.name}: {edge.ledger.explain(refused_by, want)}", reason=refused_by, retryable=not never)
            return Refusal(index=item.index, error=full.body(), filter=refused_by)
        lease = request.lease
        owner = (request.principal, request.project)
        if lease is not None and not edge.leases.add(lease_of(request.principal, lease.id), owner, lease.ttl_ms / 1000, ulid, now):
            edge.ledger.release(ulid)
            edge.ledger.free_disk(ulid)
            self.slots.give_back(slot)
            foreign = Denied("this lease is somebody else's", field="lease", value=lease.id, reason="lease")
            return Refusal(index=item.index, error=foreign.body(), filter="lease", final=True)
        record = Record(
            ulid=ulid,
            burst=request.burst,
            index=item.index,
            principal=request.principal,
            project=request.project,
            spec=spec,
            lease=lease.id if lease else "",
            lease_ttl_ms=lease.ttl_ms if lease else 0,
            unclaimed=lease is not None,
            slot=slot,
            layers=resolved.refs,
            degraded=plan.degraded,
            created_ts=time.time(),
        )
        sandbox = Sandbox(edge, edge.name, record, plan, edge.host.planner(spec).backend, slot)
        sandbox.deadline = now + request.deadline_ms / 1000
        sandbox.story.add(f"admitted for {request.burst}[{item.index}]")
        edge.enter(sandbox)
        edge.requests[request.principal, request.project, request.burst, item.index] = ulid
        self.inboxes[ulid] = request.inbox
        return sandbox

    def cancel(self, caller: Caller, request: CancelRequest) -> None:
        """What is here of a create that was given up is stopped, what still comes is refused. Ready ones that its caller has taken are not
        among the indices that it names."""
        owner = (caller.principal, caller.project)
        self.cancelled.add(owner, request.burst, request.ranges, time.monotonic())
        for sandbox in list(self.edge.sandboxes.values()):
            record = sandbox.record
            if record.burst == request.burst and self.cancelled.has((record.principal, record.project), record.burst, record.index):
                self.edge.spawn(sandbox.stop(how=Exit(reason=ExitReason.REQUESTED, detail="its create was cancelled")))

    def _closed_to(self, principal: str, spec: SandboxSpec) -> str:
        """The filter that keeps this node from taking the sandbox, other than capacity."""
        edge = self.edge
        if edge.stopping or edge.drain.mode or edge.adopting or edge.standing.in_doubt():
            return "draining"
        if len(self.queue) >= edge.config.queue_max:
            return "queue"
        if edge.room:
            return "resuming"  # resumes outrank creates on a full node
        user = user_of(principal)
        if spec.isolation == "user" and any(who != user for who in edge.owners):
            return "isolation"
        exclusive = edge.exclusive()
        return "isolation" if exclusive and exclusive != user else ""

    def _enqueue(self, new: list[Sandbox]) -> None:
        """Now they may be launched."""
        for sandbox in new:
            self.queue.append(sandbox)
            self.edge.watch(sandbox)
        self._start_more()

    def _announce(self, request: LaunchRequest, new: list[Sandbox]) -> None:
        """They are on disk: now they may be told."""
        if not new:
            return
        placed = [Placed(index=sandbox.record.index, ulid=sandbox.record.ulid) for sandbox in new]
        self.edge.reporter.accepted(request.burst, request.inbox, placed, len(placed))

    async def _known(self, request: LaunchRequest, known: list[tuple[int, str]]) -> None:
        """A repeat: say again how each stands."""
        edge = self.edge
        for _, ulid in known:
            if (stored := self._inserts.get(ulid)) is not None:
                await asyncio.shield(stored)  # the repeat may be given up, what it waits for goes on
        if not known:
            return
        waiting = [ulid for _, ulid in known if ulid in edge.sandboxes and not edge.sandboxes[ulid].life.ready]
        elsewhere = [ulid for ulid in waiting if self.inboxes.get(ulid) != request.inbox]
        for ulid in elsewhere:
            edge.reporter.moved(request.burst, self.inboxes.get(ulid, ""))
            self.inboxes[ulid] = request.inbox
        placed = [Placed(index=index, ulid=ulid) for index, ulid in known]
        edge.reporter.accepted(request.burst, request.inbox, placed, len(known) - len(waiting) + len(elsewhere))
        for index, ulid in known:
            sandbox = edge.sandboxes.get(ulid)
            if sandbox is None:
                record = edge.ended[ulid][0] if ulid in edge.ended else None
                how = record.exit if record is not None else None
                error = SandboxGone("has ended", sandbox=f"{edge.name}-{ulid}", reason=str(how.reason) if how else "unknown")
                edge.reporter.failed(request.burst, request.inbox, Failed(index=index, ulid=ulid, error=error.body()))
            elif sandbox.life.ready:
                record = sandbox.record
                ready = ReadyItem(index=index, ulid=ulid, layers=record.layers, degraded=record.degraded)
                edge.reporter.ready(request.burst, request.inbox, ready)

    def _undo(self, sandbox: Sandbox, error: BaseException) -> None:
        """End what could not be recorded, however far its launch has come. Its caller is told by the error of the whole request."""
        record = sandbox.record
        self.inboxes.pop(record.ulid, None)
        self.edge.requests.pop((record.principal, record.project, record.burst, record.index), None)
        if sandbox.within(*STARTING):
            sandbox.feed(On.LAUNCH_FAILED, detail=str(error))

    def _start_more(self) -> None:
        """Launch what waits, as far as the cap allows."""
        edge = self.edge
        while self.queue and self.starting < edge.ledger.limits.starting and not edge.stopping:
            sandbox = self.queue.popleft()
            if sandbox.state is State.PENDING:
                self.starting += 1
                edge.spawn(self._start_one(sandbox))

    async def _start_one(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.launch()
        finally:
            self.starting -= 1
            self._start_more()
