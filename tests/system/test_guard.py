"""A program that runs under the launcher's guard ends with who asked for it, and so does all that it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsec.backends.guest import build

pytestmark = pytest.mark.needs("root", "guest")

# As CRIU does when it looks at a helper: a process that is stopped; and one that sleeps.
PROGRAM = """
import os, signal, sys, time
stopped = os.fork()
if not stopped:
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(stopped, os.WUNTRACED)
sleeps = os.fork()
if not sleeps:
    time.sleep(600)
print(os.getpid(), stopped, sleeps, flush=True)
if sys.argv[1] == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
ASKS = "import os, subprocess, sys; subprocess.run([sys.argv[1], *eval(sys.argv[2]), str(os.getpid()), *sys.argv[3:]])"


@pytest.fixture(scope="module")
def launcher() -> str:
    return str(build.ensure(program="launcher"))


def lives(pid: int) -> bool:
    """A zombie does not: its parent is the machine's init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids: list[int]) -> bool:
    end = time.monotonic() + 30
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    left = [pid for pid in pids if lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def words(how: str) -> list[str]:
    return ["guard"] if how == "guard" else ["owner", "0", str(os.getpid())]


@pytest.mark.parametrize("how", ["guard", "owner"])
def test_all_ends_with_who_asked(launcher: str, how: str) -> None:
    """Who asked is killed: nothing of the program is left, not even what is stopped."""
    argv = [sys.executable, "-c", ASKS, launcher, repr(words(how)), sys.executable, "-c", PROGRAM, "stay"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        pids = [int(word) for word in asks.stdout.readline().split()]
        assert len(pids) == 3
        asks.kill()
    assert all_end(pids)


def test_all_ends_with_a_program_that_crashes(launcher: str) -> None:
    """It had no time to end what it has begun."""
    argv = [launcher, "guard", str(os.getpid()), sys.executable, "-c", PROGRAM, "crash"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert all_end([int(word) for word in done.stdout.split()])


def test_nothing_begins_when_who_asked_is_gone_already(launcher: str, tmp_path: Path) -> None:
    """Its death came before anybody could be told of it."""
    other = tmp_path / "made"
    argv = [launcher, "guard", str(os.getppid()), "/bin/touch", str(other)]
    assert subprocess.run(argv, check=False, timeout=60).returncode == 1
    assert not other.exists()


def test_a_program_that_ends_is_told_as_it_ended(launcher: str) -> None:
    """Its exit code, and what it said."""
    argv = [launcher, "guard", str(os.getpid()), "/bin/sh", "-c", "echo said; exit 7"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "said\n")
