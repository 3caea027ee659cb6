"""What can be asked of an Edge and of its sandboxes: the typed handlers behind its subjects.

Lifecycle and commands come over the control connection; files and output over the bulk connection, so that bulk never delays control.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from dsec import faults
from dsec.actors.edge import Edge
from dsec.actors.pump import Pump, Readers, bounded
from dsec.actors.sandbox import Sandbox, ended
from dsec.actors.store import Record
from dsec.backends.base import PackOrder
from dsec.bus import subjects
from dsec.bus.actor import Context, Route, Verb
from dsec.bus.grants import LABEL
from dsec.bus.messages import (
    CancelRequest,
    CheckpointReply,
    CheckpointRequest,
    CheckpointSelector,
    CheckpointsReply,
    CommandsReply,
    CommandsRequest,
    CreditRequest,
    DrainRequest,
    EdgeInfo,
    Empty,
    EndsWith,
    ExecReply,
    ExecRequest,
    Heartbeat,
    InfoReply,
    InputReply,
    InputRequest,
    ItemResult,
    LabelRequest,
    LaunchReply,
    LaunchRequest,
    LeaseAck,
    LeaseRenew,
    ListReply,
    LivesReply,
    LivesRequest,
    LogReply,
    ManyReply,
    OpsReply,
    OutputRequest,
    PackReply,
    PackRequest,
    PauseReply,
    ResizeRequest,
    Selector,
    SignalRequest,
    StopRequest,
)
from dsec.bus.subjects import Caller
from dsec.errors import DsecError, InvalidRequest, NodeError, NotFound, SandboxGone, to_body
from dsec.model import Checkpoint, ExecSpec, Exit, ExitReason, FileReply, FileRequest, Paused, SandboxInfo, State

LIST_BYTES = 600_000  # of one ListReply, estimated
Rows = list[Checkpoint]  # a method is called `list`
LIST_ROUND = 128  # rows between two looks of the loop at others


class Verbs:
    """Serves one Edge."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self._readers = Readers()

    async def serve(self) -> None:
        edge, unit = self.edge, self.edge.bus.unit
        surely = edge.standing.guard
        meta = {"edge": edge.name, "incarnation": edge.store.incarnation}
        control: list[tuple[str, Any, Any, Any]] = [
            ("exec", ExecRequest, ExecReply, self.exec),
            ("query", ExecRequest, ExecReply, self.query),
            ("input", InputRequest, InputReply, self.input),
            ("signal", SignalRequest, Empty, self.signal),
            ("resize", ResizeRequest, Empty, self.resize),
            ("ops", Empty, OpsReply, self.ops),
            ("info", Empty, InfoReply, self.info),
            ("label", LabelRequest, InfoReply, self.label),
            ("log", Empty, LogReply, self.log),
            ("commands", CommandsRequest, CommandsReply, self.commands),
            ("pause", Empty, PauseReply, self.pause),
            ("resume", Empty, Empty, self.resume),
            ("pack_diff", PackRequest, PackReply, self.pack_diff),
            ("checkpoint", CheckpointRequest, CheckpointReply, self.checkpoint),
            ("stop", StopRequest, Empty, self.stop),
        ]
        bulk: list[tuple[str, Any, Any, Any]] = [
            ("files", FileRequest, FileReply, self.files),
            ("output", OutputRequest, Empty, self.output),
            ("credit", CreditRequest, Empty, self.credit),
            ("feed", InputRequest, InputReply, self.input),  # as input, for much data
        ]
        # One subscription a verb: files and output are on another connection than the rest.
        on_control, on_bulk = (
            [
                Route(
                    subject=subjects.sandbox_verb(unit, edge.name, name),
                    verbs=(Verb(name=name, request=request, reply=reply, handler=surely(handler)),),
                    verb_of=_fourth,
                    caller_of=_caller,
                )
                for name, request, reply, handler in verbs
            ]
            for verbs in (control, bulk)
        )
        for_actors = Route(
            subject=subjects.edge_all(unit, edge.name),
            verbs=(
                Verb(name="launch", request=LaunchRequest, reply=LaunchReply, handler=self.launch),
                Verb(name="drain", request=DrainRequest, reply=EdgeInfo, handler=self.drain),
                Verb(name="info", request=Empty, reply=EdgeInfo, handler=self.edge_info),
                Verb(name="lives", request=LivesRequest, reply=LivesReply, handler=lambda _, request: edge.workers.lives(request)),
                Verb(name="doubt", request=Empty, handler=self.doubt),
            ),
            verb_of=subjects.edge_verb,
        )
        for_all = Route(
            subject=subjects.everyone_all(unit),
            verbs=(
                Verb(name="list", request=Selector, reply=ListReply, handler=surely(self.list, again=True)),
                Verb(name="stop", request=Selector, reply=ManyReply, handler=surely(self.stop_many, again=True)),
                Verb(name="pause", request=Selector, reply=ManyReply, handler=surely(self.pause_many, again=True)),
                Verb(name="resume", request=Selector, reply=ManyReply, handler=surely(self.resume_many, again=True)),
                Verb(name="prune", request=Selector, reply=ManyReply, handler=surely(self.prune, again=True)),
                Verb(
                    name="checkpoints",
                    request=CheckpointSelector,
                    reply=CheckpointsReply,
                    handler=surely(self.checkpoints, again=True),
                ),
                Verb(name="uncheckpoint", request=CheckpointSelector, reply=ManyReply, handler=surely(self.uncheckpoint, again=True)),
                Verb(name="beat", request=Empty, reply=Heartbeat, handler=self.beat),
                Verb(name="cancel", request=CancelRequest, reply=Empty, handler=self.cancel),
                Verb(name="ended", request=EndsWith, reply=Empty, handler=lambda c, request: edge.workers.end(request, c.caller)),
            ),
            verb_of=_fourth,
            caller_of=lambda subject: subjects.everyone_parse(subject)[1],
        )
        leases = Route(
            subject=subjects.lease_all(unit, edge.name),
            # At once: no lease lapses because its renewal waited.
            verbs=(Verb(name="renew", request=LeaseRenew, reply=LeaseAck, handler=surely(self.renew, again=True, at_once=True)),),
            verb_of=lambda _: "renew",
            caller_of=subjects.lease_caller,
        )
        text = "owns the sandboxes of one node"
        await edge.bulk.serve("dsec-edge-bulk", *on_bulk, description=text, metadata=meta)
        await edge.bus.serve("dsec-edge", *on_control, for_all, leases, for_actors, description=text, metadata=meta, limit=16_384)

    # ------------------------------------------------------------------ finding
    def _live(self, context: Context) -> Sandbox:
        """The sandbox that the subject names. Raises `NotFound`, or `SandboxGone` with the reason of its end."""
        _, caller, sid = subjects.sandbox_parse(context.subject)
        sandbox = self.edge.sandboxes.get(sid.ulid)
        record = sandbox.record if sandbox else self.edge.ended[sid.ulid][0] if sid.ulid in self.edge.ended else None
        if record is None or record.project != caller.project or not subjects.owns(caller.principal, record.principal):
            raise NotFound("no such sandbox", sandbox=str(sid), fix="see `dsec ls`; the end of a sandbox is forgotten after a while")
        if sandbox is None:
            how = record.exit or Exit(reason=ExitReason.BROKEN)
            raise SandboxGone(f"has ended ({how.reason}): {how.detail}".rstrip(": "), sandbox=str(sid), reason=str(how.reason))
        return sandbox

    # ------------------------------------------------------------------ commands
    async def exec(self, context: Context, request: ExecRequest) -> ExecReply:
        if request.step:
            return await self._step(context, request)
        sandbox = self._live(context)
        if request.spec is not None:
            async with sandbox.awake(context.deadline) as instance:
                faults.reached("exec.awake")
                status = await instance.link.start(request.op, _with_defaults(request.spec, sandbox))
                faults.reached("exec.started")
            seq = 0 if request.spec.service else await self.edge.commands.begun(sandbox.record.ulid, request.op, request.spec)
            faults.reached("exec.numbered")
            if status.running and not request.wait_ms:
                return ExecReply(status=bounded(status), seq=seq, stood_ms=sandbox.stood_ms)
            # One that has ended was asked for before: `outcome` brings its captured output as well.
        return await self._outcome(sandbox, context, request)

    async def query(self, context: Context, request: ExecRequest) -> ExecReply:
        return await self._outcome(self._live(context), context, request)

    async def _outcome(self, sandbox: Sandbox, context: Context, request: ExecRequest) -> ExecReply:
        status = await sandbox.outcome(request.op, _wait(context, request.wait_ms))
        if not status.running:
            faults.reached("exec.ended")
        seq = self.edge.commands.ended(sandbox.record.ulid, status)
        return ExecReply(status=bounded(status), seq=seq, stood_ms=sandbox.stood_ms)

    async def _step(self, context: Context, request: ExecRequest) -> ExecReply:
        """A command whose result is kept: of a sandbox that has ended, too."""
        commands = self.edge.commands
        try:
            sandbox = self._live(context)
        except SandboxGone:
            _, _, sid = subjects.sandbox_parse(context.subject)
            if (known := await commands.recorded(sid.ulid, request.step)) is None:
                raise
            return ExecReply(status=bounded(known[0]), seq=known[1])
        spec = _with_defaults(request.spec, sandbox) if request.spec is not None else None
        status, seq = await commands.step(sandbox, request.step, request.op, spec, context.deadline, _wait(context, request.wait_ms))
        return ExecReply(status=bounded(status), seq=seq, stood_ms=sandbox.stood_ms)

    async def commands(self, context: Context, request: CommandsRequest) -> CommandsReply:
        with contextlib.suppress(SandboxGone):
            self._live(context)
        _, _, sid = subjects.sandbox_parse(context.subject)
        found, more = await self.edge.commands.listing(sid.ulid, request.after, request.limit)
        return CommandsReply(commands=found, more=more)

    async def input(self, context: Context, request: InputRequest) -> InputReply:
        sandbox = self._live(context)
        async with sandbox.awake(context.deadline) as instance:
            accepted = await instance.link.input(request.op, request.offset, request.data, request.eof)
            return InputReply(accepted=accepted, read=self._readers.any((sandbox.record.ulid, request.op)))

    async def signal(self, context: Context, request: SignalRequest) -> Empty:
        async with self._live(context).awake(context.deadline) as instance:
            await instance.link.signal(request.op, request.signal, request.tree)
        return Empty()

    async def resize(self, context: Context, request: ResizeRequest) -> Empty:
        _, _, sid = subjects.sandbox_parse(context.subject)
        async with self._live(context).awake(context.deadline) as instance:
            await instance.link.resize(request.op, request.rows, request.cols)
        self._readers.resized((sid.ulid, request.op), request.reader, request.rows, request.cols)
        return Empty()

    async def ops(self, context: Context, _request: Empty) -> OpsReply:
        async with self._live(context).awake(context.deadline) as instance:
            return OpsReply(ops=await instance.link.ops())

    async def files(self, context: Context, request: FileRequest) -> FileReply:
        async with self._live(context).awake(context.deadline) as instance:
            return await instance.link.files(request)

    async def output(self, context: Context, request: OutputRequest) -> Empty:
        """Begin to publish to one more reader."""
        sandbox = self._live(context)
        caller = context.caller
        assert caller is not None
        _, _, sid = subjects.sandbox_parse(context.subject)
        key = (sid.ulid, request.op)
        if self._readers.again(key, request):
            return Empty()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.edge.spawn(self._pump(sandbox, key, subjects.output(self.edge.bus.unit, sid, request.op, caller), request, started))
        await started
        return Empty()

    async def _pump(
        self, sandbox: Sandbox, key: tuple[str, str], subject: str, request: OutputRequest, started: asyncio.Future[None]
    ) -> None:
        pump: Pump | None = None
        standing = self.edge.standing
        try:
            async with sandbox.awake(serving=False) as instance:
                await instance.link.wait(request.op, 0)  # an unknown operation is told to the caller, not to the stream
                ended = functools.partial(self.edge.commands.ended, sandbox.record.ulid)
                pump = Pump(self.edge.bulk, subject, instance.link, request, ended, functools.partial(standing.same, standing.turn))
                if self._readers.add(key, pump, request.replaces):
                    await instance.link.resize(request.op, *pump.size)
                if not started.done():
                    started.set_result(None)
                try:
                    await pump.run()
                finally:
                    if (size := self._readers.remove(key, pump)) is not None:
                        with contextlib.suppress(DsecError):  # it may have ended as well
                            await instance.link.resize(request.op, *size)
        except Exception as error:
            if not started.done():
                started.set_exception(error)
            elif not isinstance(error, DsecError):
                raise
        finally:
            started.cancel()
            if pump is not None:
                self._readers.remove(key, pump)

    def credit(self, context: Context, request: CreditRequest) -> Empty:
        _, _, sid = subjects.sandbox_parse(context.subject)
        pump = self._readers.get((sid.ulid, request.op), request.reader)
        if pump is not None:
            if request.close:
                pump.close()
            else:
                pump.credit(request.credit, request.received)
        return Empty()

    # ------------------------------------------------------------------ one sandbox's life
    async def info(self, context: Context, _request: Empty) -> InfoReply:
        try:
            sandbox = self._live(context)
        except SandboxGone:
            _, _, sid = subjects.sandbox_parse(context.subject)
            return InfoReply(info=ended(self.edge.ended[sid.ulid][0], self.edge.name))
        return InfoReply(info=sandbox.info(await sandbox.usage()))

    async def label(self, context: Context, request: LabelRequest) -> InfoReply:
        """Change labels; on disk before it is answered."""
        sandbox = self._live(context)
        spec = sandbox.record.spec
        labels = {key: value for key, value in (spec.labels | request.set).items() if key not in request.remove}
        if labels.get(LABEL) != spec.labels.get(LABEL):
            raise InvalidRequest("says which job it is of, and stays", field=f"labels.{LABEL}", fix="use another name")
        if len(labels) > 64 or any(not 0 < len(key) <= 128 or len(value) > 1024 for key, value in labels.items()):
            raise InvalidRequest("at most 64 labels, with names up to 128 and values up to 1024 characters", field="labels")
        sandbox.record.spec = msgspec.structs.replace(spec, labels=labels)
        await self.edge.store.update(sandbox.record)
        return InfoReply(info=sandbox.info())

    async def log(self, context: Context, _request: Empty) -> LogReply:
        with contextlib.suppress(SandboxGone):
            return LogReply(lines=tuple(self._live(context).story.lines))
        _, _, sid = subjects.sandbox_parse(context.subject)
        return LogReply(lines=tuple(self.edge.ended[sid.ulid][1].lines))

    async def pause(self, context: Context, _request: Empty) -> PauseReply:
        return PauseReply(paused=await self._live(context).pause(context.deadline))

    async def resume(self, context: Context, _request: Empty) -> Empty:
        await self._live(context).resume(context.deadline)
        return Empty()

    async def pack_diff(self, context: Context, request: PackRequest) -> PackReply:
        order = PackOrder(
            name=request.name, scrub=request.scrub, max_entries=request.max_entries, max_bytes=request.max_bytes, image=request.image
        )
        sandbox = self._live(context)
        assert context.caller is not None
        self.edge.workers.check_layer(context.caller, sandbox.id, request.name)
        return PackReply(layer=await sandbox.pack_diff(request.op, order, context.deadline))

    async def checkpoint(self, context: Context, request: CheckpointRequest) -> CheckpointReply:
        return CheckpointReply(checkpoint=await self.edge.checkpoints.make(self._live(context), request, context.deadline))

    async def stop(self, context: Context, request: StopRequest) -> Empty:
        """Never rejected: one that has ended is stopped."""
        with contextlib.suppress(SandboxGone):
            await self._live(context).stop(request.grace_ms / 1000, deadline=context.deadline)
        return Empty()

    # ------------------------------------------------------------------ many
    def _about(self, context: Context) -> Callable[[Record], bool]:
        """Whether a request to everyone is about the sandbox of a record: of its caller, in the project of its subject or below it."""
        caller, below = context.caller, subjects.everyone_below(context.subject)
        assert caller is not None
        return lambda record: subjects.covers(caller, below, record.principal, record.project)

    def _select(self, context: Context, selector: Selector) -> list[Sandbox]:
        ids = frozenset(selector.ids)
        about = self._about(context)
        return [
            sandbox
            for sandbox in self.edge.sandboxes.values()
            if about(sandbox.record)
            and (not ids or sandbox.id in ids)
            and (not selector.states or sandbox.state in selector.states)
            and _labelled(sandbox.record.spec.labels, selector.labels)
            and (not selector.stuck or sandbox.life.release_error)
        ]

    async def list(self, context: Context, selector: Selector) -> ListReply:
        about = self._about(context)
        found: list[tuple[str, Callable[[], SandboxInfo]]] = [(sandbox.id, sandbox.info) for sandbox in self._select(context, selector)]
        if selector.stopped and not selector.stuck:  # of those that have ended everything was freed
            ids = frozenset(selector.ids)
            found += [
                (f"{self.edge.name}-{record.ulid}", functools.partial(ended, record, self.edge.name))
                for record, _ in self.edge.ended.values()
                if about(record)
                and (not selector.states or State.STOPPED in selector.states)
                and (not ids or f"{self.edge.name}-{record.ulid}" in ids)
                and _labelled(record.spec.labels, selector.labels)
            ]
        if selector.edge not in ("", self.edge.name):
            found = []
        found = sorted((item for item in found if item[0] > selector.after), key=lambda item: item[0])
        kept: list[SandboxInfo] = []
        size = 0
        for _, describe in found[: selector.limit]:
            if len(kept) % LIST_ROUND == LIST_ROUND - 1:
                await asyncio.sleep(0)  # thousands of rows must not hold the loop
            row = describe()
            size += len(msgspec.msgpack.encode(row))
            if kept and size > LIST_BYTES:  # one alone always goes: a page without a row would be taken for the end
                break
            kept.append(row)
        return ListReply(edge=self.edge.name, sandboxes=tuple(kept), more=len(kept) < len(found))

    def _checkpoints(self, context: Context, request: CheckpointSelector) -> Rows:
        caller, below = context.caller, subjects.everyone_below(context.subject)
        assert caller is not None
        if request.edge not in ("", self.edge.name):
            return []
        known = self.edge.checkpoints.known
        rows = [known[each] for each in request.ids if each in known] if request.ids else list(known.values())
        return sorted((row for row in rows if subjects.covers(caller, below, row.principal, row.project)), key=lambda row: row.id)

    async def checkpoints(self, context: Context, request: CheckpointSelector) -> CheckpointsReply:
        found = [row for row in self._checkpoints(context, request) if row.id > request.after]
        kept: list[Checkpoint] = []
        size = 0
        for row in found:
            if len(kept) % LIST_ROUND == LIST_ROUND - 1:
                await asyncio.sleep(0)
            size += len(msgspec.msgpack.encode(row))
            if kept and size > LIST_BYTES:
                break
            kept.append(row)
        return CheckpointsReply(edge=self.edge.name, checkpoints=tuple(kept), more=len(kept) < len(found))

    async def uncheckpoint(self, context: Context, request: CheckpointSelector) -> ManyReply:
        """Let go of checkpoints: they go when nothing stands on them."""
        results = []
        for row in self._checkpoints(context, request) if request.ids else ():
            try:
                await self.edge.checkpoints.drop(row)
                results.append(ItemResult(id=row.id))
            except DsecError as error:
                results.append(ItemResult(id=row.id, error=to_body(error)))
        await self.edge.checkpoints.sweep()
        return ManyReply(edge=self.edge.name, results=tuple(results))

    async def stop_many(self, context: Context, selector: Selector) -> ManyReply:
        return await self._each(context, selector, lambda sandbox: sandbox.stop(deadline=context.deadline))

    async def pause_many(self, context: Context, selector: Selector) -> ManyReply:
        return await self._each(context, selector, lambda sandbox: sandbox.pause(context.deadline))

    async def resume_many(self, context: Context, selector: Selector) -> ManyReply:
        return await self._each(context, selector, lambda sandbox: sandbox.resume(context.deadline))

    async def prune(self, context: Context, selector: Selector) -> ManyReply:
        """Forget sandboxes that have ended."""
        ids = frozenset(selector.ids)
        about = self._about(context)
        chosen = [
            ulid
            for ulid, (record, _) in self.edge.ended.items()
            if about(record) and (not ids or f"{self.edge.name}-{ulid}" in ids) and _labelled(record.spec.labels, selector.labels)
        ]
        await self.edge.prune(chosen)
        return ManyReply(edge=self.edge.name, results=tuple(ItemResult(id=f"{self.edge.name}-{ulid}") for ulid in chosen))

    async def _each(self, context: Context, selector: Selector, do: Callable[[Sandbox], Awaitable[Paused | None]]) -> ManyReply:
        gate = asyncio.Semaphore(self.edge.config.stop_parallel)

        async def one(sandbox: Sandbox) -> ItemResult:
            async with gate:
                try:
                    return ItemResult(id=sandbox.id, paused=await do(sandbox))
                except DsecError as error:
                    return ItemResult(id=sandbox.id, error=to_body(error))

        results = await asyncio.gather(*(one(sandbox) for sandbox in self._select(context, selector)))
        return ManyReply(edge=self.edge.name, results=tuple(results))

    def beat(self, _context: Context, _request: Empty) -> Heartbeat:
        return self.edge.heartbeat()

    def cancel(self, context: Context, request: CancelRequest) -> Empty:
        assert context.caller is not None
        self.edge.intake.cancel(context.caller, request)
        return Empty()

    # ------------------------------------------------------------------ leases
    async def renew(self, context: Context, request: LeaseRenew) -> LeaseAck:
        caller = context.caller
        assert caller is not None
        edge, now = self.edge, time.monotonic()
        owner = (caller.principal, caller.project)
        ttl = max(0.1, request.ttl_ms / 1000)
        lease = subjects.lease_of(caller.principal, request.lease)
        renewed = edge.leases.renew(lease, owner, ttl, request.seq, request.claims, request.drops, request.end, now)
        if request.end:
            for ulid in renewed.stop:
                if (sandbox := edge.sandboxes.get(ulid)) is not None:
                    edge.spawn(sandbox.on_lease())
        # A client may also let go of what another lease of its own brought here (it attached to it).
        dropped = set(request.drops) | (set() if request.end else set(renewed.stop))
        for ulid in dropped:
            sandbox = edge.sandboxes.get(ulid)
            if sandbox is not None and self._owned(ulid, owner):
                edge.spawn(sandbox.stop(how=Exit(reason=ExitReason.REQUESTED, detail="dropped by its client")))
        unknown = tuple(ulid for ulid in renewed.unknown if not self._owned(ulid, owner))
        await self._claimed([ulid for ulid in request.claims if self._owned(ulid, owner)])
        return LeaseAck(seq=request.seq, held=renewed.held, unknown=unknown)

    async def _claimed(self, ulids: Iterable[str]) -> None:
        """On disk before it is acknowledged: a restarted Edge reaps what no lease has named, and its client does not name it twice."""
        fresh = [sandbox.record for ulid in ulids if (sandbox := self.edge.sandboxes[ulid]).record.unclaimed]
        for record in fresh:
            record.unclaimed = False
        try:
            await asyncio.gather(*(self.edge.store.update(record) for record in fresh))
        except NodeError:
            for record in fresh:
                record.unclaimed = True
            raise

    def _owned(self, ulid: str, owner: tuple[str, str]) -> bool:
        sandbox = self.edge.sandboxes.get(ulid)
        return sandbox is not None and sandbox.record.project == owner[1] and subjects.owns(owner[0], sandbox.record.principal)

    # ------------------------------------------------------------------ the node
    async def launch(self, _context: Context, request: LaunchRequest) -> LaunchReply:
        return await self.edge.intake.launch(request)

    async def drain(self, context: Context, request: DrainRequest) -> EdgeInfo:
        """Take no more; with mode "stop" or "pause" also see to those that are here. It goes on when the caller's time is up."""
        drain = self.edge.drain
        await drain.order(request, _wait(context, 2_000))
        return msgspec.structs.replace(self._info(), trouble=tuple(drain.trouble.values()), drained=drain.done)

    def doubt(self, _context: Context, _request: Empty) -> Empty:
        """A Watcher hears us, and has declared us lost."""
        self.edge.standing.doubt()
        return Empty()

    async def edge_info(self, _context: Context, _request: Empty) -> EdgeInfo:
        return self._info()

    def _info(self) -> EdgeInfo:
        host = self.edge.host
        capabilities = tuple(msgspec.to_builtins(each) for each in host.capabilities)
        return EdgeInfo(
            heartbeat=self.edge.heartbeat(),
            capabilities=capabilities,
            degraded=tuple(f"{name}: {why}" for name, why in host.missing.items()),
        )


def _fourth(subject: str) -> str:
    return subject.split(".", 5)[4]


def _caller(subject: str) -> Caller:
    return subjects.sandbox_parse(subject)[1]


def _wait(context: Context, wait_ms: int) -> float:
    """Seconds to wait for an end; a little less than the caller waits for the answer."""
    left = context.remaining()
    wait = wait_ms / 1000
    return wait if left is None else max(0.0, min(wait, left - 0.05))


def _with_defaults(spec: ExecSpec, sandbox: Sandbox) -> ExecSpec:
    """What the sandbox decides where the command does not: a background command has no default time-out."""
    if spec.timeout_ms is not None:
        return spec
    return msgspec.structs.replace(spec, timeout_ms=0 if spec.background else sandbox.record.spec.exec_timeout_ms)


def _labelled(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())
