"""An agent is told to listen at another socket: whatever it answers, it can be called afterwards."""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec import syscalls
from dsec.backends import capture
from dsec.backends.guest import wire
from tests.system.aether_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


class Agent:
    """Listens at ``path``, and does with LISTEN what it was made for."""

    def __init__(self, path: str, answer: Callable[[socket.socket], None]) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(4)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        call, _ = self.listener.accept()
        with call:
            assert call.recv(4096)
            call.sendall(wire.frame(wire.Type.HELLO, 0, wire.hello(1)))
            assert call.recv(4096)
            self._answer(call)

    def close(self) -> None:
        self._thread.join(20)
        self.listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    made = str(tmp_path / "agent")
    yield made
    capture.forget_sockets(made)
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_refuses_is_called_where_it_was(path: str) -> None:
    """Its socket is the one at the path, and nothing else is left beside it."""
    no = struct.pack("<HI", wire.Code.INVALID, 0) + wire.text("") + wire.text("it will not")
    agent = Agent(path, lambda call: call.sendall(wire.frame(wire.Type.ERROR, 1, no)))
    before = os.stat(path).st_ino
    with pytest.raises(OSError, match="it will not"):
        capture.move_house(os.getpid(), path, 1)
    agent.close()
    assert os.stat(path).st_ino == before
    assert os.listdir(os.path.dirname(path)) == ["agent"]


def test_an_agent_that_is_slow_finds_its_callers_waiting(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take the new socket after we have given up: that one stays at the path, and is gone when the sandbox is."""
    monkeypatch.setattr(capture, "PATIENCE", 1.0)
    over = threading.Event()
    agent = Agent(path, lambda _: (over.wait(30), None)[1])
    before = os.stat(path).st_ino
    with pytest.raises(TimeoutError):
        capture.move_house(os.getpid(), path, 1)
    over.set()
    agent.close()
    assert os.stat(path).st_ino != before
    assert os.stat(f"{path}.former").st_ino == before


def test_what_fails_in_another_namespace_is_raised_here() -> None:
    """Whatever it is, and not only what the kernel says."""

    def work() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        capture.in_namespace_of(os.getpid(), "net", syscalls.CLONE_NEWNET, work)


async def test_an_agent_that_is_given_several_descriptors_keeps_none(state_dir: Path) -> None:
    """One is looked at, and the others never come in."""
    state_dir.chmod(0o755)
    box = Box(state_dir)
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.socket(socket.AF_UNIX) as call:
            call.settimeout(20)
            call.connect(box.path)
            call.sendall(wire.frame(wire.Type.HELLO, 0, wire.hello(1)))
            assert call.recv(64)
            before = len(os.listdir(f"/proc/{box.pid}/fd"))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno(), theirs.fileno()]))]
            for number in range(1, 21):
                call.sendmsg([wire.frame(wire.Type.LISTEN, number)], rights)
                assert wire.header(call.recv(512))[1] == wire.Type.ERROR
            assert len(os.listdir(f"/proc/{box.pid}/fd")) <= before + 1
    finally:
        await box.close()
