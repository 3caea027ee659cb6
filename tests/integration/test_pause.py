"""Pause and resume as the actors see them: who wakes whom, reservations, clocks, deaths of the Edge (fake backend, real bus and disk)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.actors.lifecycle import On
from dsec.backends.fake import Faults
from dsec.bus.server import NatsServer
from dsec.errors import Busy, NodeError, SandboxGone
from dsec.model import ExitReason, State
from tests.integration.actors_box import SPEC, Box, but, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    await made.watcher()
    await made.scheduler()
    yield made
    await made.close()


def kinds(box: Box, sandbox_id: str) -> list[str]:
    return [event.kind for event in box.events.events if event.sb == sandbox_id]


async def test_waiting_for_a_command_does_not_wake(box: Box) -> None:
    """A job's clients wait for their commands while it is paused; it stays paused, and they get their results after the resume."""
    await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        running = asyncio.create_task(sb.exec("sleep 0.3; echo done", timeout=60))
        await eventually(lambda: bool(box.nodes["n1"].guests[sb.id.rpartition("-")[2]].ops))
        await asyncio.sleep(0.05)
        await sb.pause()
        await asyncio.sleep(1.5)  # several polls of the client
        assert (await sb.info()).state is State.PAUSED
        assert not running.done()
        await sb.resume()
        assert (await running).stdout == b"done\n"
        await eventually(lambda: kinds(box, sb.id).count("resumed") > 0)
        assert kinds(box, sb.id).count("resumed") == 1
        await sb.stop()


async def test_concurrent_requests_resume_once(box: Box) -> None:
    """Forty requests at once on a paused sandbox: all are answered, and it was resumed one time."""
    await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.pause()
        found = await asyncio.gather(*(sb.exec(f"echo {n}") if n % 2 else sb.files.list("/") for n in range(40)))
        assert len(found) == 40
        await eventually(lambda: kinds(box, sb.id).count("resumed") > 0)
        assert kinds(box, sb.id).count("resumed") == 1
        await sb.stop()


async def test_c29_resume_again_and_right_after_pause(box: Box) -> None:
    """Second resumes and pauses are fine, at one time and in any order; the sandbox ends in the state that was asked for last."""
    await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        for _ in range(5):
            await asyncio.gather(sb.pause(), sb.pause())
            await asyncio.gather(sb.resume(), sb.resume(), sb.resume())
            assert (await sb.info()).state is State.RUNNING
        assert (await sb.exec("echo here")).stdout == b"here\n"
        await sb.stop()


async def test_a_job_is_paused_with_progress_and_a_result_for_each(box: Box) -> None:
    """Labels choose, progress counts to the end, one that cannot be paused is an error of its own and the others are paused."""
    await box.edge()
    async with box.client() as dsec:
        made = await dsec.create_many(but(SPEC, labels={"job": "j"}), 12)
        await made[3].stop()
        steps: list[tuple[int, int]] = []
        results = await dsec.pause(labels={"job": "j"}, progress=lambda done, total: steps.append((done, total)), parallel=4)
        assert steps == [(n, 11) for n in range(1, 12)]
        assert all(result.ok and result.paused is not None and result.paused.note for result in results)
        named = await dsec.pause(ids=[made[0].id, made[3].id])
        assert [result.ok for result in named] == [True, False]
        assert isinstance(named[1].error, SandboxGone)
        assert not box.edges["n1"].ledger.held
        assert all(result.ok for result in await dsec.resume(labels={"job": "j"}))
        box.backends["n1"].faults.pause_fails = True
        failed = await dsec.pause(labels={"job": "j"})
        assert all(isinstance(result.error, NodeError) for result in failed)
        assert {info.state for info in await dsec.list({"job": "j"})} == {State.RUNNING}
        await dsec.stop(labels={"job": "j"})


async def test_a_resume_that_fails_leaves_it_paused(box: Box) -> None:
    """It holds no reservation then, and a later resume works."""
    edge = await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.pause()
        box.backends["n1"].faults.resume_fails = True
        with pytest.raises(NodeError):
            await sb.exec("true")
        assert (await sb.info()).state is State.PAUSED
        assert not edge.ledger.held
        box.backends["n1"].faults.resume_fails = False
        assert (await sb.exec("true")).exit_code == 0
        await sb.stop()


