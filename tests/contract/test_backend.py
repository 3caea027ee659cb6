"""What every backend owes the Edge; the same suite runs over the fake one and over real containers."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.errors import Conflict, DsecError, NodeError, NotFound, SandboxGone
from dsec.model import ExecSpec, ExitReason, FileRequest, LayerRef
from tests.fixtures_backend import DRIVERS, MakeYard, Yard, sh

pytestmark = pytest.mark.guest


def new_op() -> str:
    return os.urandom(16).hex()


@pytest.fixture(params=["fake", *DRIVERS, pytest.param("docker", marks=pytest.mark.slow)])
def flavour(request: pytest.FixtureRequest) -> str:
    """The fake backend, containers by each driver, and Docker's."""
    if request.param != "fake" and os.geteuid() != 0:
        pytest.skip("containers need root")
    if request.param == "crun" and shutil.which("crun") is None:
        pytest.skip("crun is not installed")
    return str(request.param)


@pytest.fixture
def driver(flavour: str) -> str:
    return flavour if flavour in DRIVERS else "native"


@pytest.fixture
def kind(flavour: str) -> str:
    return "container" if flavour in DRIVERS else flavour


@pytest.fixture
def yard(kind: str, leftovers: object, make_yard: MakeYard) -> Yard:
    return make_yard(kind)


@pytest_asyncio.fixture
async def backend(yard: Yard) -> Any:
    return await yard.backend()


@pytest_asyncio.fixture
async def box(yard: Yard, backend: Any) -> Any:
    return await backend.launch(yard.plan(backend.node))


async def test_exit_codes_and_output(box: Any) -> None:
    """A command's exit code and both streams arrive as they were."""
    assert (await sh(box, "true"))[0] == 0
    assert (await sh(box, "false"))[0] == 1
    assert (await sh(box, "echo out; exit 7")) == (7, "out\n", "")
    code, _, err = await sh(box, "no-such-command-here")
    assert code == 127
    assert "not found" in err


async def test_the_same_op_starts_once(box: Any) -> None:
    """Starting an operation again under its id runs nothing again."""
    op = new_op()
    spec = ExecSpec(argv=("/bin/sh", "-c", "echo line >> /tmp/log"))
    for _ in range(3):
        await box.link.start(op, spec)
        assert (await box.link.wait(op, 5)).exit_code == 0
    assert (await sh(box, "cat /tmp/log"))[1] == "line\n"


@pytest.mark.parametrize("other", [{"argv": ("/bin/sh", "-c", "echo two")}, {"env": {"A": "1"}}, {"timeout_ms": 999}, {"stdin": True}])
async def test_an_op_id_is_not_used_for_another_command(box: Any, other: dict[str, Any]) -> None:
    """The id of an operation, running or ended, with another order is a conflict, and nothing runs; the first order again is a repeat."""
    op = new_op()
    spec = ExecSpec(argv=("/bin/sh", "-c", "echo one"))
    for _ in range(2):
        await box.link.start(op, spec)
        with pytest.raises(Conflict) as caught:
            await box.link.start(op, msgspec.structs.replace(spec, **other))
        assert (caught.value.field, caught.value.reason) == ("op", "request_id_conflict")
        assert (await box.link.wait(op, 5)).stdout.head == b"one\n"


async def test_unknown_command_is_named(box: Any) -> None:
    """A command that does not exist raises NotFound and leaves the sandbox usable."""
    with pytest.raises(NotFound):
        await box.link.start(new_op(), ExecSpec(argv=("/no/such/program",)))
    assert (await sh(box, "true"))[0] == 0


async def test_wait_returns_running_when_its_time_passes(box: Any) -> None:
    """`wait` never blocks past its time-out and says that the operation runs."""
    op = new_op()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "sleep 30")))
    before = time.monotonic()
    assert (await box.link.wait(op, 0.1)).running
    assert time.monotonic() - before < 2
    await box.link.signal(op, 9)
    status = await box.link.wait(op, 5)
    assert (status.running, status.signal) == (False, 9)


