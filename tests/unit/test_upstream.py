"""A worker's way to nats-server, before there is one."""

from __future__ import annotations

import socket

import pytest

from dsec.bus import upstream
from dsec.bus.grants import Grant
from dsec.errors import Unavailable

GRANT = Grant(unit="main", worker="n1-01k0000000000000000000000a", principal="local~x", project="default")


async def test_what_does_not_answer_is_named_with_what_helps() -> None:
    """The error says that there is no server, and which setting to look at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(Unavailable) as caught:
            await upstream.Upstream.open(f"nats://127.0.0.1:{taken.getsockname()[1]}", GRANT)
    assert caught.value.reason == "no_server"
    assert "bus.url" in caught.value.fix


def test_the_machines_authorities_are_read_once() -> None:
    """Not for each connection."""
    assert upstream._tls() is upstream._tls()
