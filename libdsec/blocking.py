"""The same for code without an event loop: a thread of its own runs one.

    with libdsec.blocking.connect() as dsec, dsec.sandbox("debian-12") as sandbox:
        print(sandbox.exec("uname -a").stdout.text)

Every object here wraps the asynchronous one; arguments, results and errors are the same. May be used from several threads.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

import libdsec.client as aio
from dsec.bus.messages import ClusterView, EdgeInfo, Event
from dsec.errors import DsecError, InvalidRequest
from dsec.model import Checkpoint, Exit, OpStatus, PackedLayer, Paused, SandboxInfo, SandboxSpec, Stat
from libdsec import names
from libdsec.burst import Burst as AioBurst
from libdsec.checkpoint import Restored as AioRestored
from libdsec.files import Files as AioFiles
from libdsec.forward import Address, Forward
from libdsec.names import Named
from libdsec.process import OutputEvent
from libdsec.process import Process as AioProcess
from libdsec.results import ExecResult, ItemOutcome
from libdsec.sandbox import Sandbox as AioSandbox
from libdsec.session import Recorded
from libdsec.session import Session as AioSession
from libdsec.spec import Options
from libdsec.tree import Unpacked
from libdsec.watch import FileEvent

if TYPE_CHECKING:
    from libdsec.draining import DrainMode

T = TypeVar("T")
Outcomes = list[ItemOutcome]
_END = object()


class Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="libdsec", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt (Ctrl+C) cancels it and waits for its clean-up before it is raised."""
        if self._pid != os.getpid():
            work.close()
            raise InvalidRequest("this client was opened before a fork", fix="call libdsec.blocking.connect() again in the new process")
        if not self._thread.is_alive():
            work.close()
            raise InvalidRequest("this client is closed", fix="call libdsec.blocking.connect() again")
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidRequest("called from inside its own event loop", fix="use libdsec.connect() there")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                self._settle()
            raise

    def _settle(self) -> None:
        """Let what was cancelled end; a second interrupt does not wait."""

        async def idle() -> None:
            me = asyncio.current_task()
            pending = [task for task in asyncio.all_tasks() if task is not me and task.cancelling()]
            if pending:
                await asyncio.wait(pending, timeout=10)

        asyncio.run_coroutine_threadsafe(idle(), self._loop).result(15)

    def close(self) -> None:
        if not self._thread.is_alive():
            return

        async def end() -> None:
            me = asyncio.current_task()
            left = [task for task in asyncio.all_tasks() if task is not me]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_asyncgens()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _next(iterator: Any) -> Any:
    try:
        return await anext(iterator)
    except StopAsyncIteration:
        return _END


def _iterate(loop: Loop, iterator: Any) -> Iterator[Any]:
    try:
        while (item := loop.run(_next(iterator))) is not _END:
            yield item
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            loop.run(close())


def connect(url: str | None = None, **options: Any) -> Client:
    """As `libdsec.connect`, for ``with``."""
    return Client(aio.connect(url, **options))


