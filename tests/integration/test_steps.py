"""The command log: numbers for all, results kept under a key, through deaths of client and Edge (fake backend, real bus and disk)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.actors import commands
from dsec.bus.server import NatsServer
from dsec.errors import Conflict, InvalidRequest, NotFound, SandboxGone
from dsec.model import State
from tests.integration.actors_box import SPEC, Box, eventually, serving


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    async with serving(nats_server) as made:
        yield made


async def test_the_same_step_runs_once(box: Box) -> None:
    """The second answer is the recorded one, whoever asks, and nothing is run for it; another command under the key is a conflict."""
    async with box.client() as dsec, box.client() as other:
        sb = await dsec.create(SPEC)
        first = await sb.exec("echo line >> /log; echo done", step="a")
        again = await (await other.attach(sb.id)).exec("echo line >> /log; echo done", step="a")
        assert (first.exit_code, first.stdout, again.stdout) == (0, b"done\n", b"done\n")
        assert (again.op, again.duration) == (first.op, first.duration)
        assert await sb.files.read("/log") == b"line\n"
        with pytest.raises(Conflict) as caught:
            await sb.exec("echo other", step="a")
        assert (caught.value.reason, caught.value.field) == ("step_conflict", "step")
        with pytest.raises(InvalidRequest):
            await sb.exec("cat", step="b", stdin="x")
        assert (await sb.exec("false", step="c")).exit_code == 1
        assert (await sb.exec("false", step="c")).exit_code == 1
        await sb.stop()


async def test_what_does_not_start_is_not_recorded(box: Box) -> None:
    """A step whose program is absent raises, and may be asked for again with another command."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        with pytest.raises(NotFound):
            await sb.exec(["/no/such/program"], step="a")
        assert (await sb.exec("echo now", step="a")).stdout == b"now\n"
        await sb.stop()


async def test_all_commands_have_numbers(box: Box) -> None:
    """The log tells each command in its order, with and without a step; numbers grow through a restart of the Edge."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.exec("echo 1")
        await sb.exec("exit 3", step="s")
        await sb.exec("echo 2")
        found = await sb.commands()
        assert [(item.seq, item.step, item.exit_code, item.argv[-1]) for item in found] == [
            (1, "", 0, "echo 1"),
            (2, "s", 3, "exit 3"),
            (3, "", 0, "echo 2"),
        ]
        await box.edges["n1"].commands.flush()
        await box.crash("n1")
        await box.edge()
        await sb.exec("echo 3")
        await eventually(lambda: len(box.edges["n1"].sandboxes) == 1)
        last = (await sb.commands(after=3))[-1]
        assert last.seq > 3
        assert last.argv[-1] == "echo 3"
        await sb.stop()
        assert [item.argv[-1] for item in await sb.commands()][:3] == ["echo 1", "exit 3", "echo 2"]


async def test_the_end_of_a_command_that_was_streamed_is_in_the_log(box: Box) -> None:
    """Whoever reads a command's output to its end has heard of its end: it is no longer shown as one that has only begun."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        async with sb.start("echo 1; exit 4") as process:
            assert [event.data async for event in process] == [b"1\n"]
            assert (await process.wait()).exit_code == 4
        assert [(item.exit_code, item.ended_ts > 0) for item in await sb.commands()] == [(4, True)]
        await sb.stop()


async def test_a_step_outlives_the_edge(box: Box) -> None:
    """The Edge dies while the step runs: the next one waits for it, records it and answers; nothing runs twice."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        running = asyncio.create_task(sb.exec("echo line >> /log; sleep 1; echo done", step="a"))
        await eventually(lambda: bool(box.edges["n1"].commands._logs.get(sb.id.rpartition("-")[2], commands.Log(loaded=True)).steps))
        await asyncio.sleep(0.1)
        await box.crash("n1")
        await box.edge()
        assert (await running).stdout == b"done\n"
        assert (await sb.exec("echo line >> /log; sleep 1; echo done", step="a")).stdout == b"done\n"
        assert await sb.files.read("/log") == b"line\n"
        copies = [event for event in box.events.events if event.kind == "step"]
        assert [(event.detail["step"], event.detail["stdout"]) for event in copies] == [("a", "done\n")]
        await sb.stop()


async def test_a_recorded_step_needs_no_sandbox(box: Box) -> None:
    """A paused sandbox stays paused, and one that has ended still answers with what was recorded."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.exec("echo kept", step="a")
        await sb.pause()
        assert (await sb.exec("echo kept", step="a")).stdout == b"kept\n"
        assert (await sb.info()).state is State.PAUSED
        await sb.stop()
        late = await dsec.create(SPEC)
        late._id = sb._id  # a handle that does not know of the end
        assert (await late.exec("echo kept", step="a")).stdout == b"kept\n"
        with pytest.raises(SandboxGone):
            await late.exec("echo new", step="b")
        # What was read for that question does not stay in the Edge's memory until the sandbox is forgotten.
        await eventually(lambda: sb.id.rpartition("-")[2] not in box.edges["n1"].commands._logs)
        assert [item.step for item in await late.commands()] == ["a"]


async def test_an_unknown_outcome_is_told_and_nothing_is_run(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun by an Edge that died longer ago than the sandbox remembers operations: a conflict, and not a second run."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        ulid = sb.id.rpartition("-")[2]
        running = asyncio.create_task(sb.exec("echo line >> /log; sleep 5", step="a"))
        await eventually(lambda: bool(box.nodes["n1"].guests[ulid].ops))
        await asyncio.sleep(0.1)
        running.cancel()
        await box.crash("n1")
        box.nodes["n1"].guests[ulid].ops.clear()
        monkeypatch.setattr(commands, "REMEMBERED_S", 0.0)
        await box.edge()
        with pytest.raises(Conflict) as caught:
            await sb.exec("echo line >> /log; sleep 5", step="a")
        assert caught.value.reason == "step_unknown"
        await sb.stop()


async def test_twenty_steps_whatever_dies(box: Box) -> None:
    """Clients and Edges die at random moments of 20 steps: 20 side effects, no more and no less."""
    dice = random.Random(7)
    async with box.client() as maker:
        sandbox_id = (await maker.create(SPEC)).id

        async def job() -> None:
            async with box.client() as dsec:
                sb = await dsec.attach(sandbox_id)
                for number in range(20):
                    await sb.exec(f"echo {number} >> /log; sleep 0.05", step=f"step {number}", check=True)

        for death in range(12):
            running = asyncio.create_task(job())
            await asyncio.wait([running], timeout=dice.uniform(0.05, 0.5))
            if death % 3 == 2:
                await box.crash("n1")
                await box.edge()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await job()
        sb = await maker.attach(sandbox_id)
        assert (await sb.files.read("/log")).split() == [str(number).encode() for number in range(20)]
        await sb.stop()
