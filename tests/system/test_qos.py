"""CPU classes on one core: the kernel gives best-effort sandboxes what latency-sensitive ones leave."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dsec.model import MIB, ExecSpec, Qos, Resources
from dsec.qos.hogs import CALM, LOOKS, PERIOD
from tests.fixtures_backend import Yard, sh

pytestmark = [pytest.mark.usefixtures("leftovers"), pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest")]

SPIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print('spins', flush=True)\nwhile True: pass"
RESOURCES = Resources(memory=64 * MIB, disk=16 * MIB, cpus=1.0)


async def spin(box: Any) -> str:
    """Keep one core busy, the same one for every sandbox; returns the operation when it does."""
    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/python3", "-c", SPIN), background=True))
    async for _ in box.link.output(op, view=True):
        break
    return op


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


def books(backend: Any, box: Any) -> dict[str, str]:
    """What the kernel has of a sandbox's CPU class."""
    group = Path(backend._cgroups.path("cpu", box.plan.ulid))
    files = ("cpu.weight" if backend._cgroups.version == 2 else "cpu.shares", "cpu.idle")
    return {file.partition(".")[2]: (group / file).read_text().strip() for file in files if (group / file).exists()}


class Looks:
    """Looks for hogs, made by the test instead of the backend: what a core gave does not depend on what else the node does then."""

    def __init__(self, backend: Any) -> None:
        backend._watching.cancel()
        self.hogs = backend.hogs
        self.now = asyncio.get_running_loop().time() + 60  # later than any look of the backend's own

    async def look(self, *boxes: Any, seconds: float = PERIOD) -> None:
        """One look, so many seconds after the last, once each of these has used most of that time of CPU."""
        for box in boxes:
            before = (await box.usage()).cpu_ms
            while (await box.usage()).cpu_ms - before < 800 * seconds:  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.05)
        self.now += seconds
        await asyncio.to_thread(self.hogs.look, self.now)


async def test_the_class_is_in_the_kernels_books(leftovers: object, yard: Yard) -> None:
    """A best-effort sandbox has the small weight, whatever its cpus, a latency-sensitive one has them as weight; both are alive."""
    backend = await yard.backend()
    version = backend._cgroups.version
    for qos, wanted in ((Qos.BE, ("61", "6")), (Qos.LS, ("2048", "200"))):
        box = await backend.launch(yard.plan(backend.node, qos=qos, resources=Resources(memory=64 * MIB, disk=16 * MIB, cpus=0.5)))
        found = books(backend, box)
        assert found["weight" if version == 2 else "shares"] == wanted[version - 1]
        assert found.get("idle", "0") == "0"
        assert (await sh(box, "echo here"))[1] == "here\n"


@pytest.mark.needs("cpu_idle")
async def test_a_hog_gives_way_until_it_is_calm(leftovers: object, yard: Yard) -> None:
    """A best-effort sandbox that computes all the time is cpu.idle, one that sleeps or is latency-sensitive never; the hog has its
    weight again when it has calmed down, also where its Edge has gone in between."""
    backend = await yard.backend()
    hog, quiet, sensitive = [
        await backend.launch(yard.plan(backend.node, qos=qos, resources=RESOURCES)) for qos in (Qos.BE, Qos.BE, Qos.LS)
    ]
    weighs, looks = books(backend, hog), Looks(backend)
    await looks.look()
    op = await spin(hog)
    for _ in range(2 + LOOKS):
        await looks.look(hog)
    assert looks.hogs.demoted() == {hog.plan.ulid}
    await spin(sensitive)
    for _ in range(2 + LOOKS):
        await looks.look(sensitive)
    assert looks.hogs.demoted() == {hog.plan.ulid}
    assert [books(backend, box)["idle"] for box in (hog, quiet, sensitive)] == ["1", "0", "0"]
    assert (await sh(hog, "echo here"))[1] == "here\n"
    await sensitive.stop()
    await hog.link.signal(op, 9)
    await hog.link.wait(op, 60)
    await backend.close()
    following = await yard.backend()
    looks = Looks(following)
    adopted = await following.adopt(hog.plan)
    assert books(following, adopted)["idle"] == "1"
    for _ in range(4):
        await looks.look(seconds=CALM)
    assert books(following, adopted) == weighs
    assert looks.hogs.demoted() == set()
