"""Three nats-servers, replicas 3, the stream's leader killed: the promises of events, creates, commands and steps in a cluster."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import libdsec
from dsec import config as configs
from dsec.actors import run
from dsec.bus import Bus, EventPublisher, EventsConfig, ensure_events_stream, kv_bucket
from dsec.bus.events import events as read_events
from dsec.bus.messages import Event
from dsec.bus.streams import EVENTS_STREAM, ask
from dsec.model import SandboxId, new_ulid
from tests.three_servers import Three, chosen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_leaders_death_loses_no_event(state_dir: Path) -> None:
    """Events posted while the stream's leader is killed all arrive once; the key-value bucket keeps what it acknowledged."""
    async with Three(state_dir) as three, Bus.connect(three.url) as bus:
        await chosen(lambda: ensure_events_stream(bus, EventsConfig(replicas=3)))
        bucket = await chosen(lambda: kv_bucket(bus, "fence", replicas=3))
        revision = await bucket.create("n1", b"fenced")
        async with EventPublisher(bus, "n1", state_dir / "spool", ack_timeout=1.0) as publisher:
            leader = await three.leader(bus)
            posted = 0
            killed = 0.0
            for step in range(60):
                if step == 10:
                    leader.kill()
                    killed = time.monotonic()
                for _ in range(10):
                    posted += 1
                    sb = str(SandboxId("n1", new_ulid()))
                    publisher.post(Event(kind="created", sb=sb, edge="n1", project="p", incarnation="i:1", n=posted))
                await asyncio.sleep(0.02)
            await publisher.drained(60)
            print(f"\nall acknowledged {time.monotonic() - killed:.1f} s after the leader's death")
            assert publisher.lost == 0
            for _ in range(5):  # a reader's place may be on the server that is gone: then it gets another
                got = [event.n async for event in read_events(bus, since="all", follow=False)]
                assert sorted(got) == list(range(1, posted + 1))
            entry = await chosen(lambda: bucket.get("n1"))  # its leader may have been there too
            assert entry is not None
            assert (entry.value, entry.revision) == (b"fenced", revision)


class Worker:
    """A client's work without an end: create, commands, steps, stop. Keeps what it was told, and when."""

    def __init__(self, client: libdsec.Client) -> None:
        self.ended: list[str] = []
        self.times: list[float] = []
        self.task = asyncio.create_task(self._work(client))

    async def _work(self, client: libdsec.Client) -> None:
        spec = libdsec.spec("img", backend="fake", cpus=0.1, memory="64MiB", disk="16MiB", pids=32)
        while True:
            box = await client.create(spec, timeout=60)
            for number in range(3):
                result = await box.exec(f"echo {box.id} {number}", step=f"s{number}", timeout=60)
                again = await box.exec(f"echo {box.id} {number}", step=f"s{number}", timeout=60)
                assert result.stdout == again.stdout == f"{box.id} {number}\n".encode()
            assert (await box.exec("echo plain", timeout=60)).stdout == b"plain\n"
            assert [command.step for command in await box.commands() if command.step] == ["s0", "s1", "s2"]
            await box.stop()
            self.ended.append(box.id)
            self.times.append(time.monotonic())


@pytest.mark.parametrize("what", [EVENTS_STREAM, "KV_DSEC_NODES"])
async def test_work_goes_on_through_a_leaders_death(state_dir: Path, what: str) -> None:
    """Actors that are configured with three servers and replicas 3, clients at work, the leader of the events or of the fence records
    killed: each create and command is answered right, each step runs once, and of each sandbox there is every event."""
    async with AsyncExitStack() as stack:
        three = await stack.enter_async_context(Three(state_dir))
        tables: dict[str, dict[str, Any]] = {"bus": {"url": three.url, "events_replicas": 3}}

        def config(name: str) -> configs.Config:
            return configs.parse(tables | {"edge": {"name": name, "state_dir": str(state_dir / name), "backends": ["fake"]}})

        await stack.enter_async_context(run.watcher(config("w")))
        edges = [await stack.enter_async_context(run.edge(config(name))) for name in ("n1", "n2")]
        for _ in range(2):
            await stack.enter_async_context(run.scheduler(config("s")))
        bus = await stack.enter_async_context(Bus.connect(three.url))
        info = await chosen(lambda: ask(bus, f"STREAM.INFO.{what}"))
        assert info["config"]["num_replicas"] == 3
        client = await stack.enter_async_context(libdsec.connect(three.url))
        workers = [Worker(client) for _ in range(6)]
        async with asyncio.timeout(60):
            while not all(worker.ended for worker in workers):  # noqa: ASYNC110 - they set no event
                await asyncio.sleep(0.1)
        (await three.leader(bus, what)).kill()
        killed = time.monotonic()
        async with asyncio.timeout(120):  # until all have gone on for a while
            while time.monotonic() - killed < 12 or not all(worker.times[-1] > killed + 8 for worker in workers):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for worker in workers:
            worker.task.cancel()
        results = await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        times = sorted(at for worker in workers for at in worker.times if at > killed)
        gaps = [later - earlier for earlier, later in zip([killed, *times], times, strict=False)]
        print(f"\n{what}: {len(times)} sandboxes lived and ended after the leader's death; longest pause {max(gaps):.1f} s")
        for edge in edges:
            await edge.events.drained(60)
            assert edge.events.lost == 0
        ended = [sandbox for worker in workers for sandbox in worker.ended]
        assert len(set(ended)) == len(ended)
        seen = Counter([(event.sb, event.kind) async for event in read_events(bus, since="all", follow=False)])
        for sandbox in ended:
            kinds = {kind: seen[sandbox, kind] for kind in ("created", "running", "step", "stopped")}
            assert kinds == {"created": 1, "running": 1, "step": 3, "stopped": 1}, (sandbox, kinds)
