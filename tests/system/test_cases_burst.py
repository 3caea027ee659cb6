"""256 of everything at one time on real containers, through the whole chain; tests are named after the cases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import Empty, Heartbeat
from dsec.bus.subjects import Caller
from libdsec import Busy, Client, Sandbox
from tests.system.container_box import client, cluster  # noqa: F401

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MANY = 256
TINY: libdsec.Options = {"memory": "32MiB", "disk": "8MiB", "cpus": 0.5, "pids": 16}
BUDGET = 240.0  # seconds for a whole create, of all 256; a machine of its own needs a few


@pytest_asyncio.fixture(loop_scope="module")
async def beats(cluster: Cluster) -> AsyncIterator[list[Heartbeat]]:  # noqa: F811
    """How the Edge stands, asked many times a second while the test runs."""
    heard: list[Heartbeat] = []
    bus = await Bus.connect(cluster.url, name="test")
    subject = subjects.everyone(bus.unit, "beat", Caller("test", "default"))

    async def ask() -> None:
        while True:
            heard.extend((await bus.scatter(subject, Empty(), Heartbeat, timeout=5.0, expect=1))[0])
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(ask())
    yield heard
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await bus.close()


def p99(took: list[float]) -> float:
    return sorted(took)[len(took) * 99 // 100 - 1]


async def timed(work: object, took: list[float]) -> object:
    began = time.monotonic()
    result = await work  # type: ignore[misc]
    took.append(time.monotonic() - began)
    return result


async def test_c34_256_commands_at_once_on_one_sandbox(client: Client) -> None:  # noqa: F811
    """Each has its own answer; none times out."""
    async with client.sandbox("small", memory="256MiB", disk="8MiB", cpus=1, pids=600) as sandbox:
        took: list[float] = []
        results = await asyncio.gather(*(timed(sandbox.exec(["echo", str(n)], timeout=BUDGET), took) for n in range(MANY)))
        assert [result.stdout.text.strip() for result in results] == [str(n) for n in range(MANY)]  # type: ignore[attr-defined]
        print(f"exec p99 {p99(took):.3f} s")


async def test_c34_c35_c38_256_creates_at_once(
    client: Client,  # noqa: F811
    cluster: Cluster,  # noqa: F811
    beats: list[Heartbeat],
) -> None:
    """From eight clients, each create a request of its own: never more are launched at one time than the cap allows, one budget for the
    whole create is enough for all, none is lost or doubled; a command in each of them, all at once, is answered; all end together."""
    clients = [libdsec.connect(cluster.url) for _ in range(8)]
    try:
        for each in clients:
            await each
        took: list[float] = []
        wanted = [clients[n % 8].create("small", labels={"spike": "1", "n": str(n)}, timeout=BUDGET, **TINY) for n in range(MANY)]
        boxes: list[Sandbox] = await asyncio.gather(*(timed(work, took) for work in wanted))  # type: ignore[arg-type]
        print(f"create p99 {p99(took):.3f} s")
        assert len({box.id for box in boxes}) == MANY
        found = await client.list({"spike": "1"})
        assert {info.id for info in found} == {box.id for box in boxes}
        assert {info.labels["n"] for info in found} == {str(n) for n in range(MANY)}
        assert beats
        launching = [beat.states.get("creating", 0) for beat in beats]
        assert 1 <= max(launching) <= beats[0].load.starting_max
        answers: list[float] = []
        results = await asyncio.gather(*(timed(box.exec(["echo", box.id], timeout=BUDGET), answers) for box in boxes))
        assert [result.stdout.text.strip() for result in results] == [box.id for box in boxes]  # type: ignore[attr-defined]
        print(f"exec p99 {p99(answers):.3f} s")
    finally:
        outcomes = await client.stop({"spike": "1"})
        for each in clients:
            await each.close()
    assert [outcome.error for outcome in outcomes if outcome.error is not None] == []
    assert await client.list() == []


async def test_c35_c38_more_than_the_node_takes(client: Client) -> None:  # noqa: F811
    """What finds no room within its own budget fails with a typed, retryable error that names what is short, and holds no slot; the
    rest becomes ready, and the next ones find room again."""
    whole = (await client.nodes()).nodes[0].load.memory_free
    large = libdsec.spec("small", memory=whole // 6 - (16 << 20), disk="8MiB", cpus=0.5, pids=16)
    wanted = [client.create(large, timeout=5.0) for _ in range(12)]
    results = await asyncio.gather(*wanted, return_exceptions=True)
    made = [each for each in results if isinstance(each, Sandbox)]
    failed = [each for each in results if not isinstance(each, Sandbox)]
    try:
        assert 1 <= len(made) <= 6
        assert all(isinstance(error, Busy | libdsec.DeadlineExceeded) and error.retryable for error in failed)
        assert [error.reason for error in failed].count("memory") >= 6  # type: ignore[union-attr]
        assert {info.id for info in await client.list()} == {box.id for box in made}
    finally:
        await asyncio.gather(*(box.stop() for box in made))
    again = await client.create(large, timeout=BUDGET)
    await again.stop()
