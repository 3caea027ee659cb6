"""All of DSec on one machine in one process tree: nats-server, Watcher, Schedulers, Edges. `dsec up` runs it; tests and demo use it.

    async with Cluster(state_dir, backends=("fake",)) as cluster:
        … cluster.url …

Every child dies with this process (PR_SET_PDEATHSIG); none is restarted silently. Leaving the block stops the sandboxes, then the actors,
then nats-server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiofiles
import msgspec
import structlog

from dsec import config as configs
from dsec.actors import noted
from dsec.bus.bus import loop_name
from dsec.bus.server import NatsServer, tail
from dsec.config import Config
from dsec.errors import Conflict, InvalidRequest, NodeError, Unsupported

log = structlog.get_logger("dsec.up")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """One actor process."""

    def __init__(self, kind: str, name: str, config: Config, folder: Path, death: int = signal.SIGKILL) -> None:
        self.kind = kind
        self.name = name
        self.config = config
        self.log_path = folder / f"{name}.log"
        self.config_path = folder / f"{name}.toml"
        self.death = death  # the signal that it gets when the parent dies
        self.environment: dict[str, str] = {}  # beside ours
        self.process: asyncio.subprocess.Process | None = None
        self._began = 0  # bytes of its log before it
        self.ready: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, timeout: float = 120.0) -> None:
        """Until it serves (a first Edge may have to compile the guest programs). Raises `NodeError` with the end of its log."""
        parent, death = os.getpid(), self.death

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, death, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        await asyncio.to_thread(self._write_config)
        env = {key: value for key, value in os.environ.items() if not (key.startswith(configs.ENV_PREFIX) and "__" in key)}
        env[configs.ENV_FILE] = str(self.config_path)
        env |= self.environment
        async with aiofiles.open(self.log_path, "ab") as output:
            self._began = await output.tell()
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dsec.actors.run",
                self.kind,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output.fileno(),
                env=env,
                preexec_fn=die_with_parent,
                start_new_session=True,  # Ctrl+C is for the parent, which ends its children in order
            )
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout)
        except TimeoutError:
            line = b""
        said = json.loads(line) if line else {}
        if "ready" not in said:
            await self.stop(1.0)
            why = said.get("error") or await self.tail()
            raise NodeError(f"{self.kind} did not start: {why}", field=self.kind, value=str(self.log_path), retryable=False)
        self.ready = said

    def _write_config(self) -> None:
        """Whole or not at all: half of one is another. Raises `NodeError`."""
        text = configs.dump(self.config)
        fresh = self.config_path.with_suffix(".new")
        try:
            if not self.config_path.exists() or self.config_path.read_text(encoding="utf-8") != text:
                fresh.write_text(text, encoding="utf-8")
                fresh.rename(self.config_path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise NodeError(f"cannot write the {self.kind}'s configuration: {error}", field=self.kind, reason="disk") from error

    async def stop(self, timeout: float = 60.0) -> None:
        """SIGTERM, and SIGKILL after ``timeout`` seconds. Idempotent."""
        process, self.process = self.process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            log.error("up.killed", kind=self.kind, name=self.name, after_s=timeout)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def kill(self) -> None:
        """SIGKILL, as in a crash."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def tail(self, lines: int = 8) -> str:
        """The end of what it has logged since its start: earlier lives write into the same file."""
        return await tail(self.log_path, lines, self._began)


