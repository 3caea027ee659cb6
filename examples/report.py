"""How the demo shows itself: a live bar on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Row(msgspec.Struct, frozen=True):
    """One group of the table. Times are milliseconds, except ``seconds``, the longest of the group."""

    group: str
    count: int
    passed: int
    create_p50_ms: float
    exec_p50_ms: float | None
    exec_p99_ms: float | None
    seconds: float
    became: str


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The given percentile, None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class Bar:
    """Progress of one phase."""

    def __init__(self, say: Callable[[str], None], what: str, total: int, advance: Callable[[], None] | None = None) -> None:
        self._say, self._what, self._total, self._advance = say, what, total, advance
        self._done = 0

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if self._advance is not None:
            self._advance()
            return
        tenth = max(1, self._total // 10)
        if self._done % tenth == 0 or self._done == self._total:
            self._say(f"{self._what}: {self._done} of {self._total}")


class Reporter:
    """Writes progress; on a terminal with rich, else one plain line whenever a tenth is done. ``quiet`` sends it to stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream, highlight=False)
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        self.console.print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Bar]:
        if not self.console.is_terminal:
            yield Bar(self.say, what, total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=False) as progress:
            task = progress.add_task(what, total=total)
            yield Bar(self.say, what, total, lambda: progress.advance(task))

    def table(self, rows: Sequence[Row]) -> None:
        table = Table(title=None, pad_edge=False)
        table.add_column("group")
        for name in ("sandboxes", "as expected", "create p50", "exec p50", "exec p99", "took"):
            table.add_column(name, justify="right")
        table.add_column("what became of it", overflow="fold")
        for row in rows:
            times = ["-" if value is None else f"{value:.0f} ms" for value in (row.exec_p50_ms, row.exec_p99_ms)]
            table.add_row(
                row.group, str(row.count), str(row.passed), f"{row.create_p50_ms:.0f} ms", *times, f"{row.seconds:.1f} s", row.became
            )
        if self.console.is_terminal:
            self.console.print(table)
        else:  # a file or a pipe has no width of its own
            Console(file=self.stream, width=160, highlight=False).print(table)
