"""What the holder's parts share: who asks, what is asked, and how it is refused. Standard library only."""

from __future__ import annotations

import socket
from typing import Any


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
        self.reply: tuple[Edge, int] | None = None
