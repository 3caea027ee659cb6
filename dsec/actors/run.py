"""Run one actor until it is told to stop: ``python -m dsec.actors.run edge|scheduler|watcher``, or `dsec serve …`.

When it serves, it prints one JSON line to stdout: {"ready": kind, "name": …, "loop": "uvloop"}. SIGTERM and SIGINT end it in order. After
an error the line is {"failed": kind, "error": …}: a log on a full disk says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec
import structlog

from dsec import config as configs
from dsec import syscalls
from dsec.actors import capacity, garbage
from dsec.actors.edge import Edge
from dsec.actors.fence import Fences
from dsec.actors.host import Host
from dsec.actors.scheduler import Scheduler
from dsec.actors.store import SqliteStore
from dsec.actors.verbs import Verbs
from dsec.actors.watcher import Watcher
from dsec.bus.bus import Bus, loop_name, run
from dsec.bus.events import EventPublisher
from dsec.bus.streams import EventsConfig, ensure_events_stream
from dsec.config import Config
from dsec.errors import Conflict, DsecError, InvalidRequest

log = structlog.get_logger("dsec.run")
STREAM_PAUSE = 2.0  # seconds between attempts to see that the events stream is there


async def connect(config: Config, name: str, *, bulk: bool = False) -> Bus:
    """Pings are so frequent that touch is proved several times within the silence of which an Edge thinks nothing (`standing`)."""
    bus = config.bus
    timeout = bus.connect_timeout_ms / 1000
    ping = min(bus.ping_ms, config.watcher.lost_after_ms / 8) / 1000
    connected: Bus = await Bus.connect(
        bus.url, name=name, unit=bus.scale_unit, bulk=bulk, creds=bus.creds, connect_timeout=timeout, ping_interval=ping
    )
    return connected


def _stream(config: Config) -> EventsConfig:
    bus = config.bus
    return EventsConfig(max_age=bus.events_max_age_ms / 1000, max_bytes=bus.events_max_bytes, replicas=bus.events_replicas)


async def _ensure_stream(bus: Bus, config: Config, stack: AsyncExitStack) -> None:
    """See that the events stream exists; the actors do not wait for long where JetStream is away: events are spooled until it is there."""
    wanted = _stream(config)

    async def ensure() -> None:
        while True:
            try:
                await ensure_events_stream(bus, wanted)
                return
            except Conflict as error:
                log.warning("run.stream_differs", error=str(error))
                return
            except DsecError as error:
                log.warning("run.no_stream", error=str(error))
            await asyncio.sleep(STREAM_PAUSE)

    task = asyncio.ensure_future(ensure())
    stack.callback(task.cancel)
    await asyncio.wait([task], timeout=STREAM_PAUSE)


async def _until(what: str, ask: Callable[[], Awaitable[Any]]) -> Any:
    """What must be answered before serving, such as the fence: asked until JetStream is there."""
    pause = 0.1
    while True:
        try:
            return await ask()
        except DsecError as error:
            if not error.retryable:
                raise
            log.warning("run.waits", what=what, error=str(error))
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)


@asynccontextmanager
async def scheduler(config: Config) -> AsyncIterator[Scheduler]:
    """A serving Scheduler."""
    async with AsyncExitStack() as stack:
        bus = await connect(config, "scheduler")
        stack.push_async_callback(bus.close)
        actor = Scheduler(bus, config.scheduler)
        stack.push_async_callback(actor.stop)
        await actor.start()
        yield actor


@asynccontextmanager
async def watcher(config: Config) -> AsyncIterator[Watcher]:
    """A serving Watcher."""
    async with AsyncExitStack() as stack:
        bus = await connect(config, "watcher")
        stack.push_async_callback(bus.close)
        await _ensure_stream(bus, config, stack)
        fences = await _until("fence records", lambda: Fences.open(bus, config.bus.events_replicas))
        spool = Path(config.edge.state_dir) / "spool-watcher"
        events = await EventPublisher(bus, "watcher", spool, spool_limit=config.bus.spool_max_bytes).start()
        events.ensure = functools.partial(ensure_events_stream, bus, _stream(config))
        actor = Watcher(bus, config.watcher, fences, events)
        stack.push_async_callback(actor.stop)
        await actor.start()
        yield actor


@asynccontextmanager
async def edge(config: Config) -> AsyncIterator[Edge]:
    """A serving Edge: its records are read, its fence is read, what lives is adopted."""
    name = configs.edge_name(config)
    configs.check_root(config.edge)
    async with AsyncExitStack() as stack:
        store = SqliteStore(config.edge.state_dir)
        stack.push_async_callback(store.close)
        records = await store.open()
        control = await connect(config, f"edge {name}")
        stack.push_async_callback(control.close)
        bulk = await connect(config, f"edge {name}", bulk=True)
        stack.push_async_callback(bulk.close)
        await _ensure_stream(control, config, stack)
        fences = await _until("fence records", lambda: Fences.open(control, config.bus.events_replicas))
        fenced = await _until("fence record", lambda: fences.enter(name, store.incarnation))
        host = Host(config, name, int(store.incarnation.rpartition(".")[2]))
        await host.open()
        events = await EventPublisher(control, name, Path(config.edge.state_dir) / "spool", spool_limit=config.bus.spool_max_bytes).start()
        events.ensure = functools.partial(ensure_events_stream, control, _stream(config))
        memory, cpus, pid_max = capacity.node_has()
        limits = capacity.limits(config.edge, memory=memory, cpus=cpus, pid_max=pid_max, disk=host.disk_room)
        actor = Edge(control, bulk, config.edge, name, store, host, limits, events, fences, config.watcher.lost_after_ms / 2000)
        stack.push_async_callback(_leave, actor, fences)
        await actor.start(records, fenced, rebooted=store.rebooted)
        if fenced:
            await _until("fence record", lambda: fences.told(name))
        await Verbs(actor).serve()
        actor.beat()
        log.info("edge.ready", edge=name, incarnation=store.incarnation, backends=list(host.planners), sandboxes=len(actor.sandboxes))
        yield actor


async def _leave(actor: Edge, fences: Fences) -> None:
    await actor.stop()
    if not actor.sandboxes:
        with contextlib.suppress(DsecError, TimeoutError):
            await asyncio.wait_for(fences.leave(actor.name), 2.0)


_KINDS: dict[str, Any] = {"scheduler": scheduler, "watcher": watcher, "edge": edge}


class Lossy:
    """A text file for a log: what cannot be written (a full disk, a pipe that nobody reads) is dropped and counted.

    A line of a log must not end the task or the thread that says it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.dropped = 0

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except (OSError, ValueError):
            self.dropped += 1
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except (OSError, ValueError):
            self.dropped += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def setup_log(config: Config) -> None:
    """structlog to stderr: lines for people, or JSON."""
    lossy = sys.stderr if isinstance(sys.stderr, Lossy) else Lossy(sys.stderr)
    sys.stderr = cast(TextIO, lossy)
    levels = logging.getLevelNamesMapping()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer() if config.log.json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(levels[config.log.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, lossy)),
        cache_logger_on_first_use=True,
    )


