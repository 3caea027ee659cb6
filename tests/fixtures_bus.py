"""Connections to a private nats-server and that server itself; loaded by conftest as a plugin."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.bus import Bus
from dsec.bus.memory import Broker
from dsec.bus.server import NatsServer
from dsec.model import new_ulid
from dsec.trees import clear

Opener = Callable[..., Awaitable[Bus]]


@pytest_asyncio.fixture
async def nats_server(state_dir: Path) -> AsyncIterator[NatsServer]:
    """A real nats-server with JetStream on a free port; it is gone afterwards."""
    async with NatsServer(state_dir / "nats") as server:
        yield server


@pytest_asyncio.fixture
async def open_bus(nats_server: NatsServer) -> AsyncIterator[Opener]:
    """``await open_bus(name="a")``: a connection to `nats_server`, closed afterwards."""
    async for opener in _opener(nats_server.url):
        yield opener


@pytest_asyncio.fixture(params=["memory", "nats"])
async def any_bus(request: pytest.FixtureRequest) -> AsyncIterator[Opener]:
    """As `open_bus`, over each kind of transport: one suite for all of them."""
    if request.param == "memory":
        name = new_ulid()
        async for opener in _opener(f"memory://{name}"):
            yield opener
        Broker._named.pop(name, None)
        return
    directory = Path(tempfile.mkdtemp(prefix="dsec-nats-"))
    try:
        async with NatsServer(directory, jetstream=False) as server:
            async for opener in _opener(server.url):
                yield opener
    finally:
        clear(directory)


async def _opener(url: str) -> AsyncIterator[Opener]:
    opened: list[Bus] = []

    async def open_(**options: object) -> Bus:
        bus = await Bus.connect(url, **options)  # type: ignore[arg-type]
        opened.append(bus)
        return bus

    yield open_
    for bus in opened:
        await bus.close(1.0)
