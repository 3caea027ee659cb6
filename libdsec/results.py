"""What a command gives back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dsec.errors import DsecError
from dsec.model import Captured, OpStatus, Paused


class Output(bytes):
    """Bytes kept of one stream: its beginning and, after a gap of ``gap`` bytes where ``truncated``, its end.

    ``.text`` decodes them as UTF-8 with replacement and shows the gap as a line of its own; ``.total`` counts what the command wrote.
    """

    total: int
    head: int  # bytes before the gap

    @classmethod
    def of(cls, captured: Captured) -> Output:
        self = cls(captured.head + captured.tail)
        self.total = captured.total
        self.head = len(captured.head)
        return self

    @property
    def gap(self) -> int:
        return self.total - len(self)

    @property
    def truncated(self) -> bool:
        return self.gap > 0

    @property
    def text(self) -> str:
        if not self.truncated:
            return self.decode("utf-8", "replace")
        head, tail = self[: self.head].decode("utf-8", "replace"), self[self.head :].decode("utf-8", "replace")
        return f"{head}\n[... {self.gap} bytes not kept ...]\n{tail}"


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. A non-zero exit is a result, not an exception.

    ``exit_code`` is the command's own, or 128 + ``signal`` when a signal ended it, as a shell says it. ``timed_out`` and
    ``oom_killed`` are facts of their own: no exit code is proof of them. ``duration`` is seconds inside the sandbox.
    """

    exit_code: int
    stdout: Output
    stderr: Output
    duration: float
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    op: str = ""
    detail: str = ""  # which limit ended it, when one did

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def truncated(self) -> bool:
        """True when either stream was longer than what is kept (``stdout.truncated`` and ``stderr.truncated`` say which)."""
        return self.stdout.truncated or self.stderr.truncated

    def check(self, cmd: str | Sequence[str] = "") -> ExecResult:
        """Itself when the command succeeded, else raises `ExecFailed`."""
        if not self.ok:
            raise ExecFailed(self, cmd)
        return self

    @classmethod
    def of(cls, status: OpStatus) -> ExecResult:
        code = status.exit_code
        if code is None:
            code = 128 + status.signal if status.signal else -1
        return cls(
            exit_code=code,
            stdout=Output.of(status.stdout),
            stderr=Output.of(status.stderr),
            duration=status.duration_ms / 1000,
            signal=status.signal,
            timed_out=status.timed_out,
            oom_killed=status.oom_killed,
            op=status.op,
            detail=status.detail or ("time: its time-out has passed" if status.timed_out else ""),
        )


class ExecFailed(DsecError):
    """A command that had to succeed did not (``check=True``). ``result`` is its `ExecResult`."""

    code = "exec_failed"

    def __init__(self, result: ExecResult, cmd: str | Sequence[str] = "") -> None:
        self.result = result
        shown = cmd if isinstance(cmd, str) else " ".join(cmd)
        how = "timed out" if result.timed_out else "was killed for memory" if result.oom_killed else f"exit code {result.exit_code}"
        last = (result.stderr or result.stdout).decode("utf-8", "replace").strip().rsplit("\n", 1)[-1][:200]
        super().__init__(f"{shown[:100] or 'the command'}: {how}" + (f": {last}" if last else ""))


class ItemOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one sandbox in a request that names many. ``error`` is None when it worked."""

    id: str
    error: DsecError | None = None
    paused: Paused | None = None  # of a pause: what it gave back

    @property
    def ok(self) -> bool:
        return self.error is None
