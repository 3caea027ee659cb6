"""CPU classes on one core: the kernel gives best-effort sandboxes what latency-sensitive ones leave."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dsec.model import MIB, ExecSpec, Qos, Resources
from tests.fixtures_backend import Yard, sh

pytestmark = [pytest.mark.usefixtures("leftovers"), pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest")]

SPIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print('spins', flush=True)\nwhile True: pass"
RESOURCES = Resources(memory=64 * MIB, disk=16 * MIB, cpus=1.0)


async def spin(box: Any) -> None:
    """Keep one core busy, the same one for every sandbox; returns when it does."""
    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/python3", "-c", SPIN), background=True))
    async for _ in box.link.output(op, view=True):
        return


async def shares(boxes: list[Any], first: int = 300) -> list[int]:
    """Milliseconds of CPU that each used while the first of them used ``first``, however long that took."""
    for box in boxes:
        await spin(box)
    before = [(await box.usage()).cpu_ms for box in boxes]
    while (await boxes[0].usage()).cpu_ms - before[0] < first:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(0.05)
    return [(await box.usage()).cpu_ms - begun for box, begun in zip(boxes, before, strict=True)]


@pytest.mark.needs("cpu_idle")
async def test_best_effort_gets_what_is_left(leftovers: object, yard: Yard) -> None:
    """On a core that both want, best effort gets next to nothing; two of the same class share it; alone, best effort has all of it."""
    backend = await yard.backend()
    sensitive, effort = [await backend.launch(yard.plan(backend.node, qos=qos, resources=RESOURCES)) for qos in (Qos.LS, Qos.BE)]
    assert effort.plan.degraded == sensitive.plan.degraded
    one, other = await shares([sensitive, effort])
    assert one > 8 * other, (one, other)
    await sensitive.stop()
    (alone,) = await shares([effort])
    assert alone >= 300
    await effort.stop()
    for qos in Qos:
        pair = [await backend.launch(yard.plan(backend.node, qos=qos, resources=RESOURCES)) for _ in range(2)]
        one, other = await shares(pair)
        assert one < 4 * other, (qos, one, other)
        await asyncio.gather(*(box.stop() for box in pair))


async def test_without_cpu_idle_best_effort_weighs_least(leftovers: object, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without cpu.idle keeps the classes apart by weight, and the sandbox's plan says so."""
    monkeypatch.setenv("DSEC_DISABLE", ",".join(filter(None, (os.environ.get("DSEC_DISABLE", ""), "cpu_idle"))))
    backend = await yard.backend()
    sensitive, effort = [await backend.launch(yard.plan(backend.node, qos=qos, resources=RESOURCES)) for qos in (Qos.LS, Qos.BE)]
    assert any(note.startswith("qos:") for note in effort.plan.degraded)
    assert not any(note.startswith("qos:") for note in sensitive.plan.degraded)
    one, other = await shares([sensitive, effort])
    assert one > 8 * other, (one, other)


async def test_the_class_is_in_the_kernels_books(leftovers: object, yard: Yard) -> None:
    """The group of a best-effort sandbox says so, that of a latency-sensitive one has its cpus as weight, and both are alive."""
    backend = await yard.backend()
    for qos, idle in ((Qos.BE, "1"), (Qos.LS, "0")):
        box = await backend.launch(yard.plan(backend.node, qos=qos, resources=Resources(memory=64 * MIB, disk=16 * MIB, cpus=0.5)))
        group = Path(backend._cgroups.path("cpu", box.plan.ulid))
        if backend._cgroups.can_idle:
            assert (group / "cpu.idle").read_text().strip() == idle
        if qos is Qos.LS:
            version = backend._cgroups.version
            assert (group / ("cpu.weight" if version == 2 else "cpu.shares")).read_text().strip() == ("50" if version == 2 else "512")
        assert (await sh(box, "echo here"))[1] == "here\n"
