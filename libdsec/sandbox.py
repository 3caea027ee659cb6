"""One sandbox, as its user holds it. Every call goes straight to the sandbox's Edge; the Scheduler is not in the way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dsec.bus import subjects
from dsec.bus.messages import (
    CommandsReply,
    CommandsRequest,
    Empty,
    ExecReply,
    ExecRequest,
    InfoReply,
    InputReply,
    InputRequest,
    LabelRequest,
    LogReply,
    OpsReply,
    PackReply,
    PackRequest,
    PauseReply,
    SignalRequest,
    StopRequest,
)
from dsec.errors import Busy, DeadlineExceeded, DsecError, InvalidRequest, NotFound, SandboxGone, Unavailable
from dsec.model import (
    Checkpoint,
    Command,
    ExecSpec,
    Exit,
    ImageConfig,
    LayerRef,
    OpStatus,
    PackedLayer,
    Paused,
    SandboxId,
    SandboxInfo,
    State,
)
from libdsec import names
from libdsec.files import Files
from libdsec.names import Named
from libdsec.results import ExecResult
from libdsec.session import Session, shell_specs
from libdsec.spec import exec_spec, layer_name, milliseconds, size, text, user_name, whole
from libdsec.wire import FIRST_PAUSE, LONGEST_PAUSE, is_silence, unanswered

if TYPE_CHECKING:
    from libdsec.checkpoint import Restored
    from libdsec.client import Client
    from libdsec.forward import Connection, Forward
    from libdsec.process import Process

T = TypeVar("T")

WAITS = (1.0, 3.0, 10.0)  # seconds of the first long polls of an exec; short at first, so that a lost answer costs little
GRACE = 30.0  # seconds after an exec's own deadline in which its result may still come
BUSY_PATIENCE = 60.0  # seconds that a command waits for room on its node or in its sandbox, if its own time-out is not shorter
LOST_AFTER = 5.0  # seconds of silence after which the Watcher's view is asked whether the node is lost
STUCK_AFTER = 20.0  # seconds for which the agent of a running command may be silent
PATIENCE = 120.0  # seconds of silence that an operation without a deadline bears
INPUT_PIECE = 128 * 1024


def new_op() -> str:
    return os.urandom(16).hex()


class Sandbox(Named):
    """A handle. Made by `Client.sandbox`, `create`, `burst`, `attach`; it holds nothing itself.

    Once the sandbox has ended every method raises `SandboxGone` whose ``reason`` is the Exit's reason.
    """

    _meant = names.SANDBOX

    def __init__(
        self,
        client: Client,
        sandbox_id: SandboxId,
        *,
        labels: Mapping[str, str] | None = None,
        layers: tuple[LayerRef, ...] = (),
        degraded: tuple[str, ...] = (),
        exec_timeout: float | None = None,
    ) -> None:
        self._client = client
        self._wire = client._wire
        self._id = sandbox_id
        self._exec_timeout = exec_timeout  # seconds; 0 = none, None = not known here
        self._gone: SandboxGone | None = None
        self._stopped = False
        self.id = str(sandbox_id)
        self.labels: dict[str, str] = dict(labels or {})
        self.layers = layers
        self.degraded = degraded  # what its node does not enforce
        self.files = Files(self)

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a sandbox's handle cannot be pickled", fix="send sandbox.id and call client.attach(id) in the other process")

    # ------------------------------------------------------------------ commands
    async def exec(
        self,
        cmd: str | Iterable[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        check: bool = False,
        step: str = "",
        wall_timeout: bool = False,
    ) -> ExecResult:
        """Run a command to its end.

        Args:
            cmd: a string goes to ``/bin/sh -c``, a list is the argv.
            timeout: seconds, after which the whole tree of the command is killed (`ExecResult.timed_out`); None = the sandbox's
                default (600), 0 = no limit.
            cwd, env, user: in place of, added to, in place of the sandbox's.
            stdin: what the command reads; without it ``/dev/null``.
            check: raise `ExecFailed` unless it exits with 0.
            step: a key of the caller's. The result is kept under it, on disk before it is answered: the same key again, by whatever
                client and after whatever restart, answers with that result and runs nothing. 64 KiB of the beginning and of the end of
                each stream are kept. Cancelling leaves it running; after its time-out it is killed as any other.
            wall_timeout: the time-out goes on while the sandbox is paused; else it stands still with it.

        The request survives restarts of the Edge and of the bus: it is repeated under the same operation id. Cancelling kills the
        command inside the sandbox. A background process that keeps the output open does not hold the result back.

        Raises:
            InvalidRequest: a NUL byte, an argument above 128 KiB, a wrong directory or user name.
            NotFound: no such program, directory or user. SandboxGone: it has ended. Unavailable: nobody answered in time.
            Conflict: the step was another command, or a node died in the middle of it and nobody knows whether it ran.
        """
        spec = exec_spec(cmd, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin is not None, wall_timeout=wall_timeout)
        op = new_op()
        if step:
            if stdin is not None:
                raise InvalidRequest("a step has no stdin", field="stdin", fix="write a file and let the command read it")
            text(step, "step", limit=128)
            # The same for every client: who asks again while it runs asks for the same operation.
            op = hashlib.sha256(f"{self.id} {step}".encode()).hexdigest()[:32]
        try:
            if stdin is None:
                status = await self._run(op, spec, step)
            else:
                status = await self._run_fed(op, spec, stdin.encode() if isinstance(stdin, str) else bytes(stdin))
        except asyncio.CancelledError:
            if not step:  # a step goes on: it will be asked for again
                await self._kill_quietly(op)
            raise
        result = ExecResult.of(status)
        return result.check(cmd if isinstance(cmd, str) else list(cmd)) if check else result

    def start(
        self,
        cmd: str | Iterable[str],
        *,
        timeout: float | None = 0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = True,
        tty: bool = False,
        rows: int = 24,
        cols: int = 80,
    ) -> Process:
        """A command whose output is followed: ``async with sandbox.start(cmd) as process``. It is killed when the block ends.

        ``timeout`` seconds are its life; 0 (the default) is no limit. ``tty`` gives it a terminal of ``rows`` by ``cols``.
        """
        from libdsec.process import Process

        spec = exec_spec(
            cmd, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, background=True, stream=True, tty=tty, rows=rows, cols=cols
        )
        return Process(self, new_op(), spec)

    def process(self, op: str, *, stdout: int = 0, stderr: int = 0, view: bool = False) -> Process:
        """Take up an operation that was started before (`Process.op`), also by another client; its output comes as far as it is kept.

        ``stdout`` and ``stderr`` are the offsets to begin from. The newest reader holds the streams: the command waits for it. Others,
        and those with ``view``, look on beside it and may miss what the sandbox no longer keeps (`OutputEvent.gap`).
        """
        from libdsec.process import Process

        return Process(self, op, None, offsets=(stdout, stderr), view=view)

    def session(
        self, *, shell: str | None = None, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None
    ) -> Session:
        """One shell kept open: ``async with sandbox.session() as shell``. Directory, variables, functions and background jobs persist.

        ``shell`` is ``bash`` or ``sh`` or the path of one; None is bash where the sandbox has it.
        """
        return Session(self, new_op(), shell_specs(shell, cwd=cwd, env=env, user=user))

    def attach_session(self, session: str) -> Session:
        """Take up a session that was opened before (`Session.id`), also by another client. It goes on after the block."""
        return Session(self, session, ())

    async def sessions(self) -> list[OpStatus]:
        """The sessions that run; ``op`` is what `attach_session` takes."""
        return [op for op in await self.ops() if op.kind == "session" and op.running]

    def terminal(
        self,
        cmd: str | Iterable[str] = ("/bin/sh", "-i"),
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """A command on a terminal of its own, to be driven with `Process.write` and `Process.expect`."""
        return self.start(cmd, cwd=cwd, env=env, user=user, tty=True, rows=rows, cols=cols)

    def connect(self, port: int | str, *, user: str | None = None) -> Connection:
        """A raw stream to a TCP port on the sandbox's loopback (127.0.0.1, then ::1) or to the path of a Unix socket inside.

        ``async with sandbox.connect(8000) as c: await c.send(b"…"); await c.receive()``. Raises `SandboxError` with reason
        ``ECONNREFUSED`` when nobody listens. The sandbox's network may be closed.
        """
        from libdsec.forward import Connection, target

        return Connection(self, target(port), user=user_name(user))

    def expose(self, port: int | str, local_port: int = 0, *, host: str = "127.0.0.1") -> Forward:
        """A local listener whose connections end at ``port`` (or a Unix socket's path) inside, many at one time.

        ``async with sandbox.expose(8000) as address: … address.host, address.port, address.url``. ``local_port`` 0 takes a free one.
        It is TCP: HTTP with streaming bodies, WebSocket and anything else pass. Raises `Busy` when the local port is taken.
        """
        from libdsec.forward import Forward

        return Forward(self, port, local_port, host)

    async def ops(self) -> list[OpStatus]:
        """Operations that the sandbox still remembers, without their output."""
        return list((await self._request("ops", Empty(), OpsReply)).ops)

    # ------------------------------------------------------------------ life
    async def stop(self, grace: float = 0.0) -> None:
        """End it: SIGTERM, ``grace`` seconds, SIGKILL; then everything it held is released. Stopping what has ended is fine."""
        message = StopRequest(grace_ms=milliseconds(grace, "grace"))
        try:
            await self._request("stop", message, Empty, timeout=grace + 60.0, each=grace + 15.0)
        except SandboxGone:
            pass
        self._stopped = True
        self._client._leases.release(self._id)  # what ended it, and when, its node goes on telling

    async def kill(self) -> None:
        """`stop` without a grace."""
        await self.stop()

    async def terminate(self, grace: float = 0.0) -> None:
        """`stop`."""
        await self.stop(grace)

    async def is_running(self) -> bool:
        """Whether it lives and can be used: also one that is paused, which the next request resumes."""
        try:
            state = (await self.info()).state
        except (SandboxGone, NotFound):
            return False
        return state not in (State.STOPPING, State.STOPPED)

    async def pack_diff(
        self,
        name: str = "",
        *,
        scrub: Iterable[str] = (),
        max_entries: int = 1_000_000,
        max_bytes: int | str = "16GiB",
        image: ImageConfig | None = None,
        timeout: float = 600.0,
    ) -> PackedLayer:
        """Make a layer of all that this sandbox changed: ``client.sandbox(image, workspace=[layer])`` starts from it at once.

        It stands still while its files are read (``frozen_ms`` of the result); a paused one stays paused. Deleted files stay deleted in
        the layer. The layer lies in the store of the sandbox's node, and means what it should above the layers that the sandbox had.

        Args:
            name: of the layer; default ``packed/<the sandbox's ulid>``. An existing name is moved, the older layer keeps its digest.
            scrub: globs of what is left out besides /tmp, /var/tmp, /run and apt's caches: ``/home/user/.cache``, ``*.pyc``, ``/a/**/b``.
            max_entries, max_bytes: more than these are refused.
            image: make it an image of its own, with this configuration: ``client.sandbox(layer)`` then has all the layers below as well.
            timeout: seconds.

        Raises:
            InvalidRequest: a glob, the name, too many entries or bytes, a device node. NodeError: the node's disk. In all of these the
            sandbox runs on. Unsupported: its backend cannot. SandboxGone.
        """
        globs = tuple(text(glob, f"scrub[{at}]", limit=1024) for at, glob in enumerate([scrub] if isinstance(scrub, str) else scrub))
        request = PackRequest(
            op=new_op(),
            name=layer_name(name, "name") if name else f"packed/{self._id.ulid}",
            scrub=globs,
            max_entries=whole(max_entries, "max_entries", 1, 100_000_000),
            max_bytes=size(max_bytes, "max_bytes"),
            image=image,
        )
        limit = milliseconds(timeout, "timeout") / 1000
        # Repeated under the same op: an Edge that died took the first request along.
        return (await self._request("pack_diff", request, PackReply, timeout=limit, each=5.0)).layer

    async def checkpoint(self, name: str = "", *, kind: str = "disk", max_bytes: int | str = "16GiB", timeout: float = 600.0) -> Checkpoint:
        """Keep the state that it has now: ``await client.restore(checkpoint, 4)`` makes sandboxes that begin from it.

        Its files are kept as they are at one moment: it stands still while they are read (``frozen_ms``); a paused one stays paused. It is
        kept on its node until `Client.drop_checkpoints`, and beyond that while a sandbox or a later checkpoint stands on it.

        Args:
            name: for people; it need not be the only one of that name.
            kind: "disk": all files, /tmp and /run too, without /dev/shm. "memory": processes as well, which go on in what begins from it
                (docs/memory.md); where they cannot be kept it is `Unsupported` with the reason.
            max_bytes: more than these in changed files are refused. timeout: seconds.

        Raises: as `pack_diff`. In all cases but `SandboxGone` it runs on.
        """
        from libdsec.checkpoint import capture

        return await capture(self, name, kind, max_bytes, timeout)

    async def fork(
        self,
        n: int = 1,
        *,
        kind: str = "disk",
        labels: Mapping[str, str] | None = None,
        min_ready: int = 1,
        on_client_loss: str = "",
        max_bytes: int | str = "16GiB",
        timeout: float = 600.0,
    ) -> Restored:
        """Capture once, and make ``n`` sandboxes that begin from it; this one goes on. Arguments and errors of `checkpoint` and
        `Client.restore`. The capture goes when the last of them has ended."""
        from libdsec.checkpoint import fork

        return await fork(self, n, kind, labels, min_ready, on_client_loss, max_bytes, timeout)

    async def pause(self) -> Paused:
        """Freeze it and send its memory to its node's swap; what that gave back. It then holds no reservation. Idempotent.

        The next request resumes it: a command, a file, a shell, a connection. Waiting for a command that runs is none. Time-outs of
        commands and of the sandbox stand still. Where a node has no swap the memory stays, and `Paused.note` says so.
        """
        return (await self._request("pause", Empty(), PauseReply, timeout=120.0, each=45.0)).paused

    async def resume(self) -> None:
        """Thaw it. Idempotent. Raises `Busy` when its node has no room for it within half a minute."""
        await self._request("resume", Empty(), Empty, timeout=60.0, each=45.0)

    async def info(self) -> SandboxInfo:
        """State, resources, usage; for one that has ended, its exit (as long as its Edge remembers it)."""
        reply = await self._client._request(self._id, "info", Empty(), InfoReply)
        self.labels = dict(reply.info.labels)
        return reply.info

    async def set_labels(self, labels: Mapping[str, str] | None = None, *, remove: Iterable[str] = ()) -> dict[str, str]:
        """Set labels and take others away; all labels as they are then."""
        from libdsec.spec import labels_map

        request = LabelRequest(set=labels_map(labels or {}), remove=tuple(remove))
        self.labels = dict((await self._request("label", request, InfoReply)).info.labels)
        return dict(self.labels)

    async def wait(self, timeout: float | None = None) -> Exit:
        """How the sandbox ended, once it has. Raises `DeadlineExceeded` after ``timeout`` seconds."""
        end = None if timeout is None else asyncio.get_running_loop().time() + timeout
        pause = 0.05
        while True:
            info = await self.info()
            if info.state is State.STOPPED:
                return info.exit or Exit(reason="requested")  # type: ignore[arg-type]
            if end is not None and asyncio.get_running_loop().time() + pause > end:
                raise DeadlineExceeded(f"still {info.state} after {timeout} s", sandbox=self.id)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 2.0)

    async def log(self) -> list[str]:
        """The story of its life, a line an event."""
        return list((await self._client._request(self._id, "log", Empty(), LogReply)).lines)

    async def commands(self, after: int = 0) -> list[Command]:
        """What was run in it, by number, behind the number ``after``; also of a sandbox that has ended, while it is remembered."""
        found: list[Command] = []
        while True:
            request = CommandsRequest(after=found[-1].seq if found else after)
            reply = await self._client._request(self._id, "commands", request, CommandsReply)
            found += reply.commands
            if not reply.more:
                return found

    # ------------------------------------------------------------------ inside
    def _subject(self, verb: str) -> str:
        return subjects.sandbox(self._wire.unit, verb, self._wire.caller, self._id)

    def _ended(self, reason: str) -> None:
        if self._gone is None:
            self._gone = SandboxGone(f"has ended ({reason})" if reason else "has ended", sandbox=self.id, reason=reason)
        self._client._leases.release(self._id)

    async def _request(
        self, verb: str, message: Any, type_: type[T], *, timeout: float = 30.0, each: float = 10.0, repeat: bool = True, bulk: bool = False
    ) -> T:
        """A request about this sandbox; remembers when it learns that it has ended."""
        self._wire.guard()
        if self._gone is not None:
            raise SandboxGone(self._gone.message, sandbox=self.id, reason=self._gone.reason)
        try:
            return await self._client._request(self._id, verb, message, type_, timeout=timeout, each=each, repeat=repeat, bulk=bulk)
        except SandboxGone as error:
            self._ended(error.reason)
            raise
        except NotFound as error:
            if error.sandbox != self.id or error.field:
                raise
            self._ended("")
            raise SandboxGone("has ended, and its node no longer remembers how", sandbox=self.id) from error

    async def _run(self, op: str, spec: ExecSpec | None, step: str = "") -> OpStatus:
        """Start ``op`` and wait for its end by long polls, whoever restarts in between.

        The spec goes along until somebody answers; afterwards only the id does, so that nothing can be run twice. Without a spec
        it waits for an operation that was started before.
        """
        loop = asyncio.get_running_loop()
        limit = self._limit(spec) if spec is not None else None
        until = None if limit is None else loop.time() + limit + GRACE
        heard = loop.time()
        known = False
        stood = -1
        tries = 0
        pause = FIRST_PAUSE
        while True:
            wait = WAITS[min(tries, len(WAITS) - 1)]
            request = ExecRequest(op=op, spec=None if known else spec, wait_ms=int(wait * 1000), step=step)
            tries += 1
            try:
                reply = await self._request("exec", request, ExecReply, timeout=wait + 3.0, repeat=False)
            except Busy:
                if loop.time() > heard + min(BUSY_PATIENCE, BUSY_PATIENCE if limit is None else limit):
                    raise
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            except (Unavailable, DeadlineExceeded) as error:
                now = loop.time()
                stuck = known and error.reason == "agent_silent" and now < heard + STUCK_AFTER
                if not (stuck or is_silence(error)):
                    raise
                if now > heard + LOST_AFTER:
                    await self._check_lost()
                if now > (until if until is not None else heard + PATIENCE):
                    raise unanswered(error, f"the node of sandbox {self.id}") from error
                if error.reason == "disconnected":
                    tries = 0
                pause = await self._wire.rest(self._id.edge, pause)
                continue
            if not reply.status.running:
                return reply.status
            known, heard, pause = True, loop.time(), FIRST_PAUSE
            # While the sandbox stands still its commands' time-outs do too.
            if until is not None and spec is not None and not spec.wall_timeout:
                until += max(0, reply.stood_ms - stood) / 1000 if stood >= 0 else 0.0
                stood = reply.stood_ms
            if until is not None and loop.time() > until:
                await self._kill_quietly(op)
                raise DeadlineExceeded("the command is past its time-out and has not ended", sandbox=self.id, reason="exec")

    async def _check_lost(self) -> None:
        try:
            await self._client._raise_if_lost(self._id)
        except SandboxGone as error:
            self._ended(error.reason)
            raise

    def _limit(self, spec: ExecSpec) -> float | None:
        """Seconds that the command may take, None where there is no limit or it is not known here."""
        if spec.timeout_ms is not None:
            return spec.timeout_ms / 1000 or None
        return None if spec.background else self._exec_timeout or None

    async def _run_fed(self, op: str, spec: ExecSpec, data: bytes) -> OpStatus:
        """As `_run`, while ``data`` is written to stdin. A command that ends without reading it all is not an error."""
        running = asyncio.ensure_future(self._run(op, spec))
        feeding = asyncio.ensure_future(self._feed(op, data))
        try:
            await asyncio.wait({running, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await feeding  # its error is the call's error: a command that waits for input would wait for ever
            return await running
        finally:
            for task in (running, feeding):
                task.cancel()
            await asyncio.gather(running, feeding, return_exceptions=True)

    async def _feed(
        self,
        op: str,
        data: bytes,
        offset: int = 0,
        eof: bool = True,
        *,
        verb: str = "input",
        most: int = INPUT_PIECE,
        unread: Callable[[], None] = lambda: None,
    ) -> int:
        """Write ``data`` at ``offset`` of the operation's stdin; the new offset. Repeats are harmless. ``unread`` is called where the Edge
        knows of nobody who reads the operation's output."""
        at, end = offset, offset + len(data)
        pause = 0.002
        missing = 0
        while True:
            piece = data[at - offset : at - offset + most]
            last = at + len(piece) >= end
            try:
                request = InputRequest(op=op, offset=at, data=piece, eof=eof and last)
                reply = await self._request(verb, request, InputReply, each=4.0, bulk=True)  # the guest answers within 2 s
            except NotFound:
                missing += 1  # the command itself may still be on its way on the other connection
                if missing > 200:
                    raise
                await asyncio.sleep(0.01)
                continue
            if not reply.read:
                unread()
            if reply.accepted >= end and last:
                return end
            pause = 0.002 if reply.accepted > at else min(pause * 2, 0.2)
            if reply.accepted < at + len(piece):
                await asyncio.sleep(pause)  # its pipe is full
            at = max(at, min(reply.accepted, end))

    async def _signal(self, op: str, signum: int, tree: bool) -> None:
        await self._request("signal", SignalRequest(op=op, signal=signum, tree=tree), Empty)

    async def _kill_quietly(self, op: str, timeout: float = 3.0) -> None:
        """Kill ``op`` while our own task is being cancelled: as soon as possible, and without hiding the cancellation.

        The request to start it may still be on its way, so that "not found" is asked again for a while.
        """
        with contextlib.suppress(DsecError, TimeoutError):
            async with asyncio.timeout(timeout):
                for pause in (0.02, 0.05, 0.1, 0.2, 0.5, 0.0):
                    try:
                        await self._request("signal", SignalRequest(op=op, signal=9, tree=True), Empty, timeout=timeout)
                        return
                    except NotFound:
                        await asyncio.sleep(pause)
