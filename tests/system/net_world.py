"""A node in a network namespace of the test's own, with a world outside of it; the machine's own network is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import syscalls
from tests.system.outside import METADATA, NODE4, NODE6, OUTSIDE4, OUTSIDE6

OUTSIDE = Path(__file__).with_name("outside.py")


def ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)


class World:
    """While it is open this thread, and all that it starts, is in the node's network namespace."""

    def __init__(self, served: Path) -> None:
        self.served = served

    def open(self) -> None:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        command = ["unshare", "--net", sys.executable, str(OUTSIDE), str(self.served)]
        self._outside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._expect("made")
            syscalls.unshare(syscalls.CLONE_NEWNET)
            ip("link set lo up", f"link add up0 type veth peer name up1 netns {self._outside.pid}")
            ip(f"addr add {NODE4}/24 dev up0", f"addr add {NODE6}/64 dev up0 nodad", "link set up0 up")
            assert self._outside.stdin is not None
            self._outside.stdin.write("go\n")
            self._outside.stdin.flush()
            self._expect("serving")
            ip(f"route add default via {OUTSIDE4}", f"-6 route add default via {OUTSIDE6}", f"route add {METADATA}/32 via {OUTSIDE4}")
            self.forward(True, True)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def forward(v4: bool, v6: bool) -> None:
        Path("/proc/sys/net/ipv4/ip_forward").write_text(str(int(v4)))
        Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text(str(int(v6)))

    @property
    def pid(self) -> int:
        """A process in the outside's network namespace."""
        return self._outside.pid

    def _expect(self, word: str) -> None:
        assert self._outside.stdout is not None
        line = self._outside.stdout.readline().strip()
        assert line == word, f"the outside said {line!r}"

    def close(self) -> None:
        syscalls.setns(self._home, syscalls.CLONE_NEWNET)
        os.close(self._home)
        self._outside.kill()
        self._outside.communicate()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "served").mkdir()
    made = World(tmp_path / "served")
    made.open()
    yield made
    made.close()
