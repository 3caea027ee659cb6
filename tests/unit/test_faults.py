"""Points at which a process can be made to die: all have a name, and every step of a sandbox's life that waits lies between two."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import faults

ROOT = Path(__file__).resolve().parents[2] / "dsec"
# What carries out create, exec, pause, resume, capture and stop, by file.
LIFECYCLE = {
    "actors/intake.py": ("launch",),
    "actors/sandbox.py": ("launch", "_release", "_pack_diff"),
    "actors/pausing.py": ("pause", "resume", "complete", "_move"),
    "actors/commands.py": ("_begin", "_take_up", "_finish"),
    "actors/verbs.py": ("exec", "_outcome"),
    "actors/checkpoints.py": ("_make",),
    "backends/container.py": ("_launch", "_release"),
    "backends/pack.py": ("pack_upper",),
    "backends/pause.py": ("pause",),
}
# Awaits that change nothing: waiting for somebody else, looking, closing a link, or what has points of its own.
HARMLESS = (
    *("asyncio.sleep", "asyncio.wait", "asyncio.wait_for", "asyncio.gather", "asyncio.to_thread", "self._in", "read.wait", "steps"),
    *("sandbox.settled", "self.settled", "self.changed", "self._log", "self._step", "self._outcome", "self._known", "self._resolve"),
    *("link.close", "instance.link.close", "self.instance.link.close", "driver.detail", "pausing.quiet", "self.prepare", "self.release"),
    *(
        "self._ensure_holder",
        "unwired",
        "instance.link.wait",
        "self._result",
        "sandbox.pack_diff",
        "_to_the_end",
        "asyncio.shield",
        "self._free",
    ),
)


def passed() -> list[str]:
    """Every point in the code, in no order."""
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if _is_point(node):
                assert isinstance(node, ast.Call)
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: the name of a point is written out"
                found.append(name.value)
    return found


def _is_point(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "faults.reached"


def _steps(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines of a function with a point ("") or an await (its text)."""
    for node in ast.walk(function):
        if _is_point(node):
            yield node.lineno, ""
        elif isinstance(node, ast.Await) and not ast.unparse(node.value).startswith(HARMLESS):
            yield node.lineno, ast.unparse(node.value)


def test_every_point_is_named_and_passed_at_one_place() -> None:
    """The list is whole, and says nothing of places that are not there."""
    assert Counter(passed()) == Counter(list(faults.POINTS))


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in LIFECYCLE.items() for name in names])
def test_each_step_that_waits_lies_between_two_points(path: str, name: str) -> None:
    """In what carries out a sandbox's life no two awaits that change something follow each other without a point between them."""
    tree = ast.parse((ROOT / path).read_text())
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name == name)
    steps = sorted(_steps(function))
    assert any(not text for _, text in steps)
    bare = [f"{path}:{line}: {text}" for (_, before), (line, text) in itertools.pairwise(steps) if before and text]
    assert not bare


@pytest.mark.parametrize("order", ["create.asked", "create.asked:1", "create.asked:0 /tmp/x", "nowhere:1 /tmp/x", "create.asked:x /tmp/x"])
def test_an_order_that_means_nothing_is_refused(order: str) -> None:
    """A misspelt point would otherwise be a campaign that kills nothing."""
    with pytest.raises(ValueError, match="is not NAME:N FILE"):
        faults.arm(order)
    assert not faults._left


def test_the_nth_pass_kills(tmp_path: Path) -> None:
    """The process dies of SIGKILL at that pass, not before, and its last word is the point's name."""
    program = (
        "from dsec import faults\nfor n in range(5):\n print(n, flush=True)\n faults.reached('stop.told')\n faults.reached('stop.asked')"
    )
    told = tmp_path / "told"
    env = {**os.environ, faults.VARIABLE: f"stop.asked:3 {told}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT.parent, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"0\n1\n2\n")
    assert told.read_text() == "stop.asked\n"


def test_off_nothing_happens() -> None:
    """Without an order no point does anything."""
    assert not faults._left
    for name in faults.POINTS:
        faults.reached(name)
