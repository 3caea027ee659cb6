"""The holder's part in native launches: it keeps the zygotes (launcher/zygote.c), one a core, and hands each launch to an idle one.

Once nothing is asked of it, a zygote makes ahead what the sandbox needs that is likely to come next (launcher/ahead.c): a pool of one a
zygote, by which the holder hands launches out. The holder never looks into a frame. It adds the descriptors of the layers, keeps launches
in order while all zygotes are busy, and learns the sandbox's init, which is its own child, by a pidfd. Standard library only.
"""

from __future__ import annotations

import array
import collections
import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NamedTuple

from dsec import syscalls
from dsec.backends.holder_parts import Call, Core, Refused, Sandbox

MAGIC = 0x314C5344
REQUEST = struct.Struct("=IIII")  # magic, number, more, next
ANSWER = struct.Struct("=Iii")  # number, pid, errno; then a text
FDS_A_MESSAGE = 250  # of the kernel's 253
MAX_TEXT = 1000
AHEAD, WHOLE = b"ahead", b"whole"  # what the first answer says of a launch whose namespaces had been made, or all of it
FAST_DEATHS = 20  # after so many with no launch between them a zygote is not started again: something is wrong with this node
KILL_AFTER = 2.0  # seconds that a zygote may go on with a launch that nobody wants any more
STRAY_AFTER = 0.3  # seconds in which a process that was made ahead and that no launch has taken has ended
AHEAD_LASTS = 5.0  # seconds without a launch after which a zygote lets go of it (IDLE_MS of launcher/zygote.c)


class Launch(NamedTuple):
    """One that waits for a zygote: the frame and the layers, the first of the sandbox's ids, and those of the sandboxes to come."""

    box: Sandbox
    fds: list[int]
    base: int
    coming: tuple[int, ...]


class Zygote:
    """One helper and what it is busy with."""

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        self.pid, self.pidfd, self.sock = pid, pidfd, sock
        self.number = 0
        self.box: Sandbox | None = None
        self.dying = False
        self.unwanted = 0.0  # since when
        self.ahead = 0  # the first id of the sandbox for which it makes ahead once it is idle; 0: none
        self.had_ahead = False  # when its launch was handed to it