class Client(Named):
    _meant = names.CLIENT

    def __init__(self, client: aio.Client) -> None:
        self._client = client
        self._loop: Loop | None = None

    def __enter__(self) -> Self:
        self._loop = Loop()
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._loop is None:
            return
        try:
            self._loop.run(self._client.close())
        finally:
            self._loop.close()
            self._loop = None

    def _running(self) -> Loop:
        if self._loop is None:
            raise InvalidRequest("this client is not open", fix="use it inside `with libdsec.blocking.connect() as client`")
        return self._loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
        return self._running().run(work)

    @property
    def lease(self) -> str:
        return self._client.lease

    def sandbox(self, image: str | SandboxSpec, *, timeout: float = 120.0, **options: Unpack[Options]) -> SandboxContext:
        return SandboxContext(self, self._client.sandbox(image, timeout=timeout, **options))

    def create(self, image: str | SandboxSpec, *, timeout: float = 120.0, **options: Unpack[Options]) -> Sandbox:
        return Sandbox(self._running(), self._run(self._client.create(image, timeout=timeout, **options)))

    def burst(
        self,
        specs: str | SandboxSpec | Sequence[SandboxSpec],
        n: int | None = None,
        min_ready: int | None = None,
        deadline: float = 120.0,
        keep_partial: bool = False,
        **options: Unpack[Options],
    ) -> Burst:
        return Burst(self._running(), self._client.burst(specs, n, min_ready, deadline, keep_partial, **options))

    def create_many(
        self,
        specs: str | SandboxSpec | Sequence[SandboxSpec],
        n: int | None = None,
        *,
        min_ready: int | None = None,
        timeout: float = 120.0,
        **options: Unpack[Options],
    ) -> builtins.list[Sandbox]:
        made = self._run(self._client.create_many(specs, n, min_ready=min_ready, timeout=timeout, **options))
        return [Sandbox(self._running(), sandbox) for sandbox in made]

    def restore(self, checkpoint: Checkpoint | str, n: int = 1, **options: Any) -> Restored:
        return Restored(self._running(), self._run(self._client.restore(checkpoint, n, **options)))

    def checkpoints(self, ids: Iterable[str] = ()) -> builtins.list[Checkpoint]:
        return self._run(self._client.checkpoints(ids))

    def drop_checkpoints(self, ids: Iterable[str]) -> Outcomes:
        return self._run(self._client.drop_checkpoints(ids))

    def attach(self, sandbox_id: str) -> Sandbox:
        return Sandbox(self._running(), self._run(self._client.attach(sandbox_id)))

    def list(self, labels: Mapping[str, str] | None = None, **options: Any) -> list[SandboxInfo]:
        return self._run(self._client.list(labels, **options))

    def stop(self, labels: Mapping[str, str] | None = None, **options: Any) -> Outcomes:
        return self._run(self._client.stop(labels, **options))

    def pause(self, labels: Mapping[str, str] | None = None, **options: Any) -> Outcomes:
        return self._run(self._client.pause(labels, **options))

    def resume(self, labels: Mapping[str, str] | None = None, **options: Any) -> Outcomes:
        return self._run(self._client.resume(labels, **options))

    def nodes(self) -> ClusterView:
        return self._run(self._client.nodes())

    def drain(self, node: str, mode: DrainMode = "mark", *, timeout: float | None = None) -> EdgeInfo:
        return self._run(self._client.drain(node, mode, timeout=timeout))

    def events(self, labels: Mapping[str, str] | None = None, *, since: str | float | None = None, follow: bool = True) -> Iterator[Event]:
        return _iterate(self._running(), self._client.events(labels, since=since, follow=follow))


