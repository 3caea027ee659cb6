"""What the commands share: options, the connection, tables, JSON, progress."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

if TYPE_CHECKING:
    from dsec.errors import DsecError
    from libdsec import Client

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Settings:
    """Options that every command takes, before or after its name."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.url: str | None = given.get("url")
        self.project: str | None = given.get("project")
        self.principal: str = given.get("principal") or "local"
        self.unit: str = given.get("unit") or "main"
        self.json: bool = bool(given.get("as_json"))
        self.verbose: bool = bool(given.get("verbose"))

    def connect(self, **options: Any) -> Client:
        import libdsec

        client = libdsec.connect(
            self.url, project=self.project, principal=self.principal, unit=self.unit, name="dsec cli", connect_timeout=2.0, **options
        )
        client.on_wait = WaitNotes()
        return client


class WaitNotes:
    """Says on standard error what a create waits for, again only when that has changed."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, count: int, why: DsecError | None) -> None:
        reason = why.message if why is not None else "no node takes it"
        if reason != self._said:
            self._said = reason
            click.echo(f"dsec: {count} {'sandbox waits' if count == 1 else 'sandboxes wait'} for room: {reason}", err=True)


def common(function: F) -> Callable[..., Any]:
    """Adds --url, --project, --principal, --unit and --json to a command and passes `Settings` first."""

    @click.option("--url", default=None, metavar="NATS", help="NATS server(s).")
    @click.option("--project", default=None, metavar="PATH", help="Project.")
    @click.option("--principal", default=None, hidden=True)
    @click.option("--unit", default=None, hidden=True)
    @click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
    @click.pass_context
    @functools.wraps(function)
    def wrapper(ctx: click.Context, /, *args: Any, **kwargs: Any) -> Any:
        above = ctx.find_root().obj or {}
        given = {name: kwargs.pop(name) or above.get(name) for name in ("url", "project", "principal", "unit", "as_json")}
        settings = Settings(given | {"verbose": above.get("verbose")})
        quiet_logs(settings.verbose)
        try:
            return function(settings, *args, **kwargs)
        except BrokenPipeError:
            # Whoever read us has left, as `| head` does: Python must not complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None

    return wrapper


def quiet_logs(verbose: bool) -> None:
    """Logs go to standard error, and below "warning" only when they are asked for."""
    import logging

    import structlog

    level = logging.DEBUG if verbose else logging.ERROR
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on an event loop. SIGTERM and SIGHUP end it as Ctrl+C does: by cancellation, with all clean-up done."""
    received: list[int] = []

    async def outer() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def stop(signum: int) -> None:
            received.append(signum)
            task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, stop, signum)
        try:
            return await task
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(signum)

    try:
        return asyncio.run(outer())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):  # the tasks of a group fail for one reason: the first
            error = error.exceptions[0]
        raise error from group
    except asyncio.CancelledError:
        if received and received[0] != signal.SIGINT:
            raise SystemExit(128 + received[0]) from None
        raise KeyboardInterrupt from None


def emit(value: Any) -> None:
    """One JSON value on standard output: Structs as maps, bytes as base64."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value, enc_hook=_encode_more).decode() + "\n")
    sys.stdout.flush()


def _encode_more(value: Any) -> Any:
    from dsec.errors import DsecError

    if isinstance(value, DsecError):
        return value.body()
    raise NotImplementedError(f"cannot show a {type(value).__name__} as JSON")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns padded with spaces, as `docker ps` prints them: easy to read and to cut."""
    lines = [list(columns), *([cell or "-" for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        click.echo("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def pairs(values: Iterable[str], field: str, *, lookup: dict[str, str] | None = None) -> dict[str, str]:
    """``KEY=VALUE`` words as a dict; with ``lookup`` a bare KEY takes its value from there, as `docker run -e KEY` does."""
    result = {}
    for word in values:
        key, sep, value = word.partition("=")
        if not key or (not sep and lookup is None):
            raise click.UsageError(f"{field} {word!r} is not KEY=VALUE")
        if sep:
            result[key] = value
        elif lookup is not None and key in lookup:
            result[key] = lookup[key]
    return result


def size_text(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def age(timestamp: float, now: float | None = None) -> str:
    """``42s``, ``3m``, ``2h``, ``5d`` since a Unix time."""
    if not timestamp:
        return ""
    seconds = max(0.0, (time.time() if now is None else now) - timestamp)
    for unit, factor in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds:.0f}s"


class Progress:
    """A bar on standard error, on a terminal only. ``with Progress("copy", total) as bar: bar(done)``."""

    def __init__(self, what: str, total: float | None, *, bytes_: bool = False, enabled: bool = True) -> None:
        self._what, self._total, self._bytes = what, total, bytes_
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            count = DownloadColumn(binary_units=True) if self._bytes else MofNCompleteColumn()
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __call__(self, done: float, total: float | None = None, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total if total is None else total, description=note or self._what)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
