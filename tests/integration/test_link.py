"""The node's side of the guest wire, against ends that a test can place: an agent that dies in the middle of a call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.backends.guest import wire
from dsec.backends.guest.link import Link
from dsec.errors import SandboxGone, Unavailable
from dsec.model import FileRequest

GREETING = wire.frame(wire.Type.HELLO, 0, wire.HELLO_REPLY.pack(wire.PROTO, wire.PROTO_MIN, 0, 1, 1))


@asynccontextmanager
async def dying(path: Path, greets: bool, closes_at: int) -> AsyncIterator[Callable[[], int]]:
    """Who listens at ``path`` and hangs up on everybody, after HELLO and a request when it ``greets``, until it has done so ``closes_at``
    times (0: for ever): then nobody listens. Answers how often it has hung up."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    listener.listen(8)
    calls = 0
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        nonlocal calls
        while not calls or calls != closes_at:
            call, _ = await loop.sock_accept(listener)
            with call:
                if greets:
                    await loop.sock_recv(call, 4096)
                    await loop.sock_sendall(call, GREETING)
                    await loop.sock_recv(call, 4096)
                calls += 1
        listener.close()

    serving = asyncio.ensure_future(serve())
    try:
        yield lambda: calls
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listener.close()


@pytest.mark.parametrize("closes_at", [1, 2, 4])
async def test_who_hangs_up_while_it_ends_is_told_as_gone(tmp_path: Path, closes_at: int) -> None:
    """The connections of a sandbox that ends break a moment before its listener is gone: the caller hears of the end."""
    async with dying(tmp_path / "s", False, closes_at) as calls:
        with pytest.raises(SandboxGone):
            await Link(str(tmp_path / "s"), generation=1).ops()
        assert calls() == closes_at


async def test_a_request_that_it_took_along_is_told_as_gone(tmp_path: Path) -> None:
    """Also where the request must not be made again, so that nobody knows whether it was carried out."""
    async with dying(tmp_path / "s", True, 1):
        with pytest.raises(SandboxGone):
            await Link(str(tmp_path / "s"), generation=1).files(FileRequest(verb="mkdir", path="/x"))


async def test_who_hangs_up_and_lives_is_unavailable(tmp_path: Path) -> None:
    """An agent that takes no call, though it is there, has not ended."""
    async with dying(tmp_path / "s", False, 0) as calls:
        with pytest.raises(Unavailable) as caught:
            await Link(str(tmp_path / "s"), generation=1).ops()
        assert caught.value.reason == "guest_closed"
        assert calls() > 1
