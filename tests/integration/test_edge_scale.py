"""What a sandbox that nobody uses costs the Edge: memory, tasks, timers, commits."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.actors.edge import Edge
from dsec.backends.container import ContainerBackend, Options
from dsec.backends.instance import End
from dsec.backends.plan import Node, make_plan
from dsec.bus.messages import LaunchItem, LaunchRequest, Lease
from dsec.bus.server import NatsServer
from dsec.model import LayerRef, SandboxId, SandboxSpec, State, new_ulid
from tests.integration.actors_box import SPEC, Box

MANY = 1_500
EDGE_BYTES = 5_600  # of the Edge's own: actor, record, plan, clocks, reservation, lease, the fake's guest
INSTANCE_BYTES = 2_560  # of the container backend: instance, link, what is known of its end
IDLE_BYTES = 8_192  # the promise: both together


@pytest.fixture
async def edge(nats_server: NatsServer, state_dir: Path) -> Any:
    box = Box(nats_server.url, state_dir)
    plenty = {"slots": 20_000, "memory_overcommit": 64.0, "cpu_overcommit": 1_000.0, "pids_overcommit": 1_000.0}
    yield await box.edge(**plenty)
    await box.close()


async def fill(edge: Edge, n: int, burst: str) -> None:
    """``n`` sandboxes, each of a spec of its own, until all run."""
    for at in range(0, n, 250):
        specs = tuple(msgspec.structs.replace(SPEC, env={"TASK": f"{burst}-{at + number}"}) for number in range(250))
        request = LaunchRequest(
            burst=f"{burst}{at}", principal="local", project="default", specs=specs, inbox="_INBOX.nobody.x", deadline_ms=60_000,
            items=tuple(LaunchItem(index=number, spec=number) for number in range(250)), lease=Lease(id="lease", ttl_ms=600_000),
        )  # fmt: skip
        reply = await edge.intake.launch(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=LaunchRequest))
        assert not reply.refused
    async with asyncio.timeout(60):
        while any(each.state is not State.RUNNING for each in edge.sandboxes.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_idle_sandbox_costs_the_edge_few_bytes_and_no_task(edge: Edge) -> None:
    """1,500 idle sandboxes: bounded bytes each, and as many tasks as with none."""
    await fill(edge, 250, "warm")
    await asyncio.sleep(0.3)
    tasks = len(asyncio.all_tasks())
    gc.collect()
    tracemalloc.start(1)
    try:
        await fill(edge, MANY, "cold")
        edge.events.kept.events.clear()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        gc.collect()
        each = tracemalloc.get_traced_memory()[0] / MANY
    finally:
        tracemalloc.stop()
    assert each < EDGE_BYTES, f"{each:.0f} bytes for each"
    assert len(asyncio.all_tasks()) <= tasks + 2


async def test_an_idle_container_costs_few_bytes_more(state_dir: Path) -> None:
    """What the container backend holds of a sandbox whose link is closed; with the Edge's own share below the promise."""
    assert EDGE_BYTES + INSTANCE_BYTES <= IDLE_BYTES
    backend = ContainerBackend(Options(edge="n1", state_dir=str(state_dir), generation=1), object())  # type: ignore[arg-type]
    backend._cgroups = type("Groups", (), {"oom_kills": lambda _, __: 0, "frozen": lambda _, __: False})()  # type: ignore[assignment]
    node = Node(edge="n1", state_dir=str(state_dir))
    ref = LayerRef(name="base", digest="sha256:" + "0" * 64)
    plans = [make_plan(SandboxSpec(image="base"), id=SandboxId("n1", new_ulid()), slot=slot, refs=[ref], node=node) for slot in range(600)]
    ends: list[object] = []

    def make(number: int) -> None:
        backend._ends[plans[number].ulid] = End()
        backend._instance(plans[number], os.getpid(), backend._link(plans[number], os.getpid())).on_exit(ends.append)

    for number in range(100):
        make(number)
    gc.collect()
    tracemalloc.start(1)
    try:
        for number in range(100, 600):
            make(number)
        gc.collect()
        each = tracemalloc.get_traced_memory()[0] / 500
    finally:
        tracemalloc.stop()
    assert each < INSTANCE_BYTES, f"{each:.0f} bytes for each"


async def test_a_burst_costs_few_commits(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of 1,000 creates, and of their becoming ready, reach the disk in a small number of transactions."""
    from dsec.actors import store

    commits = 0
    real = store._transaction

    def counted(db: Any) -> Any:
        nonlocal commits
        commits += 1
        return real(db)

    monkeypatch.setattr(store, "_transaction", counted)
    await fill(edge, 1_000, "burst")
    assert commits <= 700, commits  # of 2,000 writes