async def serve(kind: str, config: Config) -> None:
    """Run an actor until SIGTERM or SIGINT. Raises what keeps it from starting."""
    if kind not in _KINDS:
        raise InvalidRequest("no such actor", field="kind", value=kind, fix="scheduler, watcher or edge")
    # A sandbox holds a descriptor here while a request to it runs; the usual soft limit of 1,024 is for programs that use select().
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    syscalls.run_slice()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, over.set)
    async with _KINDS[kind](config) as actor:
        _say({"ready": kind, "name": actor.name, "pid": os.getpid(), "loop": loop_name()})
        collecting = asyncio.ensure_future(garbage.keep())
        await over.wait()
        collecting.cancel()
        log.info("run.stopping", kind=kind, name=actor.name)


def _say(what: dict[str, object]) -> None:
    """One line for who has started this process."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def run_actor(kind: str, config: Config) -> int:
    """Entry point of a process; 0, or 1 after an error that is told in one line."""
    setup_log(config)
    try:
        run(serve(kind, config))
    except (DsecError, OSError) as error:  # of the latter a read-only disk is one
        log.error("run.failed", kind=kind, error=str(error))
        with contextlib.suppress(OSError):
            _say({"failed": kind, "error": str(error)})
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else argv
    if not args:
        sys.stderr.write("usage: python -m dsec.actors.run scheduler|watcher|edge [CONFIG]\n")
        return 2
    try:
        config = configs.load(args[1] if len(args) > 1 else None)
    except DsecError as error:
        sys.stderr.write(f"dsec: {error}\n")
        return 2
    return run_actor(args[0], config)


if __name__ == "__main__":
    sys.exit(main())
