"""A recorded agent trajectory: tool calls as a model made them, replayed in a sandbox, each checked against what it really answered.

Three tools, as most coding agents have them: ``shell`` (a command), ``read`` (a file) and ``replace`` (one exact occurrence in a file).
Text may hold ``{nonce}``: a word made for this one sandbox, so that an answer cannot come from anywhere else.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

PROBE_LIMIT = 10.0  # seconds for a command that takes milliseconds: longer would be a disturbance
RECORDED = Path(__file__).with_name("trajectory.json")


class Expect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tool call must answer. ``exit_code`` is looked at for ``shell`` only."""

    exit_code: int = 0
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call."""

    tool: str
    command: str = ""
    path: str = ""
    old: str = ""
    new: str = ""
    timeout: float = 120.0
    expect: Expect = Expect()


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The project that the agent works on; ``target`` is its place inside the sandbox, without the first slash."""

    project: str
    version: str
    license: str
    sdist: str
    sha256: str
    target: str


class Toolkit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pinned wheels and their place inside the sandbox."""

    target: str
    wheels: tuple[str, ...]


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One exact replacement in one file."""

    path: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Raises `ValueError` unless ``old`` stands there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path}: the text to replace stands there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


class Trajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole recording."""

    name: str
    about: str
    workspace: Source
    toolkit: Toolkit
    seeded_bug: Edit
    environment: dict[str, str]
    steps: tuple[Step, ...]

    @classmethod
    def load(cls, path: Path = RECORDED) -> Trajectory:
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Answer(msgspec.Struct, frozen=True):
    """What a tool call answered, and in how many seconds."""

    text: str
    exit_code: int | None
    seconds: float
    truncated: bool = False


def complaints(expect: Expect, answer: Answer, nonce: str, tool: str = "shell") -> list[str]:
    """Every way in which the answer is not what was recorded; empty when all is well."""
    found = []
    if tool == "shell" and answer.exit_code != expect.exit_code:
        found.append(f"exit code {answer.exit_code}, expected {expect.exit_code}: {answer.text[-300:]!r}")
    if answer.truncated:
        found.append("output was truncated")
    wanted = [text.replace("{nonce}", nonce) for text in expect.contains]
    found.extend(f"answer lacks {text!r}: {answer.text[-300:]!r}" for text in wanted if text not in answer.text)
    found.extend(f"answer contains {text!r}" for text in expect.lacks if text in answer.text)
    return found


class Outcome(msgspec.Struct):
    """How one replay went. ``probes``: when each small command had answered (monotonic seconds) and after how many milliseconds, to see
    whether others disturbed this one."""

    problems: list[str] = []
    steps: int = 0
    seconds: float = 0.0
    probes: list[tuple[float, float]] = []


async def _call(sandbox: Sandbox, step: Step, root: str, nonce: str) -> Answer:
    started = time.perf_counter()
    match step.tool:
        case "shell":
            result = await sandbox.exec(step.command.replace("{nonce}", nonce), cwd=root, timeout=step.timeout)
            text = result.stdout.text + result.stderr.text
            return Answer(text, result.exit_code, time.perf_counter() - started, result.truncated)
        case "read":
            data = await sandbox.files.read(f"{root}/{step.path}")
            return Answer(data.decode(), None, time.perf_counter() - started)
        case "replace":
            path = f"{root}/{step.path}"
            before = (await sandbox.files.read(path)).decode()
            await sandbox.files.write(path, Edit(step.path, step.old, step.new).apply(before).encode())
            return Answer("", None, time.perf_counter() - started)
    raise ValueError(f"unknown tool {step.tool!r}")


async def replay(trajectory: Trajectory, sandbox: Sandbox, cpu_gate: asyncio.Semaphore, on_step: Callable[[], None]) -> Outcome:
    """Run every step; a wrong answer ends the replay, as a wrong turn would end the recording's worth.

    ``cpu_gate`` stands for the model's thinking time: it keeps the number of commands that run at once near the number of cores.
    Before each step a tiny command with its own nonce is timed outside the gate.
    """
    outcome = Outcome(problems=[], probes=[])
    root = "/" + trajectory.workspace.target
    nonce = secrets.token_hex(8)
    started = time.perf_counter()
    for number, step in enumerate(trajectory.steps):
        await _probe(sandbox, outcome)
        async with cpu_gate:
            try:
                answer = await _call(sandbox, step, root, nonce)
            except ValueError as error:
                outcome.problems.append(f"step {number} ({step.tool}): {error}")
                break
        wrong = complaints(step.expect, answer, nonce, step.tool)
        outcome.problems.extend(f"step {number} ({step.tool}): {text}" for text in wrong)
        outcome.steps += 1
        on_step()
        if wrong:
            break
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _probe(sandbox: Sandbox, outcome: Outcome) -> None:
    word = secrets.token_hex(8)
    started = time.monotonic()
    result = await sandbox.exec(["/bin/echo", word], timeout=PROBE_LIMIT)
    ended = time.monotonic()
    outcome.probes.append((ended, (ended - started) * 1e3))
    if result.exit_code != 0 or result.timed_out or result.stdout.text.strip() != word:
        outcome.problems.append(f"a small command answered {result.stdout!r} (exit code {result.exit_code}), expected {word!r}")