class Zygotes(Core):
    """A part of the holder."""

    def __init__(self) -> None:
        self.zygotes: dict[int, Zygote] = {}  # by the number of their socket
        self.zygote_deaths = 0  # with no launch between them
        self._queue: collections.deque[Launch] = collections.deque()
        self.strays_at = 0.0  # when to wait for what zygotes have made ahead for nobody; 0: never

    # --- requests --------------------------------------------------------------------------------------------------

    def op_zygotes(self, call: Call) -> dict[str, Any]:
        """Have them ready; ``count`` 0 means one a core."""
        self._keep(call.message.get("count", 0) or len(os.sched_getaffinity(0)))
        zygotes = self.zygotes.values()
        ahead = sum(zygote.box is None and zygote.ahead != 0 for zygote in zygotes)
        return {"pids": [zygote.pid for zygote in zygotes], "deaths": self.zygote_deaths, "ahead": ahead}

    def op_spawn(self, call: Call) -> dict[str, Any] | None:
        """Start a sandbox from a frame; answered when its init is there, which has steps to go until it is the agent. Should one of them
        fail, it ends, and ``why`` in how it ended says which. The call's descriptor is the frame. ``base``: the first of the sandbox's ids,
        0 where it has the node's; ``coming``: those of the sandboxes that are likely to be next."""
        if len(call.fds) != 1:
            raise Refused("a launch needs its frame")
        box = self._admit(call)
        self._keep(1)
        layers = self._layers_of(call)  # ours to close
        self.sandboxes[box.ulid] = box
        coming = tuple(call.message.get("coming", ()))
        self._queue.append(Launch(box, [os.dup(call.fds[0]), *layers], call.message.get("base", 0), coming))
        self._hand_out_launches()
        return None

    def _hand_out_launches(self) -> None:
        while self._queue and self.zygotes:
            launch = self._queue[0]
            if launch.box.doomed:
                self._failed(launch.box, "killed before it was launched")
            elif not self._order(launch):
                return
            self._let_go(self._queue.popleft())
        while self._queue:
            launch = self._queue.popleft()
            self._let_go(launch)
            self._failed(launch.box, f"no zygote is left: {self.zygote_deaths} have died")

    def _order(self, launch: Launch) -> bool:
        """Hand it to an idle zygote, best to the one that has made its namespaces; False when there is none."""
        idle = [zygote for zygote in self.zygotes.values() if zygote.box is None and not zygote.dying]
        for zygote in sorted(idle, key=lambda zygote: (zygote.ahead != launch.base, zygote.ahead != 0)):
            others = {other.ahead for other in self.zygotes.values() if other is not zygote}
            ahead = next((base for base in launch.coming if base not in others), 0)
            parts = [launch.fds[at : at + FDS_A_MESSAGE] for at in range(0, len(launch.fds), FDS_A_MESSAGE)]
            try:
                for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
                    head = REQUEST.pack(MAGIC, zygote.number + 1, left, ahead)
                    zygote.sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", part))])
            except OSError:  # its end comes as an event of its own, and another takes the launch
                zygote.dying = True
                syscalls.pidfd_send_signal(zygote.pidfd, signal.SIGKILL)
                continue
            zygote.number += 1
            zygote.box, zygote.unwanted, zygote.had_ahead, zygote.ahead = launch.box, 0.0, zygote.ahead != 0, ahead
            return True
        return False

    def _let_go(self, launch: Launch) -> None:
        for fd in launch.fds:
            os.close(fd)

    def _failed(self, box: Sandbox, text: str) -> None:
        self._gone(box, {"code": -1, "signal": 0})
        self._answer(box, {"error": text})

    # --- the helpers -----------------------------------------------------------------------------------------------

    def _keep(self, count: int) -> None:
        while len(self.zygotes) < count and self.zygote_deaths < FAST_DEATHS:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                actions = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1)]
                pid = os.posix_spawn(
                    self.launcher,
                    [self.launcher, "zygote"],
                    {},
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3), *actions],
                    setsid=True,
                    setsigmask=(),
                    setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM),
                )
            syscalls.run_slice(thread=pid)  # a launch that waits for it does not wait for the slices of those who compute
            ours.settimeout(5.0)  # for sends; it reads one launch at a time and nothing else is sent
            self.zygotes[ours.fileno()] = Zygote(pid, syscalls.pidfd_open(pid), ours)
            self.epoll.register(ours.fileno(), select.EPOLLIN)

    def let_go(self) -> None:
        """Nothing that is made ahead stands on a layer that is to go."""
        for zygote in self.zygotes.values():
            zygote.ahead, zygote.had_ahead = 0, False
            self.strays_at = time.monotonic() + STRAY_AFTER
            with contextlib.suppress(OSError):  # its end comes as an event of its own
                zygote.sock.sendmsg([REQUEST.pack(MAGIC, 0, 0, 0)])

    def zygote_pids(self) -> set[int]:
        return {zygote.pid for zygote in self.zygotes.values()}

    def zygote_patience(self) -> float:
        """Ends a zygote that is stuck in a launch which was killed (a mount may wait for a disk). Seconds until it must be asked again."""
        now, unwanted = time.monotonic(), False
        for zygote in self.zygotes.values():
            if zygote.box is None or not zygote.box.doomed:
                continue
            unwanted = True
            zygote.unwanted = zygote.unwanted or now
            if now - zygote.unwanted > KILL_AFTER:
                syscalls.pidfd_send_signal(zygote.pidfd, signal.SIGKILL)  # its end comes as an event
        strays = max(self.strays_at - now, 0.0) + 0.01 if self.strays_at else 5.0
        return min(strays, KILL_AFTER / 4 if unwanted else 5.0)

    def zygote_event(self, fd: int) -> bool:
        """An answer or a death; False when the descriptor is none of theirs."""
        zygote = self.zygotes.get(fd)
        if zygote is None:
            return False
        try:
            data, ancillary, _, _ = zygote.sock.recvmsg(
                ANSWER.size + MAX_TEXT, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return True
        except OSError:
            data, ancillary = b"", []
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload[: len(payload) - len(payload) % 4])
        number, pid, code = ANSWER.unpack_from(data) if len(data) >= ANSWER.size else (0, 0, 0)
        if zygote.box is None or number != zygote.number:  # its end, or an answer that nobody asked for: what it has started is nobody's
            for fd in fds:
                syscalls.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)
            self._zygote_died(zygote)
        else:
            self.zygote_deaths = 0
            if fds:
                text = data[ANSWER.size :]
                if zygote.had_ahead and text != WHOLE:
                    self.strays_at = time.monotonic() + STRAY_AFTER
                self._born(zygote.box, pid, fds[0], text in (AHEAD, WHOLE))
            else:
                box, zygote.box = zygote.box, None
                if zygote.ahead and not self.strays_at:
                    self.strays_at = time.monotonic() + AHEAD_LASTS + STRAY_AFTER
                self._launched(box, pid, f"{data[ANSWER.size :].decode(errors='replace')}: {os.strerror(code)}" if code else "")
        self._hand_out_launches()
        return True

    def _born(self, box: Sandbox, pid: int, pidfd: int, ahead: bool) -> None:
        box.init, box.pid, box.starting = pidfd, pid, True
        self._watch(box.init, "init", box)
        if box.doomed:
            syscalls.pidfd_send_signal(box.init, signal.SIGKILL)
            self._answer(box, {"error": "killed while it was launched"})
        else:
            self._answer(box, {"ok": {"pid": pid, "ahead": ahead}})

    def _launched(self, box: Sandbox, pid: int, why: str) -> None:
        """It is the agent now, or ``why`` says what failed."""
        if not pid or (box.init < 0 and box.ended is None):
            self._failed(box, why or "its process could not be watched: no descriptor is left")
            return
        box.starting, box.why = False, why
        if box.ended is not None:
            self.init_gone(box, box.ended)
        elif why:
            syscalls.pidfd_send_signal(box.init, signal.SIGKILL)

    def _zygote_died(self, zygote: Zygote) -> None:
        """What it was starting is not known to us: the cgroups' owner kills it there, and it becomes one of the strays that are reaped."""
        del self.zygotes[zygote.sock.fileno()]
        self.epoll.unregister(zygote.sock.fileno())
        zygote.sock.close()
        syscalls.pidfd_send_signal(zygote.pidfd, signal.SIGKILL)
        end = syscalls.waitid(zygote.pidfd, block=True)
        os.close(zygote.pidfd)
        self.zygote_deaths += 1
        self.strays_at = time.monotonic() + STRAY_AFTER
        sys.stderr.write(f"holder: zygote {zygote.pid} ended with {end}\n")
        if (box := zygote.box) is not None:
            if box.starting:  # on its own from here: it ends itself, unless it is the agent already
                self._launched(box, box.pid, "")
            else:
                self._failed(box, "the zygote died")
        try:
            self._keep(len(self.zygotes) + 1)
        except OSError as error:  # the next launch tries again
            sys.stderr.write(f"holder: no other zygote: {error}\n")
