"""Four ways in which an agent's code goes wrong, what must become of each, and that the sandbox answers afterwards.

Every verdict is read from what the sandbox itself reports: the command's result, the processes that are left inside, a command after it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from dsec.errors import DsecError

if TYPE_CHECKING:
    from libdsec.results import ExecResult
    from libdsec.sandbox import Sandbox

MIB = 1 << 20
TIMEOUT = 5.0
HOG_TIMEOUT = 60.0  # its end is the kernel's kill; filling the memory takes as long as other sandboxes and the machine's load let it
# Each process that is alive inside, one number a line; the shell's own and its child's are among them.
COUNT = "ls -d /proc/[0-9]* | wc -l"


class Verdict(msgspec.Struct):
    """What became of one misbehaving sandbox."""

    kind: str
    text: str = ""
    problems: list[str] = []
    seconds: float = 0.0
    ended: float = 0.0  # monotonic seconds


COMMANDS = {
    # Dash says "Cannot fork" where the pids limit refuses, and ends. The command itself forks once, before the bomb goes off, and then
    # only sleeps: so it is there until its time-out.
    "fork bomb": "b() { b | b & }; (sleep 0.1; b; b; b) & exec sleep 60",
    "yes": "yes",
    "endless loop": "(while :; do :; done) & while :; do :; done",
    # tail keeps the last line in memory, and this one never ends.
    "memory hog": "tail /dev/zero",
}


async def misbehave(sandbox: Sandbox, kind: str, pids: int, memory: int) -> Verdict:
    """Run one of `COMMANDS` and judge it. ``pids`` and ``memory`` are the sandbox's limits."""
    verdict = Verdict(kind, problems=[])
    started = time.perf_counter()
    try:
        result = await sandbox.exec(COMMANDS[kind], timeout=HOG_TIMEOUT if kind == "memory hog" else TIMEOUT)
        match kind:
            case "fork bomb":
                _judge_fork_bomb(verdict, result, pids)
            case "yes":
                _judge_yes(verdict, result)
            case "endless loop":
                _judge_timeout(verdict, result)
                verdict.text = f"timed out after {result.duration:.1f} s, tree killed"
            case "memory hog":
                _judge_hog(verdict, result, memory)
        await _still_there(verdict, sandbox)
    except DsecError as error:
        verdict.problems.append(f"{type(error).__name__}: {error}")
    verdict.seconds = time.perf_counter() - started
    verdict.ended = time.monotonic()
    return verdict


def _judge_timeout(verdict: Verdict, result: ExecResult) -> None:
    if not result.timed_out:
        verdict.problems.append(f"not timed out: exit code {result.exit_code}, signal {result.signal}, {result.stderr[-200:]!r}")
    if result.duration > TIMEOUT + 5:
        verdict.problems.append(f"ended {result.duration:.1f} s after its start, the time-out is {TIMEOUT:.0f} s")


def _judge_fork_bomb(verdict: Verdict, result: ExecResult, pids: int) -> None:
    _judge_timeout(verdict, result)
    if "fork" not in result.stderr.text:
        verdict.problems.append(f"no fork was refused: {result.stderr[-200:]!r}")
    verdict.text = f"pids limit {pids} hit, timed out, tree killed"


def _judge_yes(verdict: Verdict, result: ExecResult) -> None:
    _judge_timeout(verdict, result)
    kept = len(result.stdout)
    if not result.stdout.truncated:
        verdict.problems.append(f"not truncated: {kept} of {result.stdout.total} bytes")
    if set(result.stdout) != set(b"y\n"):
        verdict.problems.append("output is not yes's")
    if kept > MIB:
        verdict.problems.append(f"{kept} bytes were kept")
    verdict.text = f"output truncated at {kept // 1024} KiB of {result.stdout.total / MIB:,.0f} MiB, timed out"


def _judge_hog(verdict: Verdict, result: ExecResult, memory: int) -> None:
    if not result.oom_killed:
        verdict.problems.append(f"no OOM kill reported: exit code {result.exit_code}, signal {result.signal}, timed out {result.timed_out}")
    verdict.text = f"oom_killed at {memory // MIB} MiB"


async def _still_there(verdict: Verdict, sandbox: Sandbox) -> None:
    """It answers with a nonce made now, and nothing of the culprit runs on."""
    word = secrets.token_hex(8)
    count = -1
    for _ in range(20):  # what was killed is reaped within milliseconds, on a loaded machine within a second
        result = await sandbox.exec(f"echo {word}; {COUNT}", timeout=30)
        lines = result.stdout.text.split()
        if result.exit_code != 0 or len(lines) != 2 or lines[0] != word:
            verdict.problems.append(f"afterwards a small command answered {result.stdout!r} {result.stderr[-200:]!r}")
            return
        count = int(lines[1])
        if count <= 5:  # init, the shell, its subshell's ls and wc
            return
        await asyncio.sleep(0.1)
    verdict.problems.append(f"{count} processes are left inside")
