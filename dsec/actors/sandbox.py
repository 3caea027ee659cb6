"""The Sandbox actor: one object per sandbox, the thin shell around `lifecycle`.

Lifecycle verbs go through a serial mailbox; exec and files run beside each other. An idle sandbox owns no timer and no poll: its clocks
are read by the Edge's one sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
import structlog

from dsec import faults
from dsec.actors import pausing
from dsec.actors.lifecycle import Clocks, Do, Life, On, Story, step
from dsec.actors.store import Record, Store, Told
from dsec.backends.base import Backend, Broken, Instance, LaunchPlan, PackOrder
from dsec.bus.actor import Mailbox
from dsec.bus.messages import Event
from dsec.config import EdgeConfig, PauseConfig
from dsec.errors import Busy, Conflict, DeadlineExceeded, DsecError, NodeError, SandboxGone, Unavailable, Unsupported
from dsec.model import Exit, ExitReason, OpStatus, PackedLayer, Paused, SandboxInfo, State, Usage

log = structlog.get_logger("dsec.sandbox")
RELEASE_PAUSE = (0.1, 10.0)  # seconds between attempts to free a sandbox: first, longest
PACKS_KEPT = 8  # outcomes of pack_diff that a repeated request finds
SETTLED = (State.RUNNING, State.PAUSED, State.STOPPED)


class Keeper(Protocol):
    """What a sandbox asks of its Edge."""

    store: Store
    config: EdgeConfig
    pausing: PauseConfig
    over: bool  # the Edge has let go of its sandboxes: what happens to them is the next one's to find out

    def ready(self, sandbox: Sandbox) -> None: ...
    def failed(self, sandbox: Sandbox) -> None: ...
    def stopped(self, sandbox: Sandbox) -> None: ...
    def word(self, sandbox: Sandbox, kind: str, detail: dict[str, object] | None = None) -> list[Told]:
        """What will be told by the next `changed`, to be written with the change itself."""
        ...

    def unsay(self, sandbox: Sandbox) -> None:
        """What `word` gave could not be written: it has not happened, and is not told."""
        ...

    def changed(self, sandbox: Sandbox, kind: str, detail: dict[str, object] | None = None) -> None:
        """Tell it; on disk first, with the record as it is."""
        ...

    async def opened(self, sandbox: Sandbox) -> None:
        """It has an instance, and is not announced yet. Raises what keeps it from being of use."""
        ...

    def watch(self, sandbox: Sandbox) -> None:
        """Its clocks have changed."""
        ...

    def release(self, sandbox: Sandbox) -> None:
        """Give its reservation back."""
        ...

    async def reserve(self, sandbox: Sandbox, deadline: float | None) -> None:
        """Take the reservation of a paused sandbox again; waits for room until ``deadline``. Raises `Busy`."""
        ...

    def spawn(self, coroutine: object) -> asyncio.Task[None]: ...


class Sandbox:
    """``id`` is the full id; ``record`` what is on disk; ``life`` where it stands."""

    def __init__(self, keeper: Keeper, edge: str, record: Record, plan: LaunchPlan, backend: Backend, slot: int) -> None:
        self.keeper = keeper
        self.id = f"{edge}-{record.ulid}"
        self.record = record
        self.plan = plan
        self.backend = backend
        self.slot = slot
        self.life = Life()
        self.story = Story()
        self._mailbox: Mailbox | None = None
        self.clocks = Clocks(
            idle_s=record.spec.idle_timeout_ms / 1000,
            ttl_left_s=(record.ttl_left_ms or record.spec.ttl_ms) / 1000,
            paused_ttl_s=keeper.config.paused_ttl_ms / 1000,
            last_active=time.monotonic(),
        )
        self.last_active_ts = record.created_ts
        self.instance: Instance | None = None
        self.deadline = 0.0  # of its create, monotonic; 0 = none
        self.telling: Event | None = None  # on disk with what it tells of, or about to be
        self.recorded: asyncio.Future[None] | None = None  # its record is on disk; None = it has been for a while
        self._waiters: list[asyncio.Future[None]] = []
        self.serving = 0  # requests that a pause waits for
        self.served: asyncio.Future[None] | None = None  # … and how it hears of the last one's end
        self.polls: dict[asyncio.Timeout, None] = {}  # who waits for the end of an operation, and is woken by a pause
        self._packs: dict[str, tuple[PackOrder, asyncio.Future[PackedLayer]]] = {}
        self._launching: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None

    @property
    def mailbox(self) -> Mailbox:
        """Made when it is first needed: most sandboxes are never paused."""
        if self._mailbox is None:
            self._mailbox = Mailbox()
        return self._mailbox

    # ------------------------------------------------------------------ the state machine
    @property
    def state(self) -> State:
        return self.life.state

    def within(self, *states: State) -> bool:
        """Whether it is in one of these now (another await may have changed it: a type checker must not narrow)."""
        return self.life.state in states

    def feed(self, event: On, how: Exit | None = None, detail: str = "") -> None:
        """One event in, its effects out. Effects that take time become tasks whose outcome is the next event."""
        before = self.life
        if how is not None and how.wall_ts == 0.0:
            how = msgspec.structs.replace(how, wall_ts=time.time())
        self.life, effects = step(before, event, how, detail=detail, story=self.story)
        if self.life is before:
            return
        if self.life.exit is not None and self.life.exit.wall_ts == 0.0:
            self.life = msgspec.structs.replace(self.life, exit=msgspec.structs.replace(self.life.exit, wall_ts=time.time()))
        now = time.monotonic()
        if _stands_still(before.state) and not _stands_still(self.state):
            self.record.stood_ms, self.record.still_at = self.stood_ms, 0.0
        if self.state is State.RUNNING and before.state is not State.RUNNING:
            self.clocks.start(now)
        elif _stands_still(self.state) and not _stands_still(before.state):
            self.clocks.pause(now)
            self.record.still_at = now
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Do) -> None:
        if effect is Do.RECORD:
            self.write()
            self.keeper.store.post(self.record)
        elif effect is Do.RELEASE:
            if self._releasing is None:
                self._releasing = self.keeper.spawn(self._release())
        elif effect is Do.FREE_RESERVATION:
            self.keeper.release(self)
        elif effect is Do.ANNOUNCE_READY:
            self.keeper.ready(self)
        elif effect is Do.ANNOUNCE_FAILED:
            self.keeper.failed(self)
        elif effect is Do.ANNOUNCE_STOPPED:
            self.keeper.stopped(self)
        elif effect is Do.ANNOUNCE_PAUSED:
            self.keeper.changed(self, "paused", msgspec.to_builtins(self.record.paused) if self.record.paused else None)
        elif effect is Do.ANNOUNCE_RESUMED:
            self.keeper.changed(self, "resumed")
        elif effect is Do.WAKE_WAITERS:
            self.keeper.watch(self)
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        # LAUNCH, PAUSE, RESUME and CAPTURE are done by the coroutine that fed the event: it awaits their outcome.

    def write(self) -> Record:
        """The record as the life is now."""
        self.record.state = self.state
        self.record.exit = self.life.exit
        self.record.ttl_left_ms = int(self.clocks.ttl_left_s * 1000)
        if self.state is State.STOPPED and not self.record.ended_ts:
            self.record.ended_ts = time.time()
        return self.record

    async def changed(self, deadline: float | None = None) -> None:
        """Until the next event; raises `DeadlineExceeded`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            why = f": {self.life.release_error}" if self.life.release_error else ""
            raise DeadlineExceeded(f"still {self.state}{why}", sandbox=self.id, reason=str(self.state)) from None

    # ------------------------------------------------------------------ launch and release
    async def launch(self) -> None:
        """Its turn has come. Returns when it runs, has failed, or was stopped on the way."""
        if self.state is not State.PENDING:
            return
        self.feed(On.PLACED)
        faults.reached("create.placed")
        self._launching = asyncio.current_task()
        try:
            limit = asyncio.get_running_loop().time() + self.deadline - time.monotonic() if self.deadline else None
            async with asyncio.timeout_at(limit):
                await self.backend.prepare(self.plan)
                faults.reached("create.prepared")
                instance = await self.backend.launch(self.plan)
        except TimeoutError as error:
            self._launching = None
            late = bool(self.deadline) and time.monotonic() >= self.deadline
            self.feed(On.DEADLINE if late else On.LAUNCH_FAILED, detail="not ready within the create's deadline" if late else str(error))
            return
        except asyncio.CancelledError:
            self._launching = None
            if self.within(State.CREATING):  # the Edge itself is stopping
                raise
            return
        except (DsecError, OSError) as error:
            self._launching = None
            self.launch_error = error if isinstance(error, DsecError) else NodeError(f"launch failed: {error}")
            self.feed(On.LAUNCH_FAILED, detail=str(error))
            return
        except Exception as error:  # a bug in a backend must not leave a sandbox in creating
            self._launching = None
            log.error("sandbox.launch_crashed", sandbox=self.id, error=repr(error), exc_info=error)
            self.feed(On.LAUNCH_FAILED, detail=f"{type(error).__name__}: {error}")
            return
        faults.reached("create.launched")
        self._launching = None
        self.hold(instance)
        if not self.within(State.CREATING):
            return
        try:
            await self.keeper.opened(self)
        except DsecError as error:
            self.launch_error = error
            self.feed(On.LAUNCH_FAILED, detail=str(error))
            return
        faults.reached("create.opened")
        if not self.within(State.CREATING):
            return
        try:
            # It is on disk before it is told: a restarted Edge reaps what it does not know.
            if self.recorded is not None:
                await asyncio.shield(self.recorded)
            if not self.within(State.CREATING):
                return
            self.record.state = State.RUNNING
            if not whole_once_it_answers(self.record, self.plan):  # of the others a restarted Edge finds out
                await self.keeper.store.update(self.record, self.keeper.word(self, "running"))
        except DsecError as error:
            self.keeper.unsay(self)
            if self.within(State.CREATING):  # else the intake has undone it already, which may be over
                self.feed(On.LAUNCH_FAILED, detail=str(error))
            return
        faults.reached("create.running")
        self.recorded = None
        if self.within(State.CREATING):
            self.feed(On.READY)
            faults.reached("create.ready")

    launch_error: DsecError | None = None

    def hold(self, instance: Instance) -> None:
        """Take an instance, from a launch or an adoption, and hear of its end."""
        self.instance = instance
        instance.on_exit(self._on_exit)

    def _on_exit(self, how: Exit) -> None:
        if not self.keeper.over:
            self.feed(On.EXITED, how)

    async def _release(self) -> None:
        """The one door out. Retried until nothing is left; the reservation is kept that long."""
        launching = self._launching
        if launching is not None and launching is not asyncio.current_task():
            launching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([launching])
        faults.reached("stop.begun")
        pause, longest = RELEASE_PAUSE
        while True:
            try:
                if self.instance is not None:
                    with contextlib.suppress(DsecError, OSError):
                        await self.instance.link.close()
                    await self.instance.stop(self.grace)
                break
            except (DsecError, OSError) as error:
                log.warning("sandbox.release_failed", sandbox=self.id, error=str(error), pause=pause)
                self.feed(On.RELEASE_FAILED, detail=str(error))
            except Exception as error:
                log.error("sandbox.release_crashed", sandbox=self.id, error=repr(error), exc_info=error)
                self.feed(On.RELEASE_FAILED, detail=repr(error))
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)
        faults.reached("stop.released")
        self.instance = None
        self.record.state, self.record.exit = State.STOPPED, self.life.exit
        self.record.ended_ts = time.time()
        told = () if self.unrecorded else self.keeper.word(self, "stopped", self.ending())
        pause = RELEASE_PAUSE[0]
        while not self.unrecorded:
            try:
                await self.keeper.store.update(self.record, told)
                break
            except NodeError as error:
                log.error("sandbox.end_not_recorded", sandbox=self.id, error=str(error))
                if error.value == "closed":
                    break
                self.feed(On.RELEASE_FAILED, detail=f"it is freed, and its end is not on disk: {error.message}")
                await asyncio.sleep(pause)
                pause = min(longest, pause * 2)
        faults.reached("stop.recorded")
        self.feed(On.RELEASED)
        faults.reached("stop.told")

    grace = 0.0

    @property
    def unrecorded(self) -> bool:
        """Its record could not be written, so that no restart will ask for its end."""
        recorded = self.recorded
        return recorded is not None and recorded.done() and not recorded.cancelled() and recorded.exception() is not None

    def ending(self) -> dict[str, object]:
        """How it ended, as an event tells it."""
        how = self.life.exit
        return msgspec.to_builtins(how) if how is not None else {}

    # ------------------------------------------------------------------ verbs
    def gone(self) -> SandboxGone:
        how = self.life.exit
        reason = str(how.reason) if how else "unknown"
        detail = f": {how.detail}" if how and how.detail else ""
        code = f" with exit code {how.exit_code}" if how and how.exit_code is not None else ""
        return SandboxGone(f"has ended ({reason}{code}){detail}", sandbox=self.id, reason=reason)

    async def stop(self, grace: float = 0.0, how: Exit | None = None, deadline: float | None = None) -> None:
        """Never rejected, idempotent. Returns when it is stopped and its end is on disk."""
        self.grace = max(self.grace, grace)
        waited = self.within(State.PENDING)
        self.feed(On.STOP, how)
        faults.reached("stop.asked")
        while not self.within(State.STOPPED):
            await self.changed(deadline)
        if waited:  # it held nothing, so it did not pass through release, which writes the end
            await self.keeper.store.update(self.record)

    async def pause(self, deadline: float | None = None, *, idle: bool = False) -> Paused:
        """What it gave back. Idempotent. ``idle``: only if nobody uses it.

        Raises `Unsupported`, `SandboxGone`, `NodeError` (it runs on)."""
        return await self.mailbox.run(lambda: pausing.pause(self, deadline, idle))

    async def resume(self, deadline: float | None = None) -> None:
        """Idempotent. Waits for room on the node until ``deadline``. Raises `Busy`, `SandboxGone`, `NodeError` (it stays paused)."""
        if self.state is not State.RUNNING:
            await self.mailbox.run(lambda: pausing.resume(self, deadline))

    async def complete_pause(self) -> None:
        """After a restart of the Edge in the middle of one."""
        await self.mailbox.run(lambda: pausing.complete(self))

    async def outcome(self, op: str, wait: float) -> OpStatus:
        """Where an operation stands, once it has ended or ``wait`` seconds have passed. It does not wake a paused sandbox."""
        return await pausing.outcome(self, op, wait)

    @property
    def stood_ms(self) -> int:
        """How long it has stood still in its life so far, in milliseconds."""
        since = self.clocks.paused_since
        return self.record.stood_ms + (round((time.monotonic() - since) * 1000) if since else 0)

    async def pack_diff(self, op: str, order: PackOrder, deadline: float | None = None) -> PackedLayer:
        """What it changed becomes a layer; a paused sandbox stays paused. ``op`` again answers with the first one's outcome.

        It goes on when the caller is cancelled. Raises `Conflict` (the op was used for another order), `Unsupported`, `SandboxGone`,
        `InvalidRequest` and `NodeError` (it runs on).
        """
        if op not in self._packs:
            for old in [key for key, (_, task) in self._packs.items() if task.done()][: max(0, len(self._packs) - PACKS_KEPT + 1)]:
                del self._packs[old]
            if len(self._packs) >= PACKS_KEPT:
                raise Busy("it is being packed several times already", sandbox=self.id, reason="packing")
            work = asyncio.ensure_future(self.mailbox.run(lambda: self._pack_diff(order, deadline)))
            work.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # the caller may have left
            self._packs[op] = (order, work)
        first, task = self._packs[op]
        if first != order:
            raise Conflict("this operation was another order", field="op", value=op, sandbox=self.id, reason="request_id_conflict")
        return await asyncio.shield(task)

    async def _pack_diff(self, order: PackOrder, deadline: float | None) -> PackedLayer:
        await self.settled(deadline)
        if not self.backend.capabilities.pack_diff:
            missing = self.backend.capabilities.missing.get("pack_diff", "this backend cannot")
            raise Unsupported(f"cannot pack: {missing}", sandbox=self.id, reason="pack_diff")
        instance, origin = self.instance, self.state
        assert instance is not None
        self.feed(On.CAPTURE)
        faults.reached("capture.asked")
        try:
            if origin is State.RUNNING:  # an Edge that finds it in capturing thaws it
                await self.keeper.store.update(self.write())
            faults.reached("capture.recorded")
            if order.processes:
                await pausing.quiet(self)
            layer = await instance.pack_diff(order, origin is State.PAUSED, lambda: self.feed(On.CAPTURED))
            faults.reached("capture.packed")
        except Broken as error:
            if self.within(State.STOPPING, State.STOPPED):
                raise self.gone() from None
            self.feed(On.BROKEN, detail=str(error))
            raise
        except BaseException as error:
            if self.within(State.CAPTURING):
                self.feed(On.CAPTURE_UNDONE, detail=str(error))
            if isinstance(error, SandboxGone) or self.within(State.STOPPING, State.STOPPED):
                raise (self.gone() if self.life.exit is not None else error) from None
            if origin is State.RUNNING:
                self.keeper.store.post(self.write())
            raise
        self.story.add(f"packed into {layer.digest[:19]}")
        if self.within(State.STOPPING, State.STOPPED):
            raise self.gone()
        told = self.keeper.word(self, "packed", {"name": layer.name, "digest": layer.digest, "size": layer.size})
        try:
            await self.keeper.store.update(self.write(), told)
        except DsecError:
            self.keeper.unsay(self)
            raise
        faults.reached("capture.settled")
        self.keeper.changed(self, "packed")
        return layer

    async def settled(self, deadline: float | None) -> None:
        """Until it runs or is paused; raises `SandboxGone`."""
        while self.state not in SETTLED:
            if self.state is State.STOPPING:
                raise self.gone()
            await self.changed(deadline)
        if self.state is State.STOPPED:
            raise self.gone()

    @contextlib.asynccontextmanager
    async def awake(self, deadline: float | None = None, *, serving: bool = True) -> AsyncIterator[Instance]:
        """The running instance, for one request: a paused sandbox is resumed first, and none goes idle while a request runs.

        A pause waits a moment for requests that are being served; those that may last (``serving`` False) stand still with it.
        """
        async with self.in_use():
            while self.state is not State.RUNNING:
                await self.settled(deadline)
                if self.state is State.PAUSED:
                    await self.resume(deadline)
            instance = self.instance
            assert instance is not None
            self.serving += serving
            try:
                yield instance
            finally:
                self.serving -= serving
                if self.served is not None and not self.serving and not self.served.done():
                    self.served.set_result(None)

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Somebody uses it: it is not idle. Should it end meanwhile, the error says why it did."""
        self.clocks.busy += 1
        try:
            yield
        except (SandboxGone, Unavailable) as error:
            # The guest's channel broke, or would not open, before its end was heard: say why it ended.
            if isinstance(error, Unavailable) and error.reason != "guest_closed":
                raise
            with contextlib.suppress(DeadlineExceeded):
                while not self.within(State.STOPPED) and self.life.exit is None:
                    await self.changed(asyncio.get_running_loop().time() + 2.0)
            if self.life.exit is not None:
                raise self.gone() from None
            if error.reason == "exited":  # it lives: its socket is gone, and with it perhaps the whole state directory
                raise Unavailable(f"it has not ended, but {error.message}", sandbox=self.id, reason="agent_unreachable") from error
            raise
        finally:
            self.clocks.busy -= 1
            self.clocks.last_active = time.monotonic()
            self.last_active_ts = time.time()

    async def on_clock(self, event: On) -> None:
        """A clock ran out: pause or end it."""
        if event is On.IDLE and self.state is State.RUNNING and self.record.spec.on_idle == "pause" and self.backend.capabilities.pause:
            try:
                await self.pause(idle=True)
            except (Busy, NodeError, SandboxGone) as error:
                log.warning("sandbox.idle_pause_failed", sandbox=self.id, error=str(error))
                self.clocks.last_active = time.monotonic()
            if self.state is State.RUNNING:  # a request came first: its clock was taken from the sweep, and is put back
                self.keeper.watch(self)
            return
        self.feed(event)

    async def on_lease(self) -> None:
        """Its client is gone."""
        policy = self.record.spec.on_client_loss
        if policy == "keep":
            return
        if policy == "pause" and self.state in (State.RUNNING, State.PAUSED, State.PAUSING) and self.backend.capabilities.pause:
            try:
                await self.pause()
                return
            except (Busy, NodeError, SandboxGone) as error:
                log.warning("sandbox.lease_pause_failed", sandbox=self.id, error=str(error))
        self.feed(On.LEASE)

    async def usage(self) -> Usage | None:
        if self.instance is None or self.state in (State.STOPPING, State.STOPPED):
            return None
        with contextlib.suppress(DsecError, OSError):
            return await self.instance.usage()
        return None

    def info(self, usage: Usage | None = None) -> SandboxInfo:
        record, spec = self.record, self.record.spec
        return SandboxInfo(
            id=self.id,
            state=self.state,
            image=spec.image,
            project=record.project,
            principal=record.principal,
            labels=spec.labels,
            backend=spec.backend,
            layers=record.layers,
            created_ts=record.created_ts,
            last_active_ts=self.last_active_ts,
            idle_timeout_ms=spec.idle_timeout_ms,
            resources=spec.resources,
            usage=usage,
            exit=self.life.exit,
            stuck=self.life.release_error if self.state is State.STOPPING else "",
            degraded=record.degraded,
            command=self.plan.command,
            addresses=addresses(self.plan),
            lease=record.lease,
            paused=record.paused if self.state is State.PAUSED else None,
            checkpoint=spec.checkpoint,
        )


def whole_once_it_answers(record: Record, plan: LaunchPlan) -> bool:
    """Whether nothing more is done to one that starts when its agent answers: no network, no way of a worker's. A restarted Edge that finds
    it answering knows then that it runs, whatever is on disk; of the others it is on disk before anybody is told."""
    return plan.wiring is None and record.spec.worker is None


def _stands_still(state: State) -> bool:
    """Whether idle and absolute clocks stand."""
    return state in (State.PAUSED, State.CAPTURING)


def addresses(plan: LaunchPlan) -> tuple[str, ...]:
    """IPv4 first; none where it has no network."""
    return tuple(text for text in (plan.wiring.address4, plan.wiring.address6) if text) if plan.wiring is not None else ()


def ended(record: Record, edge: str) -> SandboxInfo:
    """A sandbox that has ended and is still remembered."""
    spec = record.spec
    return SandboxInfo(
        id=f"{edge}-{record.ulid}",
        state=State.STOPPED,
        image=spec.image,
        project=record.project,
        principal=record.principal,
        labels=spec.labels,
        backend=spec.backend,
        layers=record.layers,
        created_ts=record.created_ts,
        resources=spec.resources,
        exit=record.exit or Exit(reason=ExitReason.BROKEN),
        lease=record.lease,
        checkpoint=spec.checkpoint,
    )
