"""The command log of an Edge's sandboxes: a number for every command, and results kept under a key.

A command with a ``step`` is recorded before it starts and again, with its result, before anybody hears of its end: who asks for the same
step again gets that result and runs nothing, also after restarts of client and Edge. The Edge itself waits for the end of such a command.
All others are numbered in memory and written down within a second.

What an Edge that died had begun is asked for in the sandbox, where operations are remembered for ten minutes (dsec/backends/guest). Only
a step that the sandbox cannot have forgotten, and does not know, is started anew; of one that it may have forgotten the outcome is not
known, and that is the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from dsec import faults
from dsec.actors.outbox import Outbox
from dsec.actors.store import CommandRow, Store, Told
from dsec.errors import Conflict, DsecError, InvalidRequest, NodeError, NotFound, SandboxGone
from dsec.model import Captured, Command, ExecSpec, OpStatus

if TYPE_CHECKING:
    from dsec.actors.sandbox import Sandbox

log = structlog.get_logger("dsec.commands")

KEEP_PLAIN = 1_000  # commands without a step that are kept of each sandbox
IN_MEMORY = 256
AT_ONCE = 64  # commands that are not written down yet; also the gap in numbers after an Edge died
MOST_STEPS = 10_000  # of one sandbox
MOST_BYTES = 256 << 20  # of kept results of one sandbox
KEPT_PART = 64 << 10  # bytes kept of head and of tail of each stream
TOLD_PART = 4 << 10  # … in the event that copies a result
SHOWN = 512  # characters of a command
REMEMBERED_S = 540.0  # for how long the sandbox surely knows an operation after its end
RESULTS = 64  # results at hand
COPIED = ("seq", "op", "step", "exit_code", "signal", "timed_out", "oom_killed", "duration_ms")

_encode = msgspec.msgpack.Encoder().encode
_status = msgspec.msgpack.Decoder(OpStatus).decode


class Step(msgspec.Struct, kw_only=True):
    """A step of a sandbox as this Edge knows it."""

    seq: int
    op: str
    digest: str
    command: Command | None  # until its end is known
    begun: float = 0.0
    done: bool = False
    result: asyncio.Future[OpStatus] | None = None  # while this Edge waits for it


class Kept(msgspec.Struct, frozen=True):
    """What is written down of one command: the digest tells another command under the same step."""

    command: Command
    digest: str = ""
    begun: float = 0.0  # by the machine's monotonic clock


_kept = msgspec.msgpack.Decoder(Kept).decode


class Log:
    """Of one sandbox."""

    def __init__(self, *, loaded: bool) -> None:
        self.next = 1
        self.trimmed = 0
        self.over = False
        self.steps: dict[str, Step] = {}
        self.bytes = 0
        self.plain: OrderedDict[int, Command] = OrderedDict()
        self.by_op: dict[str, int] = {}
        self.dirty: dict[int, Command] = {}
        self.lock = asyncio.Lock()  # one step at a time is looked up and begun
        self.loaded = loaded

    def number(self) -> int:
        self.next += 1
        return self.next - 1


class Commands:
    """Of one Edge. ``outbox`` copies results to the stream of events; ``spawn`` keeps tasks; ``live(ulid)``: whether
    the sandbox has not ended."""

    def __init__(self, store: Store, outbox: Outbox, spawn: Callable[[object], object], live: Callable[[str], bool]) -> None:
        self._store = store
        self._outbox = outbox
        self._spawn = spawn
        self._live = live
        self._logs: dict[str, Log] = {}
        self._results: OrderedDict[tuple[str, int], OpStatus] = OrderedDict()
        self._dirty: set[str] = set()
        self._fresh: set[str] = set()
        self._flushing = asyncio.Lock()

    # ------------------------------------------------------------------ every command
    def created(self, ulid: str) -> None:
        """A sandbox of this Edge's own: nothing of it need be read."""
        self._fresh.add(ulid)

    def left(self, ulid: str) -> None:
        """It has ended: what is asked of it from now on is read from the disk."""
        self._fresh.discard(ulid)
        its = self._logs.get(ulid)
        if its is not None:
            its.over = True
            self._dirty.add(ulid)  # the next flush lets go of it

    def forgotten(self, ulid: str) -> None:
        self._fresh.discard(ulid)
        self._logs.pop(ulid, None)

    async def begun(self, ulid: str, op: str, spec: ExecSpec) -> int:
        """The number of a command without a step; the same for the same ``op``."""
        its = await self._log(ulid)
        if (seq := its.by_op.get(op)) is not None:
            return seq
        seq = its.number()
        self._remember(ulid, its, _command(seq, op, "", spec))
        if len(its.dirty) >= AT_ONCE:
            await self.flush()
        return seq

    def ended(self, ulid: str, status: OpStatus) -> int:
        """Somebody has heard of the end of an operation; its number, 0 when it has none (any more)."""
        its = self._logs.get(ulid)
        seq = its.by_op.get(status.op, 0) if its is not None else 0
        if its is not None and seq in its.plain and not status.running and not its.plain[seq].ended_ts:
            self._remember(ulid, its, _with_end(its.plain[seq], status))
        return seq

    async def flush(self) -> None:
        """Write down what is not yet. Called by the Edge's sweep and at its end."""
        async with self._flushing:  # who comes second finds all of it written
            ulids, self._dirty = self._dirty, set()
            rows: list[CommandRow] = []
            taken: dict[str, dict[int, Command]] = {}
            trims: list[tuple[str, int]] = []
            for ulid in ulids:
                if (its := self._logs.get(ulid)) is None:
                    continue
                dirty, its.dirty = its.dirty, {}
                taken[ulid] = dirty
                rows += [CommandRow(ulid=ulid, seq=seq, entry=_encode(Kept(command)), done=True) for seq, command in dirty.items()]
                if its.next > its.trimmed + 2 * KEEP_PLAIN:
                    its.trimmed = its.next - KEEP_PLAIN
                    trims.append((ulid, its.trimmed))
            try:
                if rows:
                    await self._store.put_commands(rows)
                if trims:
                    await self._store.trim_commands(trims)
            except NodeError as error:
                log.error("commands.not_written", count=len(rows), error=str(error))
                self._again(taken)
            for ulid in ulids:
                if (its := self._logs.get(ulid)) is not None and its.over and not its.dirty:
                    del self._logs[ulid]

    def _again(self, taken: dict[str, dict[int, Command]]) -> None:
        """What could not be written is with the next; of each sandbox as much as does not make every command wait for a try."""
        for ulid, dirty in taken.items():
            if (its := self._logs.get(ulid)) is not None:
                its.dirty = dict(sorted((dirty | its.dirty).items())[-AT_ONCE // 2 :])
                self._dirty.add(ulid)

    async def listing(self, ulid: str, after: int, limit: int) -> tuple[tuple[Command, ...], bool]:
        """Commands behind number ``after``, and whether there are more."""
        await self.flush()
        found = [_kept(row.entry).command for row in await self._store.commands(ulid) if row.seq > after]
        return tuple(found[:limit]), len(found) > limit

    # ------------------------------------------------------------------ steps
    async def step(
        self, sandbox: Sandbox, step: str, op: str, spec: ExecSpec | None, deadline: float | None, wait: float
    ) -> tuple[OpStatus, int]:
        """Run a step unless it was run; its status after ``wait`` seconds at most, and its number. Without a ``spec`` it is only asked
        for.

        Raises `NotFound` (nothing to ask for); `Conflict` with reason ``step_conflict`` (the step was another command),
        ``step_unknown`` (an Edge died in the middle of it, and nobody knows how it ended) or ``step_log_full``; and what starting a
        command raises, then nothing is recorded.
        """
        ulid, digest = sandbox.record.ulid, _digest(spec) if spec is not None else ""
        if not 0 < len(step) <= 128:
            raise InvalidRequest("must have 1 to 128 characters", field="step", value=step)
        its = await self._log(ulid)
        async with its.lock:
            known = its.steps.get(step)
            if known is None and spec is None:
                raise NotFound("no such step", field="step", value=step, sandbox=sandbox.id)
            if known is not None and spec is not None and known.digest != digest:
                raise Conflict(
                    "this step was another command", field="step", value=step, sandbox=sandbox.id, reason="step_conflict",
                    fix="give each step of a job a key of its own",
                )  # fmt: skip
            if known is None:
                assert spec is not None
                known = await self._begin(sandbox, its, step, op, spec, digest, deadline)
            elif not known.done and known.result is None:
                await self._take_up(sandbox, step, known, spec, deadline)
            result = known.result
        if result is None:
            return await self._result(ulid, known.seq), known.seq
        done, _ = await asyncio.wait([result], timeout=wait)
        return (result.result() if done else OpStatus(op=known.op, running=True)), known.seq

    async def recorded(self, ulid: str, step: str = "", op: str = "") -> tuple[OpStatus, int] | None:
        """The result of a step that has ended, by its key or its operation; None when there is none."""
        its = await self._log(ulid)
        for key, known in its.steps.items():
            if known.done and (key == step or (op and known.op == op)):
                return await self._result(ulid, known.seq), known.seq
        return None

    async def recover(self, find: Callable[[str], Sandbox | None]) -> None:
        """After a restart: wait for the steps that were begun."""
        for row in await self._store.open_steps():
            sandbox = find(row.ulid)
            if sandbox is None or sandbox.instance is None:
                continue
            its = await self._log(row.ulid)
            known = its.steps.get(row.step)
            if known is not None and not known.done and known.result is None:
                self._wait(sandbox, row.step, known)

    # ------------------------------------------------------------------ inside
    async def _begin(self, sandbox: Sandbox, its: Log, step: str, op: str, spec: ExecSpec, digest: str, deadline: float | None) -> Step:
        if len(its.steps) >= MOST_STEPS or its.bytes >= MOST_BYTES:
            text = f"{len(its.steps)} steps with {its.bytes >> 20} MiB are kept of this sandbox already"
            raise Conflict(text, field="step", value=step, sandbox=sandbox.id, reason="step_log_full", fix="use a new sandbox")
        ulid = sandbox.record.ulid
        async with sandbox.awake(deadline) as instance:
            command = _command(its.number(), op, step, spec)
            known = Step(seq=command.seq, op=op, digest=digest, command=command, begun=time.monotonic())
            faults.reached("step.begun")
            await self._put(ulid, step, known, command)
            its.steps[step] = known
            faults.reached("step.recorded")
            try:
                await instance.link.start(op, spec)
                faults.reached("step.started")
            except (InvalidRequest, NotFound, Conflict):  # nothing runs
                del its.steps[step]
                await self._store.drop_commands(ulid, [known.seq])
                raise
        self._wait(sandbox, step, known)
        return known

    async def _take_up(self, sandbox: Sandbox, step: str, known: Step, spec: ExecSpec | None, deadline: float | None) -> None:
        """Begun, and nobody waits for it: by an Edge that died, or its start was not answered."""
        async with sandbox.awake(deadline) as instance:
            try:
                await instance.link.wait(known.op, 0)
            except NotFound:
                if time.monotonic() - known.begun > REMEMBERED_S:
                    raise Conflict(
                        "it was begun and its node died; whether it ran is not known", field="step", value=step, sandbox=sandbox.id,
                        reason="step_unknown", fix="look at what it should have done, and go on under another key",
                    ) from None  # fmt: skip
                if spec is None:
                    raise
                faults.reached("step.asked")
                await instance.link.start(known.op, spec)
                faults.reached("step.again")
        self._wait(sandbox, step, known)

    def _wait(self, sandbox: Sandbox, step: str, known: Step) -> None:
        known.result = asyncio.get_running_loop().create_future()
        known.result.add_done_callback(lambda future: None if future.cancelled() else future.exception())  # maybe nobody asks
        self._spawn(self._finish(sandbox, step, known, known.result))

    async def _finish(self, sandbox: Sandbox, step: str, known: Step, future: asyncio.Future[OpStatus]) -> None:
        ulid, begun = sandbox.record.ulid, known.command
        assert begun is not None
        try:
            while (status := await sandbox.outcome(known.op, 3600.0)).running:
                pass
            status = _bounded(status)
            command = _with_end(begun, status)
            faults.reached("step.ended")
            event = self._outbox.make("step", sandbox.record, _copy(command, status))
            try:
                await self._put(ulid, step, known, command, status, [self._outbox.row(event)])
            except BaseException:
                self._outbox.drop(event)
                raise
            faults.reached("step.kept")
        except BaseException as error:
            known.result = None  # who asks again finds out
            stopping = isinstance(error, asyncio.CancelledError)
            told = NodeError("the Edge is stopping", reason="stopping") if stopping else NodeError(f"its end is not known yet: {error}")
            if not future.done():
                future.set_exception(error if isinstance(error, DsecError) else told)
            if not isinstance(error, DsecError):
                raise
            if not isinstance(error, SandboxGone | NotFound):
                log.warning("commands.step_not_recorded", sandbox=sandbox.id, step=step, error=str(error))
            return
        known.done, known.result, known.command = True, None, None
        (await self._log(ulid)).bytes += _size(status)
        self._at_hand(ulid, known.seq, status)
        future.set_result(status)
        self._outbox.send(event)
        faults.reached("step.told")

    async def _put(
        self, ulid: str, step: str, known: Step, command: Command, status: OpStatus | None = None, told: Sequence[Told] = ()
    ) -> None:
        entry = _encode(Kept(command, known.digest, known.begun))
        result = b"" if status is None else _encode(status)
        row = CommandRow(ulid=ulid, seq=known.seq, step=step, done=status is not None, entry=entry, result=result)
        await self._store.put_commands([row], told)

    async def _result(self, ulid: str, seq: int) -> OpStatus:
        if (status := self._results.get((ulid, seq))) is None:
            status = _status(await self._store.result(ulid, seq))
            self._at_hand(ulid, seq, status)
        return status

    def _at_hand(self, ulid: str, seq: int, status: OpStatus) -> None:
        self._results[ulid, seq] = status
        while len(self._results) > RESULTS:
            self._results.popitem(last=False)

    async def _log(self, ulid: str) -> Log:
        its = self._logs.get(ulid)
        if its is None:
            its = self._logs[ulid] = Log(loaded=ulid in self._fresh)
            self._fresh.discard(ulid)
            if not self._live(ulid):  # read for one question: the next flush lets go of it again
                its.over = True
                self._dirty.add(ulid)
        if not its.loaded:
            async with its.lock:
                if not its.loaded:
                    await self._load(ulid, its)
        return its

    async def _load(self, ulid: str, its: Log) -> None:
        rows = await self._store.commands(ulid)
        for row in rows:
            kept = _kept(row.entry)
            if row.step:
                its.steps[row.step] = Step(
                    seq=row.seq,
                    op=kept.command.op,
                    digest=kept.digest,
                    command=None if row.done else kept.command,
                    begun=kept.begun,
                    done=row.done,
                )
                its.bytes += min(kept.command.stdout + kept.command.stderr, 4 * KEPT_PART)
        if rows:
            its.next = rows[-1].seq + AT_ONCE + 1  # some may have had numbers that were not written down
        its.loaded = True

    def _remember(self, ulid: str, its: Log, command: Command) -> None:
        its.plain[command.seq] = its.dirty[command.seq] = command
        its.by_op[command.op] = command.seq
        self._dirty.add(ulid)
        while len(its.plain) > IN_MEMORY:
            _, old = its.plain.popitem(last=False)
            its.by_op.pop(old.op, None)


def _command(seq: int, op: str, step: str, spec: ExecSpec) -> Command:
    argv: list[str] = []
    left = SHOWN
    for word in spec.argv:
        argv.append(word[:left])
        left -= len(word)
        if left <= 0:
            break
    return Command(seq=seq, op=op, step=step, argv=tuple(argv), user=spec.user, started_ts=time.time())


def _with_end(command: Command, status: OpStatus) -> Command:
    return msgspec.structs.replace(
        command,
        ended_ts=time.time(),
        exit_code=status.exit_code,
        signal=status.signal,
        timed_out=status.timed_out,
        oom_killed=status.oom_killed,
        duration_ms=status.duration_ms,
        stdout=status.stdout.total,
        stderr=status.stderr.total,
    )


def _digest(spec: ExecSpec) -> str:
    return hashlib.sha256(_encode(spec)).hexdigest()[:32]


def _cut(part: Captured, most: int) -> Captured:
    if len(part.head) <= most and len(part.tail) <= most:
        return part
    return Captured(head=part.head[:most], tail=part.tail[-most:], total=part.total)


def _bounded(status: OpStatus) -> OpStatus:
    return msgspec.structs.replace(status, stdout=_cut(status.stdout, KEPT_PART), stderr=_cut(status.stderr, KEPT_PART))


def _size(status: OpStatus) -> int:
    return sum(len(part.head) + len(part.tail) for part in (status.stdout, status.stderr))


def _copy(command: Command, status: OpStatus) -> dict[str, object]:
    """A result as an event carries it: text, and less of it."""
    streams = {}
    for name, part in (("stdout", status.stdout), ("stderr", status.stderr)):
        small = _cut(part, TOLD_PART)
        streams[name] = small.data().decode("utf-8", "replace")
        streams[f"{name}_bytes"] = str(part.total)
    told = msgspec.to_builtins(command)
    return {key: told[key] for key in COPIED if key in told} | streams
