"""A Scheduler under more than it can place: it says so, holds a bounded amount, and takes on again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import CreateAck, CreateItem, CreateRequest, LaunchReply, LaunchRequest
from dsec.bus.server import NatsServer
from dsec.errors import Busy
from dsec.model import new_ulid
from tests.integration.actors_box import ME, SPEC, Asker, Box, eventually


@pytest.fixture
async def box(nats_server: NatsServer, state_dir: Path) -> AsyncIterator[Box]:
    box = Box(nats_server.url, state_dir)
    yield box
    await box.close()


async def ask(bus: Bus, deadline_ms: int) -> CreateAck:
    """One create that takes some 100 KB to remember."""
    spec = msgspec.structs.replace(SPEC, env={f"N{number}": "x" * 1000 for number in range(40)})
    specs = (spec, msgspec.structs.replace(spec, image="other"))
    request = CreateRequest(
        burst=new_ulid(),
        slice=0,
        specs=specs,
        items=(CreateItem(spec=0, first=0, count=50), CreateItem(spec=1, first=50, count=50)),
        inbox="_INBOX.nobody.x",
        deadline_ms=deadline_ms,
    )
    return await bus.call(subjects.api(bus.unit, "create", ME), request, CreateAck, timeout=10)


async def test_more_than_can_be_placed_is_refused_and_taken_later(box: Box) -> None:
    """With no node up, creates wait until the memory for them is full; then they are `Busy`, until the waiting ones have ended."""
    scheduler = await box.scheduler(pending_bytes=1 << 20)
    bus = await box.bus()
    taken: list[CreateAck] = []

    async def fill() -> None:
        while len(taken) < 100:
            taken.append(await ask(bus, deadline_ms=4_000))

    with pytest.raises(Busy) as caught:
        await fill()
    assert caught.value.reason == "scheduler"
    assert caught.value.retryable
    assert 3 <= len(taken) <= 30
    async with asyncio.timeout(30):
        while scheduler._pending:  # noqa: ASYNC110 - until their deadlines have passed
            await asyncio.sleep(0.05)
    assert (await ask(bus, deadline_ms=500)).scheduler == scheduler.name


async def test_settled_requests_are_forgotten_beyond_their_memory(box: Box) -> None:
    """What is settled stays known for repeats only as far as there is memory for it."""
    scheduler = await box.scheduler(remember_bytes=1 << 20, pending_bytes=1 << 30)
    bus = await box.bus()
    for _ in range(30):
        await ask(bus, deadline_ms=300)
    async with asyncio.timeout(30):
        while sum(each.size for each in scheduler._slices.values()) > 1 << 20:  # noqa: ASYNC110 - one look a second
            await asyncio.sleep(0.05)
    assert scheduler._slices


async def test_a_silent_edge_holds_up_no_repeat(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who repeats a settled burst hears from the nodes that answer while another one does not."""
    monkeypatch.setattr("dsec.actors.scheduler.REPEAT", 600.0)
    edges = {name: await box.edge(name, slots=4) for name in ("n1", "n2")}
    scheduler = await box.scheduler()
    await eventually(lambda: len(scheduler.picture) == 2)
    first = await Asker(await box.bus()).open()
    burst = new_ulid()
    await first.create(8, burst=burst)
    await first.until(lambda asked: len(asked.ready) == 8, timeout=60)
    (placed,) = scheduler._slices.values()
    await eventually(lambda: placed.settled and len(placed.where) == 2, timeout=60)  # what is ready is told before it hears so itself
    ((silent, _), *others) = placed.where.items()

    async def never(_request: LaunchRequest) -> LaunchReply:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(edges[silent].intake, "launch", never)
    again = await Asker(await box.bus()).open()
    assert (await again.create(8, burst=burst)).known
    await again.until(lambda asked: len(asked.ready) == len(others[0][1]), timeout=60)
    assert not [each for told in again.ready.values() for each in told if each.startswith(f"{silent}-")]
