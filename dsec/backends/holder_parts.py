"""What the holder's parts share: who asks, what is asked, and how it is refused. Standard library only."""

from __future__ import annotations

import socket
from typing import Any


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