async def test_time_out_is_a_flag(box: Any) -> None:
    """An exec that passes its time-out ends with `timed_out`, whatever its code is."""
    op = new_op()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "sleep 30"), timeout_ms=200))
    status = await box.link.wait(op, 5)
    assert status.timed_out
    assert not status.running


async def test_background_has_no_time_out(box: Any) -> None:
    """A shell that puts a process into the background returns at once."""
    before = time.monotonic()
    assert (await sh(box, "sleep 20 &", 5))[0] == 0
    assert time.monotonic() - before < 2


async def test_output_from_an_offset(box: Any) -> None:
    """Output can be read again from any absolute offset that the ring still holds."""
    op = new_op()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "echo 0123456789")))
    await box.link.wait(op, 5)
    for offset in (0, 4):
        got = b"".join([chunk.data async for chunk in box.link.output(op, (offset, 0)) if chunk.stream == 1])
        assert got == b"0123456789\n"[offset:]


async def test_a_held_stream_is_whole(box: Any) -> None:
    """While its reader holds the stream nothing is dropped: 3 MB arrive, contiguous."""
    op = new_op()
    size = 3_000_000
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", f"head -c {size} /dev/zero"), stream=True))
    at = 0
    async for chunk in box.link.output(op):
        assert chunk.offset == at
        at += len(chunk.data)
    assert at == size


async def test_input_by_offset(box: Any) -> None:
    """Input that is sent twice at one offset arrives once."""
    op = new_op()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "cat"), stdin=True))
    assert await box.link.input(op, 0, b"hello ") == 6
    assert await box.link.input(op, 0, b"hello ") == 6
    assert await box.link.input(op, 6, b"world", eof=True) == 11
    status = await box.link.wait(op, 5)
    assert status.stdout.data() == b"hello world"


async def test_files(box: Any) -> None:
    """Files are written, read, listed, renamed and removed without any program inside."""
    files = box.link.files
    await files(FileRequest(verb="mkdir", path="/tmp/d", create=True, mode=0o755))
    await files(FileRequest(verb="write", path="/tmp/d/a", data=b"one", create=True))
    await files(FileRequest(verb="write", path="/tmp/d/a", data=b"two", offset=3))
    reply = await files(FileRequest(verb="read", path="/tmp/d/a", length=100))
    assert (reply.data, reply.eof) == (b"onetwo", True)
    await files(FileRequest(verb="rename", path="/tmp/d/a", target="/tmp/d/b"))
    assert [entry.name for entry in (await files(FileRequest(verb="list", path="/tmp/d", length=10))).entries] == ["b"]
    stat = (await files(FileRequest(verb="stat", path="/tmp/d/b"))).stat
    assert stat is not None
    assert (stat.kind, stat.size) == ("file", 6)
    await files(FileRequest(verb="remove", path="/tmp/d", recursive=True))
    with pytest.raises(NotFound):
        await files(FileRequest(verb="stat", path="/tmp/d/b"))


async def test_pause_and_resume(box: Any) -> None:
    """A paused sandbox does nothing; pause and resume are idempotent."""
    op = new_op()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "sleep 0.3; echo done")))
    assert not await box.stands_still()
    paused = await box.pause()
    # No promise that is not kept: where nothing goes to swap the result says why, and that nothing was given back.
    assert (paused.released, paused.swapped) == (0, 0) if paused.note else paused.swapped >= 0
    await box.pause()
    assert await box.stands_still()
    await asyncio.sleep(0.6)
    await box.resume()
    await box.resume()
    assert not await box.stands_still()
    assert (await box.link.wait(op, 5)).stdout.data() == b"done\n"