class Cluster:
    """See the module.

    Args:
        state_dir: everything lives below it: records, layers, logs, JetStream. Kept at the end; the caller removes it.
        backends: of each Edge.
        edges: names of the Edges; with more than one each gets a directory of its own and the first one's layer store.
        schedulers: how many instances.
        config: what else differs from the defaults (a `Config`), e.g. from `dsec.config.load`.
        overrides: further ``{"edge": {"slots": 8}}`` on top, for every actor.
        port: of nats-server; 0 = a free one.
        stop_sandboxes: at the end; False leaves them running (container) for the next start of the same directory.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        backends: Sequence[str] = ("container",),
        edges: Sequence[str] = ("n1",),
        schedulers: int = 1,
        config: Config | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        port: int = 0,
        stop_sandboxes: bool = True,
    ) -> None:
        self.dir = Path(state_dir)
        self.nats = NatsServer(self.dir / "nats", port or -1)
        self._backends = tuple(backends)
        self._edges = tuple(edges)
        self._config = config or Config()
        self._overrides = {room: dict(table) for room, table in (overrides or {}).items()}
        self._stop_sandboxes = stop_sandboxes
        self._n = schedulers
        self.watcher: Child | None = None
        self.schedulers: list[Child] = []
        self.edges: dict[str, Child] = {}

    @property
    def url(self) -> str:
        return self.nats.url

    @property
    def layer_store(self) -> Path:
        """Where every Edge of this cluster looks for layers."""
        return Path(self._config.layers.store_dir) if self._config.layers.store_dir else self.dir / "layers"

    @property
    def children(self) -> list[Child]:
        return [*([self.watcher] if self.watcher else []), *self.schedulers, *self.edges.values()]

    async def start(self) -> Self:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            if "container" in self._backends and self._edges:
                await asyncio.to_thread(_build_guest)  # a first compilation may take longer than an Edge is waited for
            await self.nats.start()
            (self.dir / "log").mkdir(exist_ok=True)
            self.watcher = self._child("watcher", "watcher")
            self.schedulers = [self._child("scheduler", f"scheduler-{n + 1}") for n in range(self._n)]
            self.edges = {name: self._child("edge", name) for name in self._edges}
            # The Watcher first, so that a Scheduler's first view is not empty for long; then all at once.
            await asyncio.gather(*(child.start() for child in self.children))
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Edges first (they stop their sandboxes), then the rest. Idempotent."""
        try:
            await asyncio.gather(*(child.stop() for child in self.edges.values()))
            await asyncio.gather(*(child.stop(10.0) for child in [*self.schedulers, *([self.watcher] if self.watcher else [])]))
        finally:
            await self.nats.stop()

    async def first_death(self) -> Child:
        """Returns when a child ends by itself."""

        async def wait(child: Child) -> Child:
            assert child.process is not None
            await child.process.wait()
            return child

        tasks = [asyncio.ensure_future(wait(child)) for child in self.children if child.process is not None]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    # ------------------------------------------------------------------ configuration of a child
    def _made(self, name: str) -> Config:
        tables: dict[str, dict[str, Any]] = msgspec.to_builtins(self._config)
        tables["bus"]["url"] = self.url
        edge = tables["edge"]
        edge["name"] = name
        edge["backends"] = list(self._backends)
        edge["state_dir"] = str(self.dir / "edges" / name)
        edge["on_shutdown"] = "stop" if self._stop_sandboxes else "keep"
        tables["layers"]["store_dir"] = str(self.layer_store)
        for room, table in self._overrides.items():
            tables[room] |= table
        return configs.parse(tables)

    def _child(self, kind: str, name: str) -> Child:
        config = self._made(name if kind == "edge" else "up")
        tables: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
        tables["scheduler"]["name"] = name if kind == "scheduler" else ""
        if kind != "edge":
            tables["edge"]["state_dir"] = str(self.dir / "watcher")  # its event spool; a Scheduler writes nothing
        # An Edge that is to stop its sandboxes does so even when this process is killed: they are not its children, so they would live on.
        death = signal.SIGTERM if kind == "edge" and self._stop_sandboxes else signal.SIGKILL
        return Child(kind, name, configs.parse(tables), self.dir / "log", death)


def _build_guest() -> None:
    from dsec.backends.guest import build

    try:
        build.ensure(program="launcher")
        build.ensure(program="hand")
        build.ensure()
    except build.BuildError as error:
        raise Unsupported(f"the guest programs were not built: {error}", reason="guest", fix="pip install ziglang") from error


@contextlib.contextmanager
def _held(state_dir: str) -> Iterator[None]:
    """The state directory is this process's until the end of the block: two nats-servers on one JetStream directory would spoil it."""
    folder = Path(state_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "use that one, end it, or give --state-dir another directory"
            raise Conflict("another `dsec up` runs in this state directory", field="edge.state_dir", value=state_dir, fix=fix) from None
        yield
    finally:
        os.close(lock)


async def up(config: Config, *, ready_file: str = "") -> int:
    """`dsec up`: the cluster until SIGTERM, Ctrl+C or the death of a child. Prints {"ready": "up", "url": …} when it serves.

    Returns the process's exit code: 1 when a child died by itself. Raises `InvalidRequest` for replicas, which need other servers, and
    `Conflict` where another one runs in the same state directory.
    """
    if (replicas := config.bus.events_replicas) > 1:
        fix = "use 1 here; in a cluster of nats-servers run `dsec serve` for each actor, with bus.url naming them all"
        raise InvalidRequest("`dsec up` runs one nats-server", field="bus.events_replicas", value=replicas, fix=fix)
    configs.check_root(config.edge)
    held, noting = contextlib.ExitStack(), contextlib.ExitStack()
    held.enter_context(_held(config.edge.state_dir))
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, over.set)
    name = config.edge.name or "n1"
    cluster = Cluster(
        config.edge.state_dir, backends=config.edge.backends, edges=(name,), schedulers=config.up.schedulers, config=config,
        port=config.up.nats_port,
    )  # fmt: skip
    starting = asyncio.ensure_future(cluster.start())
    interrupted = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 130
        await starting
        note = noted.Note(os.getpid(), cluster.url, str(cluster.edges[name].config_path))
        noting.enter_context(noted.noted(note, noted.folder()))
        said = {"ready": "up", "url": cluster.url, "edges": list(cluster.edges), "state_dir": str(cluster.dir), "pid": os.getpid()}
        said |= {"loop": loop_name()}
        line = json.dumps(said) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if ready_file:
            async with aiofiles.open(ready_file, "w") as file:
                await file.write(line)
        death = asyncio.ensure_future(cluster.first_death())
        await asyncio.wait([death, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if death.done() and not over.is_set():
            child = death.result()
            log.error("up.ended_by_itself", kind=child.kind, name=child.name, log=await child.tail())
            return 1
        death.cancel()
        return 0
    finally:
        interrupted.cancel()
        noting.close()
        await cluster.stop()
        held.close()
