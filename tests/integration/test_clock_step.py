"""The machine's wall clock is set by an hour, forwards or back, in the middle of everything: no time-out fires by that, or stays out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from dsec.actors.sandbox import Sandbox as Actor
from dsec.bus.server import NatsServer
from dsec.model import ExitReason, State
from libdsec import SandboxGone
from tests.integration.actors_box import SPEC, Box, but, eventually

HOUR = 3_600.0
_wall = time.time


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``step(seconds)``: every wall clock of this process, that of the actors and that of the client, is set."""
    return lambda seconds: monkeypatch.setattr(time, "time", lambda: _wall() + seconds)


def actor(box: Box, sandbox: str) -> Actor:
    return box.edges["n1"].sandboxes[sandbox.rpartition("-")[2]]


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
async def test_nothing_ends_by_a_step(box: Box, step: Callable[[float], None], seconds: float) -> None:
    """Leases, idle and absolute clocks, time-outs of commands, the memory of ends and a fork's capture go by another clock."""
    edge = await box.edge(paused_ttl_ms=600_000)
    await box.watcher()
    await box.scheduler()
    async with box.client(lease_ttl=30) as dsec:
        spec = but(idle_timeout_ms=600_000, ttl_ms=600_000, on_idle="stop")
        handles = await dsec.create_many(spec, 4)
        await handles[0].pause()
        running = asyncio.create_task(handles[1].exec("sleep 1; echo through", timeout=60))
        ended = handles[3]
        await ended.stop()
        kids = asyncio.create_task(handles[2].fork(3))
        await asyncio.sleep(0.05)
        step(seconds)
        result = await running
        assert (result.stdout, result.timed_out) == (b"through\n", False)
        assert result.duration < 50
        assert len((await kids).sandboxes) == 3
        await asyncio.sleep(0.3)  # several sweeps
        assert {str(each.state) for each in edge.sandboxes.values()} == {"running", "paused"}
        assert (await handles[0].exec("echo up")).stdout == b"up\n"
        with pytest.raises(SandboxGone) as caught:  # it is still remembered
            await type(ended)(dsec, ended._id).exec("true")
        assert caught.value.reason == ExitReason.REQUESTED


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
async def test_what_is_due_comes_though_the_clock_was_set(box: Box, step: Callable[[float], None], seconds: float) -> None:
    """A step does not keep a lease, an idle time-out or a command's time-out from ending what they should end."""
    edge = await box.edge(stopped_retention_ms=1_500)
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        idle = await dsec.create(but(idle_timeout_ms=600, on_idle="stop"))
        old = await dsec.create(but(ttl_ms=600))
        busy = await dsec.create(SPEC)
        running = asyncio.create_task(busy.exec("sleep 60", timeout=0.6))
        await asyncio.sleep(0.05)
        step(seconds)
        assert (await idle.wait(20)).reason is ExitReason.IDLE
        assert (await old.wait(20)).reason is ExitReason.DEADLINE
        assert (await running).timed_out
        await eventually(lambda: not edge.ended)  # forgotten when their time has come


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
async def test_a_step_while_no_edge_is_there(box: Box, step: Callable[[float], None], seconds: float) -> None:
    """A sandbox that stood still over a restart of its Edge knows for how long; what had ended is forgotten neither at once nor late."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        paused, ended = await dsec.create_many(SPEC, 2)
        await paused.pause()
        await ended.stop()
        began = time.monotonic()
        await box.crash("n1")
        step(seconds)
        edge = await box.edge(stopped_retention_ms=7_200_000)
        stood = actor(box, paused.id).stood_ms
        assert 0 <= stood <= (time.monotonic() - began + 5) * 1000
        assert actor(box, paused.id).state is State.PAUSED
        await asyncio.sleep(0.2)
        assert len(edge.ended) == 1
        assert edge._forgetting[0][0] - time.monotonic() <= 7_200
