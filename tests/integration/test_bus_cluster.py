"""Three nats-servers, replicas 3, the stream's leader killed: the events' promise in a cluster."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dsec.bus import Bus, EventPublisher, EventsConfig, ensure_events_stream, kv_bucket
from dsec.bus.events import events as read_events
from dsec.bus.messages import Event
from dsec.bus.server import NatsServer
from dsec.bus.streams import EVENTS_STREAM, ask
from dsec.errors import DsecError
from dsec.model import SandboxId, new_ulid


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.mark.slow
async def test_a_leaders_death_loses_no_event(state_dir: Path) -> None:
    """Events posted while the stream's leader is killed all arrive once; the key-value bucket keeps what it acknowledged."""
    clients, routes = free_ports(3), free_ports(3)
    listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    servers = {
        f"s{index}": NatsServer(
            state_dir / f"s{index}",
            port=clients[index],
            name=f"s{index}",
            extra=f'cluster {{ name: c, listen: "127.0.0.1:{routes[index]}", routes: [{listed}] }}',
        )
        for index in range(3)
    }
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
        url = ",".join(server.url for server in servers.values())
        bus = await stack.enter_async_context(Bus.connect(url))
        config = EventsConfig(replicas=3)
        for attempt in range(100):
            try:
                await ensure_events_stream(bus, config)
                bucket = await kv_bucket(bus, "fence", replicas=3)
                break
            except DsecError:  # the meta group is still choosing its leader
                assert attempt < 99
                await asyncio.sleep(0.2)
        revision = await bucket.create("n1", b"fenced")
        publisher = await stack.enter_async_context(EventPublisher(bus, "n1", state_dir / "spool", ack_timeout=1.0))
        leader = str((await ask(bus, f"STREAM.INFO.{EVENTS_STREAM}"))["cluster"]["leader"])
        posted = 0
        killed = 0.0
        for step in range(60):
            if step == 10:
                servers[leader].kill()
                killed = time.monotonic()
            for _ in range(10):
                posted += 1
                sb = str(SandboxId("n1", new_ulid()))
                publisher.post(Event(kind="created", sb=sb, edge="n1", project="p", incarnation="i:1", n=posted))
            await asyncio.sleep(0.02)
        await publisher.drained(60)
        print(f"\nall acknowledged {time.monotonic() - killed:.1f} s after the leader's death")
        assert publisher.lost == 0
        got = [event.n async for event in read_events(bus, since="all", follow=False)]
        assert sorted(got) == list(range(1, posted + 1))
        entry = await bucket.get("n1")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"fenced", revision)
