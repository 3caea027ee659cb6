"""Sandboxes whose Edge never returns end by themselves, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import Any

import pytest

from dsec.backends import orphans
from dsec.model import MIB, ExitReason
from tests.fixtures_backend import Yard, sh
from tests.system.test_holder import holder_pid

pytestmark = [pytest.mark.usefixtures("leftovers"), pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest")]

GRACE = 0.5


async def until_gone(*pids: int) -> None:
    async def gone() -> None:
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):  # noqa: ASYNC110 - processes that are nobody's here
            await asyncio.sleep(0.05)

    await asyncio.wait_for(gone(), 60)


async def abandoned(yard: Yard, **options: Any) -> tuple[Any, list[Any], int]:
    """A backend whose Edge went away, its sandboxes (one of them frozen), and the holder that has them."""
    backend = await yard.backend(holder_linger=0.2, **options)
    modes = [mode for mode in ("tmpfs", "btrfs") if mode in backend.node.disk_modes]
    boxes = [await backend.launch(yard.plan(backend.node, disk_mode=mode)) for mode in modes]
    boxes.append(await backend.launch(yard.plan(backend.node)))
    await boxes[-1].pause()
    pid = holder_pid(backend)
    await backend.close()
    return backend, boxes, pid


async def test_nobody_returns(leftovers: Any, yard: Yard) -> None:
    """When its grace is over the holder has the sandboxes ended, frozen ones too: processes, groups, disks and the holder itself go. An
    Edge that starts one day is told why."""
    options = {"orphan_grace": GRACE, "disk_store_bytes": 512 * MIB}
    backend, boxes, holder = await abandoned(yard, **options)
    await until_gone(holder, *(box.pid for box in boxes))
    async with asyncio.timeout(60):
        while os.path.exists(f"{yard.state}/disks.btrfs"):  # noqa: ASYNC110 - whom the holder left it to removes it after the holder's end
            await asyncio.sleep(0.05)
    assert not os.listdir(backend._sandboxes)
    assert not backend._cgroups.names()
    late = await yard.backend()
    for box in boxes:
        assert await late.adopt(box.plan) is None
        ended = await late.last_exit(box.plan.ulid)
        assert ended is not None
        assert (ended.reason, ended.detail) == (ExitReason.BROKEN, orphans.DETAIL)


async def test_an_edge_that_returns_in_time(leftovers: object, yard: Yard) -> None:
    """Within the grace nothing happens, and an Edge that is there stops the clock."""
    backend, boxes, holder = await abandoned(yard, orphan_grace=600.0)
    second = await yard.backend(orphan_grace=GRACE)
    adopted = [await second.adopt(box.plan) for box in boxes]
    await asyncio.sleep(4 * GRACE)
    assert holder_pid(second) == holder
    await adopted[-1].resume()
    for box in adopted:
        assert (await sh(box, "echo alive"))[1] == "alive\n"
    assert backend.options.orphan_grace == 600.0


async def test_an_heir_that_cannot_start(leftovers: object, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a program to do it well the sandboxes are killed all the same, and the next Edge frees what they held."""
    monkeypatch.setattr(orphans, "command", lambda *_: ["/nowhere/python"])
    backend = await yard.backend(holder_linger=0.2, orphan_grace=GRACE)
    box = await backend.launch(yard.plan(backend.node))
    holder = holder_pid(backend)
    await backend.close()
    await until_gone(holder, box.pid)
    late = await yard.backend()
    assert await late.reap(frozenset()) == (box.plan.ulid,)


async def test_an_heir_that_fails_is_followed(leftovers: object, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """An heir that dies before it has done its work leaves it to the next one."""
    real, mark = orphans.command, yard.state / "tried"

    def once(*what: Any) -> list[str]:
        return ["/bin/sh", "-c", f"[ -e {mark} ] && exec {shlex.join(real(*what))}; touch {mark}; exit 1"]

    monkeypatch.setattr(orphans, "command", once)
    backend = await yard.backend(holder_linger=0.2, orphan_grace=GRACE)
    box = await backend.launch(yard.plan(backend.node))
    holder = holder_pid(backend)
    await backend.close()
    await until_gone(holder, box.pid)
    assert mark.exists()
    assert not os.listdir(backend._sandboxes)
