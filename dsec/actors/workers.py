"""Workers: sandboxes that make and drive others, over a way to the bus that their Edge opens; and jobs, which end with their worker.

The agent listens on the worker's loopback and hands each connection to the Edge as an operation. The Edge dials nats-server for it and
puts its gate between (dsec/bus/gate.py): what the worker may say is decided here, by the sandbox that the connection comes from, so there
is nothing inside that could be stolen or forged. What a worker made names it in ``ends_with``: an Edge hears of its end, or asks for it,
and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from dsec.actors.lifecycle import On
from dsec.backends.base import GuestLink, LaunchPlan
from dsec.bus import subjects
from dsec.bus.gate import Bucket
from dsec.bus.grants import LABEL, Grant
from dsec.bus.messages import ClusterView, Empty, EndsWith, LivesReply, LivesRequest
from dsec.bus.signing import Signer
from dsec.bus.subjects import Caller
from dsec.bus.upstream import Upstream
from dsec.errors import Conflict, DeadlineExceeded, Denied, DsecError, InvalidRequest, SandboxGone, Unavailable, Unsupported
from dsec.model import ExecSpec, Exit, ExitReason, SandboxId, SandboxSpec, State, check_project

if TYPE_CHECKING:
    from dsec.actors.edge import Edge
    from dsec.actors.sandbox import Sandbox

T = TypeVar("T")
log = structlog.get_logger("dsec.workers")
PORT = 4222  # on the worker's loopback, where a client of NATS looks first
RATE, BURST = 2_000.0, 8_000.0  # messages a second of one worker, or as many times 64 KiB
CALL = 20  # a connection counts as so many messages
SLICE = 8 << 10  # bytes of a stranger's that are looked at in one go: some milliseconds
PIECE = 128 << 10  # bytes that the agent is given at once
SILENT = 5.0  # seconds in which a connection has to say who it is
QUIET = 10.0  # seconds between two lines of the log about what one worker was refused
ASK = 5  # sweeps of the Edge between questions whether those live with whom sandboxes end
AGAIN = 0.2, 5.0  # seconds before a way that broke is opened again: first, longest


def variables(grant: Grant) -> dict[str, str]:
    """The worker's environment, where libdsec finds its way."""
    return {
        "DSEC_URL": f"nats://127.0.0.1:{PORT}",
        "DSEC_PROJECT": grant.project,
        "DSEC_PRINCIPAL": grant.principal,
        "DSEC_UNIT": grant.unit,
        "DSEC_JOB": grant.worker,
    }


def door_of(ulid: str) -> str:
    """The operation that listens; those of its connections begin with its first half."""
    return hashlib.sha256(f"worker {ulid}".encode()).hexdigest()[:16] + "0" * 16


