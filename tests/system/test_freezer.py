"""Groups that are held still: a storm of new processes does not get away, and what does not stand still is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from dsec.errors import NodeError
from dsec.qos.cgroup import Cgroups, Limits

pytestmark = pytest.mark.needs("root", "cgroup")


@pytest.fixture
def groups(edge_name: str, leftovers: object) -> Iterator[Cgroups]:
    made = Cgroups(f"dsec-{edge_name}")
    made.open()
    yield made
    for name in made.names():
        while made.kill(name):
            pass
        made.destroy(name)
    made.close()


def inside(groups: Cgroups, name: str, script: str, pids: int = 64) -> subprocess.Popen[bytes]:
    """A shell that has joined a group of that name before it begins."""
    order = groups.create(name, Limits(pids=pids, cpus=0.5, memory=64 << 20))
    joins = "".join(f"echo $$ >{directory}/cgroup.procs; " for directory in order.directories)
    argv = ["/bin/sh", "-c", f"{joins}{script}"]
    return subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def until_many(groups: Cgroups, name: str, count: int) -> None:
    async with asyncio.timeout(60):
        while len(groups.pids(name)) < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("while :; do for i in 1 2 3 4; do (:; /bin/true) & done; wait; done", id="fork"),
        pytest.param("while :; do sleep 0.01; done", id="vfork"),  # its parent is now and then missed by the first version's freezer
    ],
)
async def test_a_storm_of_new_processes_is_held_still(groups: Cgroups, script: str) -> None:
    """Again and again, while its processes begin and end all the time; and after each thaw it goes on."""
    storm = inside(groups, "storm", script)
    try:
        await until_many(groups, "storm", 2)
        for _ in range(15):
            await asyncio.to_thread(groups.freeze, "storm", True)
            before = groups.pids("storm")
            await asyncio.sleep(0.02)
            assert (groups.frozen("storm"), groups.pids("storm")) == (True, before)
            await asyncio.to_thread(groups.freeze, "storm", False)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while groups.pids("storm") == before:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
    finally:
        groups.kill("storm")
        await asyncio.to_thread(storm.wait)


async def test_what_does_not_stand_still_is_named_and_all_goes_on(groups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nothing stops: the error has its name and where it is, and the others run again."""
    shell = inside(groups, "held", "exec sleep 1000")
    try:
        await until_many(groups, "held", 1)
        monkeypatch.setattr(groups, "frozen", lambda _name: False)  # what the kernel says of one that waits for a disk that is gone
        monkeypatch.setattr("dsec.qos.cgroup.STANDING", ())
        with pytest.raises(NodeError, match=rf"did not freeze in 0.2 s: \w+ {shell.pid} \(\w, .*\)"):
            await asyncio.to_thread(groups.freeze, "held", True, 0.2)
        assert not groups.freezing("held")
    finally:
        groups.kill("held")
        with contextlib.suppress(ProcessLookupError):
            os.kill(shell.pid, signal.SIGKILL)
        await asyncio.to_thread(shell.wait)