async def test_stop_is_idempotent_and_waiters_agree(box: Any, backend: Any) -> None:
    """Two waiters see the same end, a cancelled one disturbs nobody, a second stop is a no-op."""
    waiters = [asyncio.ensure_future(box.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.gather(box.stop(), box.stop())
    await box.stop()
    first, second = await asyncio.wait_for(asyncio.gather(*waiters[1:]), 5)
    assert first == second
    assert first.reason is ExitReason.REQUESTED
    with pytest.raises(SandboxGone):
        await box.link.start(new_op(), ExecSpec(argv=("/bin/true",)))
    assert await backend.reap(frozenset()) == ()


async def test_stop_of_a_paused_sandbox(box: Any) -> None:
    """A frozen sandbox can be stopped."""
    await box.pause()
    await asyncio.wait_for(box.stop(), 8)


async def test_usage(box: Any) -> None:
    """Usage is read from outside."""
    usage = await box.usage()
    assert usage.pids >= 1


async def test_two_launches_of_one_ulid(yard: Yard, backend: Any) -> None:
    """A ulid is launched once; the refusal leaves the first one alone."""
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    with pytest.raises(DsecError):
        await backend.launch(plan)
    assert (await sh(box, "echo alive"))[1] == "alive\n"


async def test_a_launch_that_fails_leaves_nothing(yard: Yard, backend: Any, kind: str) -> None:
    """A failed launch raises a typed error, and nothing of it is left on the node."""
    plan = yard.plan(backend.node)
    if kind == "fake":
        backend.faults.launch_fail_rate = 1.0
    else:
        plan = msgspec.structs.replace(plan, lowers=(LayerRef(name="gone", digest="sha256:" + "0" * 64),))
    with pytest.raises((NodeError, NotFound)):
        await backend.launch(plan)
    assert await backend.reap(frozenset()) == ()


async def test_c06_cancel_at_every_await_of_launch(yard: Yard, backend: Any, kind: str) -> None:
    """A launch cancelled after any number of steps leaves nothing behind."""
    if kind == "fake":
        backend.faults.launch_delay = 0.01
    await (await backend.launch(yard.plan(backend.node))).stop()  # layers are mounted now, times are typical
    finished = 0
    for step in range(60):
        task = asyncio.ensure_future(backend.launch(yard.plan(backend.node)))
        for _ in range(step % 8):
            await asyncio.sleep(0)
        await asyncio.sleep(step // 8 * 0.003)
        task.cancel()
        try:
            box = await task
        except asyncio.CancelledError:
            pass
        else:
            finished += 1
            await box.stop()
        assert await backend.reap(frozenset()) == (), f"cancelled at step {step}"
    assert finished < 60


async def test_adopt(yard: Yard, backend: Any) -> None:
    """The next Edge takes over what lives, with the operation that ran through the change and its whole output."""
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    op = new_op()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "echo before; sleep 0.5; echo after")))
    await backend.close()
    following = await yard.backend()
    taken = await following.adopt(plan)
    assert taken is not None
    assert [status.op for status in await taken.link.ops()] == [op]
    status = await taken.link.wait(op, 5)
    assert status.stdout.data() == b"before\nafter\n"
    assert await following.reap(frozenset({plan.ulid})) == ()
    await taken.stop()
    assert await following.adopt(plan) is None


async def test_reap_frees_what_no_record_names(yard: Yard, backend: Any) -> None:
    """A sandbox that no record names is freed by the next Edge."""
    plan = yard.plan(backend.node)
    await backend.launch(plan)
    await backend.close()
    following = await yard.backend()
    assert await following.reap(frozenset()) == (plan.ulid,)
    assert await following.reap(frozenset()) == ()


async def test_init_that_dies_is_told(yard: Yard, backend: Any, kind: str) -> None:
    """A sandbox whose init dies by itself says how, once, and is final."""
    if kind == "fake":
        backend.faults.die_after = 0.05
    box = await backend.launch(yard.plan(backend.node))
    if kind != "fake":
        os.kill(box.pid, 9)
    ending = await asyncio.wait_for(box.wait(), 5)
    assert ending.reason is ExitReason.EXITED
    with pytest.raises(SandboxGone):
        await sh(box, "true")
    await box.stop()
