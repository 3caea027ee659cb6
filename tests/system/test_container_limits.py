"""Limits of a container are enforced by the kernel, each with its negative control."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dsec.model import MIB, ExecSpec, Resources
from tests.fixtures_backend import Yard, sh

pytestmark = [pytest.mark.usefixtures("leftovers"), pytest.mark.guest]


@pytest.fixture
def driver(each_driver: str) -> str:
    return each_driver


HOG = "import sys; x = bytearray(int(sys.argv[1]) << 20); x[::4096] = b'x' * len(x[::4096]); print('whole')"


async def hog(box: Any, mib: int) -> tuple[int | None, int | None, str]:
    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/python3", "-c", HOG, str(mib))))
    status = await box.link.wait(op, 30)
    return status.exit_code, status.signal, status.stdout.data().decode()


async def test_c23_memory_hog_is_killed_and_counted(leftovers: object, yard: Yard) -> None:
    """A command above the memory limit is killed, the kill is counted, the sandbox lives on; below the limit it finishes."""
    backend = await yard.backend()
    box = await backend.launch(yard.plan(backend.node, resources=Resources(memory=64 * MIB, disk=16 * MIB)))
    assert await hog(box, 24) == (0, None, "whole\n")
    assert (await box.usage()).oom_kills == 0
    assert (await hog(box, 200))[1] == 9
    assert (await box.usage()).oom_kills >= 1
    assert (await sh(box, "echo alive"))[1] == "alive\n"


async def test_sandboxes_together_stay_within_the_node(leftovers: object, yard: Yard) -> None:
    """Limits that add up to more than there is are safe: the common limit kills in a sandbox, and it is counted there."""
    backend = await yard.backend(memory=160 * MIB)
    boxes = [await backend.launch(yard.plan(backend.node, resources=Resources(memory=128 * MIB, disk=16 * MIB))) for _ in range(2)]
    hold = (
        "/bin/python3",
        "-c",
        "import time; x = bytearray(90 << 20); x[::4096] = b'x' * len(x[::4096]); print('held', flush=True); time.sleep(60)",
    )
    ops = [os.urandom(16).hex() for _ in boxes]
    for box, op in zip(boxes, ops, strict=True):
        await box.link.start(op, ExecSpec(argv=hold, background=True))
        async for chunk in box.link.output(op):  # until it has all that it wants, or has ended
            if b"held" in chunk.data:
                break
    ends = [await box.link.wait(op, 1) for box, op in zip(boxes, ops, strict=True)]
    assert sorted(end.running for end in ends) == [False, True]
    assert sum([(await box.usage()).oom_kills for box in boxes]) == 1
    assert [(await sh(box, "echo alive"))[1] for box in boxes] == ["alive\n"] * 2


async def test_c22_fork_bomb_is_bounded(leftovers: object, yard: Yard) -> None:
    """A fork bomb fills its own sandbox only: the neighbour answers, stop works, and the limit is the one that was asked."""
    backend = await yard.backend()
    bomb = await backend.launch(yard.plan(backend.node, resources=Resources(memory=96 * MIB, disk=16 * MIB, pids=40)))
    neighbour = await backend.launch(yard.plan(backend.node))
    op = os.urandom(16).hex()
    await bomb.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "f() { f | f & }; f"), background=True))
    await asyncio.sleep(0.5)
    assert (await bomb.usage()).pids <= 40
    before = time.monotonic()
    assert (await sh(neighbour, "echo fine"))[1] == "fine\n"
    assert time.monotonic() - before < 2
    await asyncio.wait_for(bomb.stop(), 10)


async def test_c26_full_disk_is_ones_own(leftovers: object, yard: Yard) -> None:
    """The upper's limit gives ENOSPC inside, by bytes and by inodes; the neighbour can still write."""
    backend = await yard.backend()
    box = await backend.launch(yard.plan(backend.node, resources=Resources(memory=64 * MIB, disk=8 * MIB, inodes=256)))
    neighbour = await backend.launch(yard.plan(backend.node))
    code, _, err = await sh(box, "dd if=/dev/zero of=/tmp/big bs=1M count=32")
    assert code != 0
    assert "No space left" in err
    assert 6 * MIB < (await box.usage()).disk <= 8 * MIB
    assert (await sh(box, "rm /tmp/big; dd if=/dev/zero of=/tmp/ok bs=1M count=4"))[0] == 0
    code, _, err = await sh(box, "for i in $(seq 400); do : > /tmp/f$i || exit 1; done")
    assert code != 0
    assert "No space left" in err
    assert (await sh(neighbour, "dd if=/dev/zero of=/tmp/big bs=1M count=16"))[0] == 0


async def test_loop_disk_has_its_limit(leftovers: object, yard: Yard) -> None:
    """A loop upper is limited as well, and neither its device nor its image outlives the sandbox."""
    backend = await yard.backend()
    if "loop" not in backend.node.disk_modes:
        pytest.skip(backend.capabilities.missing["disk=loop"])
    box = await backend.launch(yard.plan(backend.node, disk_mode="loop", resources=Resources(memory=64 * MIB, disk=16 * MIB)))
    assert (await sh(box, "dd if=/dev/zero of=/tmp/a bs=1M count=4 && cp /tmp/a /bin/copy && rm /tmp/a"))[0] == 0
    assert "No space left" in (await sh(box, "dd if=/dev/zero of=/tmp/big bs=1M count=32"))[2]


async def test_cpus_is_a_hard_cap(leftovers: object, yard: Yard) -> None:
    """A busy loop with cpus=0.1 is stopped by the kernel and gets a tenth of a core; with cpus=2 it is never stopped."""
    backend = await yard.backend()
    for cpus in (0.1, 2.0):
        box = await backend.launch(yard.plan(backend.node, resources=Resources(memory=64 * MIB, disk=16 * MIB, cpus=cpus)))
        op = os.urandom(16).hex()
        stat = Path(backend._cgroups.path("cpu", box.plan.ulid)) / "cpu.stat"
        await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "while :; do :; done"), background=True))
        begun, before = time.monotonic(), (await box.usage()).cpu_ms
        while (spent := (await box.usage()).cpu_ms - before) < 150:  # noqa: ASYNC110 - however long that takes on a busy node
            await asyncio.sleep(0.05)
        took = (time.monotonic() - begun) * 1e3
        throttled = dict(line.split() for line in stat.read_text().splitlines())["nr_throttled"]
        assert (int(throttled) > 0) is (cpus < 1)
        if cpus < 1:
            assert spent <= cpus * took + 50  # what is left of a period, and a tick's grain
        await box.stop()


async def test_smallest_sandbox_works(leftovers: object, yard: Yard) -> None:
    """A sandbox with the least memory and processes that planning accepts starts and runs a shell."""
    from dsec.backends.plan import MIN_MEMORY, MIN_PIDS

    backend = await yard.backend()
    box = await backend.launch(yard.plan(backend.node, resources=Resources(memory=MIN_MEMORY, disk=MIB, inodes=64, pids=MIN_PIDS)))
    assert (await sh(box, "echo hello | cat"))[1] == "hello\n"
    assert (await box.usage()).oom_kills == 0
