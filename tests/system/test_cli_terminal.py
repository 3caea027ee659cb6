"""`dsec shell` and its kin on a real pseudo-terminal, against real containers: what a person at a keyboard gets."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsec.actors.up import Cluster
from libdsec import Client, Sandbox
from tests.system.container_box import client, cluster, sandbox  # noqa: F401

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]


class Person:
    """Somebody at a terminal of 30 by 100 in which `dsec …` runs."""

    def __init__(self, url: str, *arguments: str) -> None:
        self.master, self.slave = os.openpty()
        self.size(30, 100)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        os.set_blocking(self.master, False)

        def lead() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        environ = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")} | {"DSEC_URL": url, "TERM": "xterm"}
        command = [sys.executable, "-m", "dsec.cli", *arguments]
        ends: dict[str, Any] = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.process = subprocess.Popen(command, env=environ, preexec_fn=lead, **ends)  # noqa: PLW1509 - it only leads a session

    def size(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    async def see(self, pattern: str, seconds: float = 20.0) -> re.Match[bytes]:
        until = time.monotonic() + seconds
        while True:
            try:
                self.seen += os.read(self.master, 65536)
            except (BlockingIOError, OSError):
                await asyncio.sleep(0.02)
            if found := re.search(pattern.encode(), self.seen):
                self.seen = self.seen[found.end() :]
                return found
            assert time.monotonic() < until, (pattern, self.seen)

    async def end(self, seconds: float = 15.0) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)

    @property
    def as_before(self) -> bool:
        now = termios.tcgetattr(self.slave)
        return now[:4] == self.before[:4]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def person(cluster: Cluster) -> Iterator[type[Person]]:  # noqa: F811
    made: list[Person] = []

    class Made(Person):
        def __init__(self, *arguments: str) -> None:
            super().__init__(cluster.url, *arguments)
            made.append(self)

    yield Made
    for each in made:
        each.close()


async def test_c20_shell_is_like_ssh(person: type, sandbox: Sandbox) -> None:  # noqa: F811
    """Raw mode, window size and its changes, Ctrl+C for the command inside, the exit code, and the terminal as it was."""
    me = person("shell", sandbox.id)
    me.type("stty size; echo $TERM\n")
    await me.see(r"30 100\r\n(.*\r\n)*?xterm")
    assert not me.as_before
    me.size(41, 77)
    me.type("sleep 0.3; stty size\n")
    await me.see(r"41 77\r\n")
    me.type("sleep 100; echo not-this\n")
    await asyncio.sleep(0.3)
    me.type("\x03")
    me.type("echo a$((1+1))b\n")
    await me.see("a2b")
    me.type("~? is no escape inside of a line; exit 7\n")
    me.type("exit 7\n")
    assert await me.end() == 7
    assert me.as_before
    assert not [op for op in await sandbox.ops() if op.running]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_the_terminal_is_right_after_every_end(person: type, sandbox: Sandbox, signum: signal.Signals) -> None:  # noqa: F811
    """Whatever ends `dsec shell`, the terminal is no longer raw; and what it ran ends too, unless it was killed with -9."""
    me = person("shell", sandbox.id, "--", "sh", "-c", "echo up; sleep 64")
    await me.see("up")
    assert not me.as_before
    me.process.send_signal(signum)
    assert await me.end() in (-signum, 128 + signum)
    until = time.monotonic() + 5
    while not me.as_before or (signum != signal.SIGKILL and [op for op in await sandbox.ops() if op.running]):
        await asyncio.sleep(0.05)
        assert time.monotonic() < until


async def test_detach_and_attach(person: type, sandbox: Sandbox) -> None:  # noqa: F811
    """Enter ~d leaves the command running; attach shows what it wrote meanwhile and types into it."""
    me = person("shell", sandbox.id, "--", "sh", "-c", "while read x; do echo got-$x; done; exit 3")
    me.type("one\n")
    await me.see("got-one")
    me.type("\r~d")
    found = await me.see(r"dsec attach (\S+) (\S+)\r\n")
    assert await me.end() == 0
    assert me.as_before
    other = person("attach", sandbox.id)
    await other.see("got-one")
    other.type("two\n")
    await other.see("got-two")
    third = person("attach", sandbox.id, found[2].decode())
    await third.see("got-two")
    third.type("three\n")
    await other.see("got-three")
    other.type("four\n")
    await third.see("got-four")
    other.type("\x04")
    assert await other.end() == 3
    assert await third.end() == 3


async def test_end_escape_and_exec_it(person: type, sandbox: Sandbox) -> None:  # noqa: F811
    """exec -it gives a terminal; Enter ~. ends the command."""
    me = person("exec", "-it", sandbox.id, "--", "sh", "-c", "test -t 0 && stty size; sleep 64")
    await me.see(r"30 100")
    me.type("\r~.")
    assert await me.end() == 137
    assert me.as_before


async def test_run_it(person: type, client: Client) -> None:  # noqa: F811
    """run -it: a terminal in a new sandbox, which is gone afterwards."""
    limits = ("--memory", "96MiB", "--disk", "16MiB", "--pids", "64")
    me = person("run", "-it", *limits, "small", "sh")
    me.type("echo $((6*7))\n")
    await me.see("42")
    me.type("exit 5\n")
    assert await me.end() == 5
    assert me.as_before
    assert await client.list() == []


async def test_the_terminal_lives_over_a_killed_bus(person: type, cluster: Cluster, sandbox: Sandbox) -> None:  # noqa: F811
    """nats-server is killed with -9 and started: what is typed afterwards arrives, and what is written comes."""
    me = person("shell", sandbox.id, "--", "sh")
    me.type("echo a$((1+1))b\n")
    await me.see("a2b")
    cluster.nats.kill()
    await asyncio.sleep(0.3)
    await cluster.nats.start()
    me.type("echo c$((1+2))d\n")
    await me.see("c3d", 40)
    me.type("exit 4\n")
    assert await me.end() == 4


async def test_without_a_terminal_it_says_so(cluster: Cluster, sandbox: Sandbox) -> None:  # noqa: F811
    """`dsec shell` with a pipe as its input is a usage error that names what to use."""
    command = [sys.executable, "-m", "dsec.cli", "--url", cluster.url, "shell", sandbox.id]
    done = await asyncio.to_thread(subprocess.run, command, input=b"", capture_output=True, timeout=30, check=False)
    assert done.returncode == 2
    assert b"dsec exec" in done.stderr