async def test_a_resume_waits_for_room_and_outranks_creates(box: Box) -> None:
    """On a full node a resume is refused in the end, typed; while it waits the room that comes free is its own and no create's."""
    edge = await box.edge(slots=1)
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.pause()
        other = await dsec.create(SPEC)
        sandbox = edge.sandboxes[sb.id.rpartition("-")[2]]
        with pytest.raises(Busy) as caught:
            await sandbox.resume(asyncio.get_running_loop().time() + 0.1)
        assert caught.value.reason == "slots"
        assert (await sb.info()).state is State.PAUSED
        waiting = asyncio.create_task(sb.resume())
        await eventually(lambda: len(edge.room) == 1)
        creating = asyncio.create_task(dsec.create(SPEC, timeout=20))
        await asyncio.sleep(0.2)
        await other.stop()
        await waiting
        assert not creating.done()
        await sb.stop()
        await (await creating).stop()


async def test_an_idle_pause_never_stops_what_somebody_waits_for(box: Box) -> None:
    """c28: requests and idle pauses race; no request is lost, and a command that is waited for is not paused under its client."""
    await box.edge(sweep_ms=10)
    async with box.client() as dsec:
        sb = await dsec.create(but(SPEC, idle_timeout_ms=15))
        for number in range(40):
            assert (await sb.exec(f"echo {number} >> /log; sleep 0.02")).exit_code == 0
            await asyncio.sleep((number % 5) * 0.008)
        assert (await sb.files.read("/log")).split() == [str(number).encode() for number in range(40)]
        sandbox = box.edges["n1"].sandboxes[sb.id.rpartition("-")[2]]
        await eventually(lambda: sandbox.state is State.PAUSED)
        # A request that comes between the clock and the pause does not cost the sandbox its clock.
        async with sandbox.awake():
            await sandbox.on_clock(On.IDLE)
            assert sandbox.within(State.RUNNING)
            box.edges["n1"]._clock.clear()
            await sandbox.on_clock(On.IDLE)
        await eventually(lambda: sandbox.state is State.PAUSED)
        await sb.stop()


async def test_a_command_s_time_out_stands_still(box: Box) -> None:
    """The client grants a command the time that its sandbox stood still."""
    await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.pause()
        await asyncio.sleep(0.3)
        await sb.resume()
        sandbox = box.edges["n1"].sandboxes[sb.id.rpartition("-")[2]]
        assert 300 <= sandbox.stood_ms < 30_000
        await sb.pause()
        await box.crash("n1")
        edge = await box.edge()
        await eventually(lambda: len(edge.sandboxes) == 1)
        again = edge.sandboxes[sb.id.rpartition("-")[2]]
        assert again.stood_ms >= 300
        assert again.state is State.PAUSED
        await sb.stop()


async def test_what_the_kernel_shows_is_the_truth_after_a_death(box: Box) -> None:
    """The Edge died before it wrote that it paused or resumed: the next one takes each sandbox as it stands."""
    await box.edge()
    async with box.client() as dsec:
        frozen, thawed = await dsec.create(SPEC), await dsec.create(SPEC)
        await thawed.pause()
        await asyncio.sleep(0.1)
        await box.crash("n1")
        guests = box.nodes["n1"].guests
        guests[frozen.id.rpartition("-")[2]].frozen = True
        guests[thawed.id.rpartition("-")[2]].thaw()
        edge = await box.edge()
        await eventually(lambda: len(edge.sandboxes) == 2)
        assert (await frozen.info()).state is State.PAUSED
        assert (await thawed.info()).state is State.RUNNING
        assert set(edge.ledger.held) == {thawed.id.rpartition("-")[2]}
        assert (await frozen.exec("echo x")).stdout == b"x\n"
        await asyncio.gather(frozen.stop(), thawed.stop())


async def test_an_edge_that_dies_in_a_pause(box: Box) -> None:
    """Killed in the middle of pausing twenty: the next Edge has each running or paused, a repeat pauses all, and stop leaves nothing."""
    await box.edge(faults=Faults(pause_delay=0.05))
    async with box.client() as dsec:
        made = await dsec.create_many(but(SPEC, labels={"job": "j"}), 20)
        pausing = asyncio.create_task(dsec.pause(labels={"job": "j"}, parallel=4))
        await eventually(lambda: any(guest.frozen for guest in box.nodes["n1"].guests.values()))
        await box.crash("n1")
        edge = await box.edge()
        results = await pausing
        assert all(result.ok for result in results), [result.error for result in results]
        assert {info.state for info in await dsec.list({"job": "j"})} == {State.PAUSED}
        assert not edge.ledger.held
        await made[0].stop()
        await dsec.stop(labels={"job": "j"})
        assert (await made[1].wait(5)).reason is ExitReason.REQUESTED
    await eventually(lambda: not edge.sandboxes)
    assert not box.nodes["n1"].guests
