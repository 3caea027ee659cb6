"""Three nats-servers that are one cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self, TypeVar

from dsec.bus import Bus
from dsec.bus.server import NatsServer
from dsec.bus.streams import EVENTS_STREAM, ask
from dsec.errors import DsecError

T = TypeVar("T")


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Three:
    """Three nats-servers that are one cluster with JetStream."""

    def __init__(self, folder: Path) -> None:
        clients, routes = free_ports(3), free_ports(3)
        listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = {
            f"s{index}": NatsServer(
                folder / f"s{index}",
                port=clients[index],
                name=f"s{index}",
                extra=f'cluster {{ name: c, listen: "127.0.0.1:{routes[index]}", routes: [{listed}] }}',
            )
            for index in range(3)
        }
        self.url = ",".join(server.url for server in self.servers.values())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(self._stack.enter_async_context(server) for server in self.servers.values()))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def leader(self, bus: Bus, stream: str = EVENTS_STREAM) -> NatsServer:
        return self.servers[str((await ask(bus, f"STREAM.INFO.{stream}"))["cluster"]["leader"])]


async def chosen(make: Callable[[], Awaitable[T]]) -> T:
    """What JetStream answers once its meta group has a leader."""
    for _ in range(100):
        with contextlib.suppress(DsecError):
            return await make()
        await asyncio.sleep(0.2)
    return await make()