def _seed(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        fix = "name a file with the account's signing seed that this Edge may read"
        raise InvalidRequest(f"cannot read the signing key: {error}", field="bus.signing_key", value=path, fix=fix) from error


class Workers:
    """Part of an Edge."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        bus = edge.host.config.bus
        self.url, self.creds = bus.url, bus.creds
        self.signer = Signer(_seed(bus.signing_key), bus.signing_account) if bus.signing_key else None
        self._bound: dict[str, set[str]] = {}  # id of a worker -> ulids here that end with it
        self._sweeps = 0
        self._silent: dict[str, float] = {}  # Edges of workers that do not answer, and since when
        self._asking: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ making a worker
    def prepare(
        self, spec: SandboxSpec, principal: str, project: str, sandbox: SandboxId, plan: LaunchPlan
    ) -> tuple[SandboxSpec, LaunchPlan]:
        """Spec and plan of a sandbox that is to be a worker; any other's as they are. Raises `Denied`, `InvalidRequest`, `Unsupported`."""
        if spec.ends_with:
            SandboxId.parse(spec.ends_with)
        if spec.worker is None:
            return spec, plan
        able = self.edge.host.planner(spec).backend.capabilities
        if not able.worker:
            missing = able.missing.get("worker", "it opens no way to the bus")
            fix = "use a backend with workers: container or docker"
            raise Unsupported(f"this backend has no workers: {missing}", field="worker", value=able.name, reason="worker", fix=fix)
        made_in = spec.worker.project or project
        check_project(made_in)
        if made_in != project and not made_in.startswith(f"{project}/"):
            raise Denied("not below the worker's own project", field="worker.project", value=made_in, fix=f"use {project} or {project}/…")
        if not set(spec.worker.networks) <= {"none", "open"} or spec.worker.on_end not in ("stop", "keep"):
            raise InvalidRequest("not a choice", field="worker", value=spec.worker, fix="networks: none, open; on_end: stop, keep")
        worker = msgspec.structs.replace(spec.worker, project=made_in)
        spec = msgspec.structs.replace(spec, worker=worker, labels={**spec.labels, LABEL: str(sandbox)})
        grant = self._grant(str(sandbox), principal, spec)
        return spec, msgspec.structs.replace(plan, env={**plan.env, **variables(grant)})

    def _grant(self, sandbox: str, principal: str, spec: SandboxSpec) -> Grant:
        assert spec.worker is not None
        who = subjects.job(principal, sandbox)
        project, labels = spec.worker.project, spec.labels
        return Grant(unit=self.edge.bus.unit, worker=sandbox, principal=who, project=project, limits=spec.worker, labels=labels)

    async def opened(self, sandbox: Sandbox) -> None:
        """It is there: open its way before anything runs in it. Raises what the agent says."""
        if sandbox.record.spec.worker is None or sandbox.instance is None:
            return
        way = Way(self, sandbox, self._grant(sandbox.id, sandbox.record.principal, sandbox.record.spec), sandbox.instance.link)
        await way.listen()
        self.edge.spawn(way.run())

    def adopted(self, sandbox: Sandbox) -> None:
        """As `opened`, of one that an earlier Edge left."""
        if sandbox.record.spec.worker is not None and sandbox.instance is not None:
            grant = self._grant(sandbox.id, sandbox.record.principal, sandbox.record.spec)
            self.edge.spawn(Way(self, sandbox, grant, sandbox.instance.link).run())

    # ------------------------------------------------------------------ what a job may not do, beside what its subjects say
    @staticmethod
    def check_layer(caller: Caller, sandbox: str, name: str) -> None:
        """Names of layers are the node's: a job that could move them would choose what others stand on. Raises `Denied`."""
        worker = subjects.worker_of(caller.principal)
        if not worker or name == f"packed/{SandboxId.parse(sandbox).ulid}" or name.startswith(f"jobs/{SandboxId.parse(worker).ulid}/"):
            return
        fix = f"leave it out, or use jobs/{SandboxId.parse(worker).ulid}/…"
        raise Denied("a job names no layers but its own", field="name", value=name, sandbox=sandbox, fix=fix, reason="job")

    # ------------------------------------------------------------------ jobs end
    def enter(self, sandbox: Sandbox) -> None:
        """It lives here from now on."""
        if sandbox.record.spec.ends_with:
            self._bound.setdefault(sandbox.record.spec.ends_with, set()).add(sandbox.record.ulid)

    def leave(self, sandbox: Sandbox) -> None:
        bound = self._bound.get(sandbox.record.spec.ends_with)
        if bound is not None:
            bound.discard(sandbox.record.ulid)
            if not bound:
                del self._bound[sandbox.record.spec.ends_with]

    def stopped(self, sandbox: Sandbox) -> None:
        """One has ended here. What ends with it hears so at once; an Edge that misses that asks."""
        spec = sandbox.record.spec
        if spec.worker is None or spec.worker.on_end != "stop":
            return
        self.end(EndsWith(worker=sandbox.id))
        caller = Caller(sandbox.record.principal, sandbox.record.project)
        with contextlib.suppress(DsecError):
            self.edge.bus.post(subjects.everyone(self.edge.bus.unit, "ended", caller), EndsWith(worker=sandbox.id))

    def end(self, message: EndsWith, caller: Caller | None = None) -> Empty:
        """End what ends with this worker, as far as it is ``caller``'s (None: this node says so)."""
        for ulid in list(self._bound.get(message.worker, ())):
            sandbox = self.edge.sandboxes.get(ulid)
            if sandbox is not None and (caller is None or subjects.owns(caller.principal, sandbox.record.principal)):
                sandbox.feed(On.LEASE, Exit(reason=ExitReason.LEASE, detail=f"{message.worker} has ended, and this with it"))
        return Empty()

    def lives(self, request: LivesRequest) -> LivesReply:
        """Which of these have ended, or were never here."""
        return LivesReply(gone=tuple(each for each in request.ids if SandboxId.parse(each).ulid not in self.edge.sandboxes))

    def sweep(self) -> None:
        """Now and then, ask whether those live with whom sandboxes end."""
        self._sweeps += 1
        if self._bound and self._sweeps % ASK == 0 and self.edge.bus.connected and (self._asking is None or self._asking.done()):
            self._asking = self.edge.spawn(self._ask())

    async def _ask(self) -> None:
        by_edge: dict[str, list[str]] = {}
        for worker in self._bound:
            with contextlib.suppress(InvalidRequest):
                by_edge.setdefault(SandboxId.parse(worker).edge, []).append(worker)
        self._silent = {name: since for name, since in self._silent.items() if name in by_edge}
        await asyncio.gather(*(self._ask_one(name, ids) for name, ids in by_edge.items()))

    async def _ask_one(self, name: str, ids: list[str]) -> None:
        edge, request = self.edge, LivesRequest(ids=tuple(ids))
        try:
            if name == edge.name:
                gone = self.lives(request).gone
            else:
                gone = (await edge.bus.call(subjects.edge(edge.bus.unit, name, "lives"), request, LivesReply, timeout=2.0)).gone
        except (Unavailable, DeadlineExceeded):
            if not edge.bus.connected:  # it is we who are away, which says nothing of it
                self.back()
                return
            # Its sandboxes run on without it, until its holder ends them: by then so do these, or when its node is declared lost.
            since = self._silent.setdefault(name, time.monotonic())
            grace = edge.config.orphan_grace_ms / 1e3
            late = bool(grace) and time.monotonic() - since > grace and edge.bus.connected
            gone = tuple(ids) if late or await self._is_lost(name) else ()
        except DsecError as error:
            log.warning("workers.not_asked", edge=name, error=str(error))
            return
        else:
            self._silent.pop(name, None)
        for worker in gone:
            self.end(EndsWith(worker=worker))

    def back(self) -> None:
        """We were away from the bus: who did not answer meanwhile was perhaps there."""
        self._silent.clear()

    async def _is_lost(self, name: str) -> bool:
        bus = self.edge.bus
        with contextlib.suppress(DsecError):  # without a Watcher nobody says so
            subject = subjects.api(bus.unit, "view", Caller("edge", "default"))
            return name in (await bus.call(subject, Empty(), ClusterView, timeout=2.0)).lost
        return False


class Way:
    """From one worker to the bus, for as long as it lives."""

    def __init__(self, workers: Workers, sandbox: Sandbox, grant: Grant, link: GuestLink) -> None:
        self.workers = workers
        self.sandbox = sandbox
        self.grant = grant
        self.link = link
        self.bucket = Bucket(RATE, BURST, time.monotonic())
        self._door = door_of(sandbox.record.ulid)
        self._refused = 0  # and not told yet
        self._quiet_until = 0.0

    async def listen(self) -> None:
        """Have the agent listen; again is fine."""
        argv = ("dsec:listen", "tcp", str(PORT))
        await self.link.start(self._door, ExecSpec(argv=argv, service=True, background=True, head=0, tail=0))

    async def run(self) -> None:
        """Until the sandbox ends. What an earlier Edge served is closed: its far ends went with it, and clients call again."""
        pause, longest = AGAIN
        while not self.sandbox.within(State.STOPPING, State.STOPPED):
            try:
                await self.listen()
                at = 0
                for op in await self.link.ops():
                    if op.op == self._door:
                        at = op.stdout.total
                    elif op.running and op.op.startswith(self._door[:16]):
                        await self._hang_up(op.op)
                pause = AGAIN[0]
                await self._take_in(at)
            except SandboxGone:
                return
            except DsecError as error:
                log.warning("workers.way_broke", sandbox=self.sandbox.id, error=str(error))
            except Exception as error:  # a fault of ours: the worker need not stay without a way for it
                log.error("workers.way_failed", sandbox=self.sandbox.id, error=repr(error), exc_info=error)
            await self.awake()
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)

    async def _take_in(self, at: int) -> None:
        """Serve each connection that the listener tells of."""
        told = b""
        serving: set[asyncio.Task[None]] = set()
        try:
            async for chunk in self.link.output(self._door, (at, 0)):
                told += chunk.data
                while len(told) >= 16:
                    task = self.workers.edge.spawn(self._serve(told[:16].hex()))
                    told = told[16:]
                    serving.add(task)
                    task.add_done_callback(serving.discard)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    # ------------------------------------------------------------------ one connection
    async def _serve(self, op: str) -> None:
        upstream: Upstream | None = None
        try:
            if pause := self.bucket.take(CALL, 0, time.monotonic()):
                await asyncio.sleep(pause)
            async with self.sandbox.in_use():  # who speaks with the bus is not idle
                upstream = await Upstream.open(self.workers.url, self.grant, creds=self.workers.creds, signer=self.workers.signer)
                await Line(self, op, upstream).run()
        except SandboxGone:
            pass
        except (DsecError, OSError) as error:
            log.debug("workers.connection_ended", sandbox=self.sandbox.id, error=str(error))
        finally:
            if upstream is not None:
                upstream.close()
                self._note(upstream.gate.refused, upstream.gate.over)
            if not self.workers.edge.over:  # else the agent does it, as nobody reads any more
                self.workers.edge.spawn(self._hang_up(op))

    def _note(self, refused: int, over: str) -> None:
        """A connection was refused so much: told now and then, for a worker may make a hundred of them a second."""
        self._refused += refused
        now = time.monotonic()
        if self._refused and now >= self._quiet_until:
            log.warning("workers.refused", sandbox=self.sandbox.id, count=self._refused, over=over)
            self._refused, self._quiet_until = 0, now + QUIET

    async def _hang_up(self, op: str) -> None:
        with contextlib.suppress(DsecError):  # it may have ended by itself, or its sandbox
            await self.link.signal(op, 9)

    async def awake(self) -> None:
        """Until the worker runs."""
        while self.sandbox.within(State.PAUSING, State.PAUSED, State.RESUMING, State.CAPTURING):
            await self.sandbox.changed()

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the agent, over again where it may only be standing still."""
        while True:
            try:
                return await ask()
            except (Unavailable, DeadlineExceeded):
                if self.sandbox.within(State.RUNNING):
                    raise
                await self.awake()


class Line:
    """One connection of a worker's, with its far side."""

    def __init__(self, way: Way, op: str, upstream: Upstream) -> None:
        self._way = way
        self._op = op
        self._upstream = upstream
        self._told = 0  # bytes that the client has been given
        self._telling = asyncio.Lock()

    async def run(self) -> None:
        """Until one side ends it."""
        gate = self._upstream.gate
        ways = [asyncio.ensure_future(self._up()), asyncio.ensure_future(self._down())]
        try:
            await asyncio.wait(ways, timeout=SILENT, return_when=asyncio.FIRST_COMPLETED)
            if gate.connected:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                if way.done():
                    way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _up(self) -> None:
        """What the client says, in slices and as fast as its bucket allows."""
        gate, bucket = self._upstream.gate, self._way.bucket
        await self._tell()
        async for chunk in self._way.link.output(self._op):
            for at in range(0, len(chunk.data), SLICE):
                piece, before = chunk.data[at : at + SLICE], gate.messages
                await self._way.awake()  # a worker that stands still says nothing: what it drives may stand still as well
                await self._upstream.say(piece)
                await self._tell()
                if gate.over:
                    return
                if pause := bucket.take(max(1, gate.messages - before), len(piece), time.monotonic()):
                    await asyncio.sleep(pause)

    async def _down(self) -> None:
        while data := await self._upstream.heard():
            await self._upstream.take(data)
            await self._tell()

    async def _tell(self) -> None:
        """Give the client what there is for it. While it takes nothing, nothing is read for it."""
        gate = self._upstream.gate
        async with self._telling:
            while gate.down:
                data = bytes(gate.down[:PIECE])
                del gate.down[: len(data)]
                end = self._told + len(data)
                while self._told < end:
                    give = functools.partial(self._way.link.input, self._op, self._told, data[len(data) - (end - self._told) :])
                    taken = await self._way.patiently(give)
                    if taken < self._told:
                        raise Conflict("the agent has lost count of what it took", sandbox=self._way.sandbox.id, fix="connect again")
                    self._told = taken
