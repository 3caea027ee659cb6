"""What the holder's parts share: who asks, what is asked, and how it is refused. Standard library only."""

from __future__ import annotations

import select
import socket
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dsec.layers.mounts import LayerMount

FRAMES = 2  # version of the frames that zygotes read: FRAME_VERSION of launcher/launcher.h
PROTO, PROTO_MIN = 2, 1  # what Edge and holder say to each other; an Edge speaks N and N-1, for a holder lives as long as its sandboxes


class Refused(Exception):
    """The request cannot be done; the text goes to the Edge."""


class Edge:
    """A connected Edge."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock


class Call:
    """One request: its fields, the descriptors that came with it and who asks."""

    def __init__(self, message: dict[str, Any], fds: list[int], edge: Edge) -> None:
        self.message = message
        self.fds = fds
        self.edge = edge

    def __getitem__(self, field: str) -> Any:
        return self.message[field]


class Sandbox:
    """One launch: the launcher (then the runtime) while it runs, and the sandbox's init from then on."""

    def __init__(self, ulid: str) -> None:
        self.ulid = ulid
        self.launcher = -1  # pidfd
        self.launcher_pid = 0
        self.status = -1  # read end of the launcher's status pipe
        self.pidfile = ""
        self.init = -1  # pidfd
        self.pid = 0
        self.child = True  # ours to wait for; False for one adopted after a holder's death
        self.doomed = False
        self.starting = False  # its init is there, and its zygote has not said that it is the agent
        self.why = ""  # what failed between the two
        self.ended: dict[str, Any] | None = None  # how it ended while that was so
        self.reply: tuple[Edge, int] | None = None


class Core(Protocol):
    """What the holder has for its parts, which are classes that it is made of; type checkers see to it that it has all of this."""

    epoll: select.epoll
    launcher: str
    listener: socket.socket
    edges: dict[int, Edge]
    layers: dict[str, int]
    attached: dict[str, str]
    sandboxes: dict[str, Sandbox]

    def op_kill(self, call: Call) -> dict[str, Any]: ...

    def let_go(self) -> None: ...

    def guarded(self, mount: LayerMount) -> int: ...

    def hand_out(self, name: str, call: Call) -> None: ...

    def unmark(self, name: str) -> None: ...

    def _admit(self, call: Call) -> Sandbox: ...

    def _layers_of(self, call: Call) -> list[int]: ...

    def _hold(self, key: str, fd: int) -> None: ...

    def _watch(self, fd: int, kind: str, box: Sandbox) -> None: ...

    def init_gone(self, box: Sandbox, status: dict[str, Any]) -> None: ...

    def _gone(self, box: Sandbox, status: dict[str, Any]) -> None: ...

    def _answer(self, box: Sandbox, body: dict[str, Any]) -> None: ...

    def _send(self, edge: Edge, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None: ...
