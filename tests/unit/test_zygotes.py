"""The holder's side of its zygotes, with a socket in a zygote's place."""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

from dsec import syscalls
from dsec.backends import zygotes
from dsec.backends.holder import Holder
from dsec.backends.holder_parts import Call, Edge, Sandbox
from dsec.backends.zygotes import ANSWER, REQUEST, Launch, Zygote


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def pidfds() -> int:
    """How many this process holds."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the list's own, for one
            found += os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[pidfd]"
    return found


def test_an_answer_that_nobody_asked_for_is_a_zygotes_end(tmp_path: Path) -> None:
    """It is out of step: what it started is killed, no descriptor stays, the launch that waited is told, and the holder goes on."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "holder"))
    holder = Holder(listener, "/bin/false", 30.0)
    holder.zygote_deaths = zygotes.FAST_DEATHS  # no other one is started
    edge, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    box = Sandbox("one")
    box.reply = (Edge(edge), 7)
    holder.sandboxes["one"] = box
    with sleeper() as helper, sleeper() as started:
        theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote = Zygote(helper.pid, syscalls.pidfd_open(helper.pid), mine)
        zygote.number, zygote.box = 3, box
        number = mine.fileno()
        holder.zygotes[number] = zygote
        holder.epoll.register(number, select.EPOLLIN)
        pidfd = syscalls.pidfd_open(started.pid)
        theirs.sendmsg([ANSWER.pack(2, started.pid, 0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))])
        os.close(pidfd)
        before = pidfds()
        assert holder.zygote_event(number)
        assert started.wait(30) == -signal.SIGKILL
        assert pidfds() == before - 1  # the zygote's is gone, and the one that came with its answer does not stay
        helper.returncode = -signal.SIGKILL  # the holder has waited for it
    assert not holder.zygotes
    assert b"the zygote died" in ours.recv(4096)
    for each in (listener, edge, ours, theirs):
        each.close()
    holder.epoll.close()
    os.close(holder.outside)


class Row:
    """A holder with zygotes that are sockets: what each is asked, and its answers."""

    def __init__(self, path: Path, count: int) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.holder = Holder(self.listener, "/bin/false", 30.0)
        self.theirs = []
        for number in range(count):
            theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.setblocking(False)
            self.theirs.append(theirs)
            self.holder.zygotes[ours.fileno()] = Zygote(number, -1, ours)

    def launch(self, base: int, *coming: int) -> tuple[int, int]:
        """Which zygote is handed it, and for whom that one is to make namespaces next."""
        self.holder._queue.append(Launch(Sandbox(f"of {base}"), [os.open("/dev/null", os.O_RDONLY)], base, coming))
        self.holder._hand_out_launches()
        for at, each in enumerate(self.theirs):
            with contextlib.suppress(BlockingIOError):
                data, fds, _, _ = socket.recv_fds(each, REQUEST.size, 4)
                for fd in fds:
                    os.close(fd)
                return at, REQUEST.unpack(data)[3]
        raise AssertionError("nobody was asked")

    def idle(self, *which: int) -> None:
        for at, zygote in enumerate(self.holder.zygotes.values()):
            if at in which:
                zygote.box = None

    def close(self) -> None:
        for zygote in self.holder.zygotes.values():
            zygote.sock.close()
        for each in (self.listener, *self.theirs):
            each.close()
        self.holder.epoll.close()
        os.close(self.holder.outside)


def test_a_launch_goes_to_the_zygote_that_made_its_namespaces(tmp_path: Path) -> None:
    """Each makes them for another sandbox of those to come, and an idle one that has them is preferred to one that has not."""
    row = Row(tmp_path / "holder", 2)
    try:
        assert row.launch(100, 200, 300) == (0, 200)
        assert row.launch(50, 200, 300) == (1, 300)  # 200 is the other's already
        row.idle(0, 1)
        assert row.holder.op_zygotes(Call({}, [], Edge(row.listener)))["ahead"] == 2
        assert row.launch(300, 400, 200) == (1, 400)
        row.idle(1)
        assert row.launch(200, 400, 500) == (0, 500)
    finally:
        row.close()


def test_a_launch_for_which_nothing_was_made_takes_nothing_from_another(tmp_path: Path) -> None:
    """It goes to a zygote that has made nothing, where one is idle."""
    row = Row(tmp_path / "holder", 2)
    try:
        assert row.launch(100, 200) == (0, 200)
        row.idle(0)
        assert row.launch(70) == (1, 0)
        row.idle(1)
        assert row.launch(200, 300) == (0, 300)
    finally:
        row.close()
