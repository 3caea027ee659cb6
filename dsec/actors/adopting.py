"""What an Edge does at its start with what its records name: what lives is taken up, what does not has ended, and all else is freed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import structlog

from dsec import faults
from dsec.actors.intake import STARTING, demand_of
from dsec.actors.lifecycle import On, Story, adoption
from dsec.actors.sandbox import Sandbox, whole_once_it_answers
from dsec.actors.store import Record
from dsec.backends.base import Instance, LaunchPlan
from dsec.bus.subjects import lease_of
from dsec.errors import DsecError
from dsec.model import Exit, ExitReason, State

if TYPE_CHECKING:
    from dsec.actors.edge import Edge

log = structlog.get_logger("dsec.edge")
_plan = msgspec.msgpack.Decoder(LaunchPlan)
SLICE = 64  # adopted sandboxes between two looks of the loop at others
WHOLE = 5.0  # seconds in which the agent of one that was being started must answer


class Adoption:
    """Of one start of an Edge."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge

    async def run(self, records: list[Record], lost: Exit | None) -> None:
        now = time.monotonic()
        live = []
        plans: dict[str, LaunchPlan] = {}
        for record in records:
            self.edge.requests[record.principal, record.project, record.burst, record.index] = record.ulid
            self.edge.intake.slots.taken(record.slot)
            if record.state is State.STOPPED:
                record.plan = b""
                self.edge.ended[record.ulid] = (record, Story(lines=[f"ended: {record.exit}"]))
                continue
            try:
                plans[record.ulid] = _plan.decode(record.plan)
            except msgspec.MsgspecError as error:
                self._unreadable(record, str(error))
                continue
            record.plan = b""
            live.append(record)
        self.edge.ended = OrderedDict(sorted(self.edge.ended.items(), key=lambda item: item[1][0].ended_ts))
        # From here on steps of the machine's clock change nothing: how old they are is asked once.
        for ulid, (record, _) in self.edge.ended.items():
            self.edge.forget_later(ulid, time.time() - record.ended_ts)
        survivors: dict[str, tuple[Instance, bool]] = {}
        ends: dict[str, Exit] = {}
        for at in range(0, len(live), 16):
            part = live[at : at + 16]
            found = (
                await asyncio.gather(*(self._find(record, plans[record.ulid]) for record in part)) if lost is None else [None] * len(part)
            )
            survivors |= {record.ulid: each for record, each in zip(part, found, strict=True) if each is not None}
            for record in part:
                planner = self.edge.host.planners.get(record.spec.backend)
                if planner is None or lost is not None or record.ulid in survivors:
                    continue
                if (how := await planner.backend.last_exit(record.ulid)) is not None:
                    ends[record.ulid] = how
            await asyncio.sleep(0)  # heartbeats between the slices
        faults.reached("adopt.found")
        for name, backend in self.edge.host.backends.items():
            freed = await backend.reap(frozenset(survivors))
            if freed:
                log.info("edge.reaped", backend=name, count=len(freed))
        faults.reached("adopt.reaped")
        for number, record in enumerate(live):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)  # ten thousand at once would hold the loop for half a second
            self._take_up(record, plans.pop(record.ulid), survivors.get(record.ulid), lost or ends.get(record.ulid), now)
        faults.reached("adopt.taken")
        log.info("edge.adopted", alive=len(survivors), ended=len(live) - len(survivors), remembered=len(self.edge.ended))

    def _unreadable(self, record: Record, error: str) -> None:
        """Another version of the Edge wrote what this one cannot read: that is an end like others, and must not keep the node from
        serving. What there is of it is freed as everything that no record names."""
        log.error("edge.unreadable_record", sandbox=record.ulid, error=error)
        how = Exit(reason=ExitReason.BROKEN, detail="what was recorded of it cannot be read", wall_ts=time.time())
        record.state, record.exit, record.ended_ts, record.plan = State.STOPPED, how, how.wall_ts, b""
        self.edge.ended[record.ulid] = (record, Story(lines=[f"ended: {how}"]))
        stopped = self.edge.outbox.make("stopped", record, msgspec.to_builtins(how))
        self.edge.outbox.send_once(self.edge.store.post(record, [self.edge.outbox.row(stopped)]), stopped)

    async def _find(self, record: Record, plan: LaunchPlan) -> tuple[Instance, bool] | None:
        """What lives of it, and whether that stands still. What the kernel shows counts, for an Edge may have died before it had
        written what it did: one that was being started goes on when it is whole (`whole_once_it_answers`)."""
        if record.state is State.STOPPING or record.spec.backend not in self.edge.host.planners:
            return None
        starting = record.state in STARTING
        if starting and not whole_once_it_answers(record, plan):
            return None
        backend = self.edge.host.planners[record.spec.backend].backend
        instance: Instance | None = None
        try:
            instance = await backend.adopt(plan)
            if instance is None:
                return None
            still = await instance.stands_still()
            if starting and not still:
                async with asyncio.timeout(WHOLE):
                    await instance.link.ops()
            if still and record.state in (State.RESUMING, State.CAPTURING):
                await instance.resume()
                still = False
            elif still and record.state is not State.PAUSED:
                await instance.pause(False)
        except (DsecError, OSError) as error:
            if not starting:
                log.error("edge.adopt_failed", sandbox=record.ulid, error=str(error))
            if instance is not None:
                with contextlib.suppress(DsecError, OSError):  # then it is `reap`'s
                    await instance.stop()
            return None
        return instance, still

    def _take_up(self, record: Record, plan: LaunchPlan, found: tuple[Instance, bool] | None, last: Exit | None, now: float) -> None:
        planner = self.edge.host.planners.get(record.spec.backend) or next(iter(self.edge.host.planners.values()))
        sandbox = Sandbox(self.edge, self.edge.name, record, plan, planner.backend, record.slot)
        sandbox.story.add(f"adopted from {record.state} by {self.edge.store.incarnation}")
        self.edge.enter(sandbox)
        instance, frozen = found if found is not None else (None, False)
        event = adoption(record.state, instance is not None, frozen)
        how = None
        if event is On.ADOPTED_PARTIAL:
            sandbox.life = msgspec.structs.replace(sandbox.life, ready=record.state not in STARTING)
            if record.exit is not None:
                how = record.exit
            elif record.state in STARTING:
                how = last or Exit(reason=ExitReason.LAUNCH_FAILED, detail="the Edge restarted while it was being launched")
            elif last is not None:
                how = last
            else:
                how = Exit(reason=ExitReason.BROKEN, detail="it ended while the Edge was away")
        want = demand_of(sandbox.plan)
        self.edge.ledger.hold_disk(record.ulid, want.disk)
        if event is not On.ADOPTED_PAUSED:
            self.edge.ledger.reserve(record.ulid, want, force=True)
        if instance is not None:
            sandbox.hold(instance)
        if record.lease:
            # The lease gets a whole period, and so has its client to name what it had not named yet.
            lease, owner = lease_of(record.principal, record.lease), (record.principal, record.project)
            self.edge.leases.add(lease, owner, record.lease_ttl_ms / 1000, record.ulid, now, claimed=not record.unclaimed)
        recorded, unfinished = record.state, record.state is not State.PAUSED
        if record.still_at:  # it stood still while no Edge was there
            record.stood_ms, record.still_at = record.stood_ms + max(0, round((now - record.still_at) * 1000)), 0.0
        sandbox.feed(event, how)
        self.edge.workers.adopted(sandbox)
        if event is On.ADOPTED_PAUSED and unfinished:
            self.edge.spawn(sandbox.complete_pause())
        if instance is None:
            return
        # What the one before has done and not written is not told either.
        if recorded in STARTING:
            self.edge.changed(sandbox, "running")
        if frozen and unfinished:
            self.edge.changed(sandbox, "paused")
        elif not frozen and recorded in (State.PAUSED, State.RESUMING):
            self.edge.changed(sandbox, "resumed")
