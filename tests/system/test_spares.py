"""Groups made ahead: what a sandbox gets in one has all its limits, nobody takes one for a sandbox, and none outlives its Edge."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends import stock
from dsec.qos.cgroup import QUOTA, Cgroups, Limits
from dsec.qos.spares import Spares
from tests.fixtures_backend import Yard

pytestmark = pytest.mark.needs("root", "cgroup")


@pytest.fixture
def groups(edge_name: str, leftovers: object) -> Iterator[Cgroups]:
    made = Cgroups(f"dsec-{edge_name}")
    if made.version != 1:
        pytest.skip("cgroup v2 renames no group")
    made.open()
    yield made
    for name in made.names():
        made.destroy(name)
    made.close()


def quota(groups: Cgroups, name: str) -> str:
    return Path(groups.path("cpu", name), QUOTA).read_text().strip()


def test_a_spare_becomes_a_group_with_its_quota(groups: Cgroups) -> None:
    """It has the name in every hierarchy, and all else is still written; one with another quota is used too, and told apart."""
    spares = Spares(groups)
    for cpus in (0.25, 0.5):
        spares.put(spares.make(cpus))
    assert not groups.names()
    limits = Limits(cpus=0.5, memory=64 << 20, pids=20)
    spare = spares.take(limits)
    assert spare is not None
    assert spare.cpus == 0.5
    assert spares.become(spare, "box")
    order = groups.order("box", limits, has_quota=True)
    assert all(os.path.isdir(path) for path in order.directories)
    assert quota(groups, "box") == "50000"
    whole = groups.order("box", limits)
    assert set(whole.settings) - set(order.settings) == {(f"{groups.path('cpu', 'box')}/{QUOTA}", "50000")}
    assert groups.names() == {"box"}
    other = spares.take(limits)
    assert other is not None
    assert other.cpus == 0.25
    spares.remove([other])


def test_a_spare_that_is_not_whole_is_none(groups: Cgroups) -> None:
    """What is left of it goes, and the group is made as if there were no spares."""
    spares = Spares(groups)
    spare = spares.make(0.5)
    os.rmdir(groups.path("memory", spare.name))
    assert not spares.become(spare, "box")
    groups.create("box", Limits(cpus=0.25))
    assert quota(groups, "box") == "25000"
    assert not [name for name in groups._children() if name != "box"]


def test_what_a_killed_edge_left_is_removed_by_the_next(groups: Cgroups) -> None:
    """Its numbers begin anew, so its spares must be gone."""
    Spares(groups).make(0.5)
    again = Cgroups(groups.parent)
    again.open()
    assert not again._children()


async def until(stocked: stock.Stock, count: int) -> None:
    async with asyncio.timeout(60):
        while len(stocked) != count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_sandboxes_in_spares_are_as_any(leftovers: object, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with many: limits hold, other limits too, a restarted Edge takes none for a stray, and they go with the sandboxes."""
    monkeypatch.setattr(stock, "MANY", 1)
    monkeypatch.setattr(stock, "QUIET_S", 0.01)
    monkeypatch.setattr(stock, "PAUSE_S", 3600.0)
    monkeypatch.setattr("dsec.qos.spares.MOST", 2)
    backend = await yard.backend()
    if backend._cgroups.version != 1:
        pytest.skip("cgroup v2 renames no group")
    boxes = [await backend.launch(yard.plan(backend.node))]
    await until(backend._stock, 2)
    given = []
    give = backend._stock.give

    async def noted(name: str, limits: Limits, *, ahead: bool) -> bool:
        given.append(await give(name, limits, ahead=ahead))
        return bool(given[-1])

    monkeypatch.setattr(backend._stock, "give", noted)
    boxes.append(await backend.launch(yard.plan(backend.node)))
    assert given == [True]
    assert backend.site.from_stock == 1
    for file in (("cpu", QUOTA), ("cpu", "cpu.shares"), ("memory", "memory.limit_in_bytes"), ("pids", "pids.max")):
        first, second = (Path(backend._cgroups.path(file[0], box.plan.ulid), file[1]).read_text() for box in boxes)
        assert first == second, file
    await until(backend._stock, 2)
    assert await backend.reap(frozenset(box.plan.ulid for box in boxes)) == ()
    await until(backend._stock, 2)
    monkeypatch.setattr(stock, "MANY", 4)
    for box in boxes:
        await box.stop()
    await until(backend._stock, 0)
