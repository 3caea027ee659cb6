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
from dsec.backends.holder_parts import Edge, Sandbox
from dsec.backends.zygotes import ANSWER, Zygote


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