class SandboxContext(Named):
    _meant = names.CONTEXT

    def __init__(self, client: Client, context: aio.SandboxContext) -> None:
        self._client = client
        self._context = context

    def __enter__(self) -> Sandbox:
        return Sandbox(self._client._running(), self._client._run(self._context.__aenter__()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client._run(self._context.__aexit__(kind, error, trace))


class Burst:
    def __init__(self, loop: Loop, burst: AioBurst) -> None:
        self._loop = loop
        self._burst = burst

    def __enter__(self) -> Self:
        self._loop.run(self._burst.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._burst.__aexit__(kind, error, trace))

    def __iter__(self) -> Iterator[Sandbox]:
        for sandbox in _iterate(self._loop, self._burst.__aiter__()):
            yield Sandbox(self._loop, sandbox)

    def wait(self) -> list[Sandbox]:
        return [Sandbox(self._loop, sandbox) for sandbox in self._loop.run(self._burst.wait())]

    @property
    def failed(self) -> list[tuple[int, Exception]]:
        return list(self._burst.failed)


class Sandbox(Named):
    """Methods as of `libdsec.Sandbox`, blocking."""

    _meant = names.SANDBOX

    def __init__(self, loop: Loop, sandbox: AioSandbox) -> None:
        self._loop = loop
        self._sandbox = sandbox
        self.files = Files(loop, sandbox.files)

    def __repr__(self) -> str:
        return repr(self._sandbox)

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def labels(self) -> dict[str, str]:
        return self._sandbox.labels

    def expose(self, port: int | str, local_port: int = 0) -> Exposed:
        return Exposed(self._loop, self._sandbox.expose(port, local_port))

    def exec(
        self,
        cmd: str | Iterable[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        check: bool = False,
    ) -> ExecResult:
        return self._loop.run(self._sandbox.exec(cmd, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, check=check))

    def start(self, cmd: str | Iterable[str], **options: Any) -> Process:
        return Process(self._loop, self._sandbox.start(cmd, **options))

    def terminal(self, cmd: str | Iterable[str] = ("/bin/sh", "-i"), **options: Any) -> Process:
        return Process(self._loop, self._sandbox.terminal(cmd, **options))

    def session(self, **options: Any) -> Session:
        return Session(self._loop, self._sandbox.session(**options))

    def attach_session(self, session: str) -> Session:
        return Session(self._loop, self._sandbox.attach_session(session))

    def sessions(self) -> list[OpStatus]:
        return self._loop.run(self._sandbox.sessions())

    def stop(self, grace: float = 0.0) -> None:
        self._loop.run(self._sandbox.stop(grace))

    def kill(self) -> None:
        self._loop.run(self._sandbox.kill())

    def terminate(self, grace: float = 0.0) -> None:
        self._loop.run(self._sandbox.terminate(grace))

    def is_running(self) -> bool:
        return self._loop.run(self._sandbox.is_running())

    def pause(self) -> Paused:
        return self._loop.run(self._sandbox.pause())

    def resume(self) -> None:
        self._loop.run(self._sandbox.resume())

    def checkpoint(self, name: str = "", **options: Any) -> Checkpoint:
        return self._loop.run(self._sandbox.checkpoint(name, **options))

    def fork(self, n: int = 1, **options: Any) -> Restored:
        return Restored(self._loop, self._loop.run(self._sandbox.fork(n, **options)))

    def pack_diff(self, name: str = "", **options: Any) -> PackedLayer:
        return self._loop.run(self._sandbox.pack_diff(name, **options))

    def info(self) -> SandboxInfo:
        return self._loop.run(self._sandbox.info())

    def wait(self, timeout: float | None = None) -> Exit:
        return self._loop.run(self._sandbox.wait(timeout))


class Restored:
    """As `libdsec.checkpoint.Restored`; a context manager without ``async``."""

    def __init__(self, loop: Loop, restored: AioRestored) -> None:
        self._loop = loop
        self._restored = restored
        self.checkpoint = restored.checkpoint
        self.results: list[Sandbox | DsecError] = [
            each if isinstance(each, DsecError) else Sandbox(loop, each) for each in restored.results
        ]

    @property
    def sandboxes(self) -> list[Sandbox]:
        return [each for each in self.results if not isinstance(each, DsecError)]

    @property
    def failed(self) -> list[tuple[int, DsecError]]:
        return self._restored.failed

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self.sandboxes)

    def __len__(self) -> int:
        return len(self._restored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._restored.__aexit__(kind, error, trace))


class Process:
    def __init__(self, loop: Loop, process: AioProcess) -> None:
        self._loop = loop
        self._process = process

    def __enter__(self) -> Self:
        self._loop.run(self._process.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._process.__aexit__(kind, error, trace))

    def __iter__(self) -> Iterator[OutputEvent]:
        return _iterate(self._loop, self._process.__aiter__())

    @property
    def stdout(self) -> Iterator[bytes]:
        return _iterate(self._loop, self._process.stdout)

    @property
    def stderr(self) -> Iterator[bytes]:
        return _iterate(self._loop, self._process.stderr)

    def lines(self, stream: Literal["stdout", "stderr"] = "stdout") -> Iterator[str]:
        return _iterate(self._loop, self._process.lines(stream))

    def wait(self, timeout: float | None = None) -> ExecResult:
        return self._loop.run(self._process.wait(timeout))

    def expect(self, pattern: str | bytes | re.Pattern[bytes], timeout: float | None = 30.0) -> re.Match[bytes]:
        return self._loop.run(self._process.expect(pattern, timeout))

    def resize(self, rows: int, cols: int) -> None:
        self._loop.run(self._process.resize(rows, cols))

    def write(self, data: bytes | str) -> None:
        self._loop.run(self._process.write(data))

    def close_stdin(self) -> None:
        self._loop.run(self._process.close_stdin())

    def signal(self, signum: int | str) -> None:
        self._loop.run(self._process.signal(signum))

    def kill(self) -> None:
        self._loop.run(self._process.kill())


class Session:
    def __init__(self, loop: Loop, session: AioSession) -> None:
        self._loop = loop
        self._session = session

    def __enter__(self) -> Self:
        self._loop.run(self._session.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._session.__aexit__(kind, error, trace))

    def run(self, cmd: str, *, timeout: float | None = None, check: bool = False) -> ExecResult:
        return self._loop.run(self._session.run(cmd, timeout=timeout, check=check))

    @property
    def id(self) -> str:
        return self._session.id

    def interrupt(self) -> None:
        self._loop.run(self._session.interrupt())

    def output(self, offset: int = 0, stream: Literal["stdout", "stderr"] = "stdout") -> Recorded:
        return self._loop.run(self._session.output(offset, stream))

    def detach(self) -> Session:
        self._session.detach()
        return self

    def close(self) -> None:
        self._loop.run(self._session.close())


class Files(Named):
    _meant = names.FILES

    def __init__(self, loop: Loop, files: AioFiles) -> None:
        self._loop = loop
        self._files = files

    def as_user(self, user: str) -> Files:
        return Files(self._loop, self._files.as_user(user))

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._loop.run(self._files.read(path, offset=offset, length=length))

    def read_text(self, path: str) -> str:
        return self._loop.run(self._files.read_text(path))

    def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        self._loop.run(self._files.write(path, data, mode=mode))

    def upload(self, source: str | os.PathLike[str], target: str, *, owners: bool = False) -> int:
        return self._loop.run(self._files.upload(source, target, owners=owners))

    def download(self, source: str, target: str | os.PathLike[str], *, owners: bool = False) -> int:
        return self._loop.run(self._files.download(source, target, owners=owners))

    def upload_tar(self, stream: Iterable[bytes], target: str, *, owners: bool = True) -> Unpacked:
        async def pieces() -> AsyncIterator[bytes]:
            source = iter(stream)
            while piece := await asyncio.to_thread(next, source, b""):
                yield piece

        return self._loop.run(self._files.upload_tar(pieces(), target, owners=owners))

    def download_tar(self, *paths: str, name: str = "") -> Iterator[bytes]:
        return _iterate(self._loop, self._files.download_tar(*paths, name=name))

    def watch(self, path: str, *, recursive: bool = False) -> Iterator[FileEvent]:
        return _iterate(self._loop, self._files.watch(path, recursive=recursive))

    def glob(self, pattern: str) -> builtins.list[str]:
        return self._loop.run(self._files.glob(pattern))

    def chmod(self, path: str, mode: int) -> None:
        self._loop.run(self._files.chmod(path, mode))

    def chown(self, path: str, owner: str) -> None:
        self._loop.run(self._files.chown(path, owner))

    def symlink(self, path: str, target: str) -> None:
        self._loop.run(self._files.symlink(path, target))

    def stat(self, path: str) -> Stat:
        return self._loop.run(self._files.stat(path))

    def exists(self, path: str) -> bool:
        return self._loop.run(self._files.exists(path))

    def list(self, path: str = "/") -> list[Stat]:
        return self._loop.run(self._files.list(path))

    def mkdir(self, path: str, *, parents: bool = True) -> None:
        self._loop.run(self._files.mkdir(path, parents=parents))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        self._loop.run(self._files.remove(path, recursive=recursive, missing_ok=missing_ok))

    def rename(self, path: str, target: str) -> None:
        self._loop.run(self._files.rename(path, target))


class Exposed:
    """``with sandbox.expose(8000) as address``."""

    def __init__(self, loop: Loop, forward: Forward) -> None:
        self._loop = loop
        self._forward = forward

    def __enter__(self) -> Address:
        return self._loop.run(self._forward.__aenter__())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._forward.__aexit__(kind, error, trace))
