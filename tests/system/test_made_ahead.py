"""A process made ahead of its order is as any other sandbox, is nobody's until an order takes it, and is gone when none does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.backends.base import LaunchPlan
from dsec.backends.plan import ids_of
from dsec.model import MIB, Resources
from dsec.qos.cgroup import AHEAD
from tests.fixtures_backend import SMALL, Yard, sh

pytestmark = [pytest.mark.needs("root", "cgroup", "native"), pytest.mark.usefixtures("leftovers")]


@pytest_asyncio.fixture
async def backend(leftovers: object, yard: Yard) -> Any:
    backend = await yard.backend()
    assert backend.driver.name == "native"
    if backend._cgroups.version != 1:
        pytest.skip("cgroup v2 renames no group: only namespaces are made ahead")
    return backend


def announced(backend: Any, *plans: LaunchPlan) -> None:
    """These are likely to come next, in the holder's eyes."""
    assert all(plan.idmap is not None for plan in plans)
    slots = [(plan.idmap.base - ids_of(0).base) // ids_of(0).count for plan in plans if plan.idmap is not None]
    backend.site.upcoming = lambda _: slots


async def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


def groups(backend: Any) -> set[str]:
    return {name for name in backend._cgroups._children() if name.startswith(AHEAD)}


def sockets(backend: Any) -> set[str]:
    return {name for name in os.listdir(backend._run) if name.startswith(AHEAD)}


def waiting(backend: Any) -> list[int]:
    """Processes that stand behind their filter in cgroups made ahead: all is done but for what an order says."""
    found = []
    for name in groups(backend):
        for pid in backend._cgroups.pids(name):
            with contextlib.suppress(OSError):
                if "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text():
                    found.append(pid)
    return found


async def made(backend: Any, count: int = 1) -> list[int]:
    await until(lambda: len(waiting(backend)) == count, f"not {count} processes were made ahead")
    return waiting(backend)


LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cpu.cfs_quota_us", "cpu.shares", "pids.max")


def limits(backend: Any, plan: LaunchPlan) -> dict[str, str]:
    return {file: Path(backend._cgroups.path(file.partition(".")[0], plan.ulid), file).read_text() for file in LIMITS}


FACTS = r"""
sed -E 's/^[0-9]+ [0-9]+ [0-9]+:[0-9]+ //; s/(lowerdir\+?|upperdir|workdir|gid)=[^ ,]*//g' /proc/self/mountinfo | sort
grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp|Seccomp_filters|Umask|Sig...|Threads):' /proc/1/status /proc/self/status
cat /proc/1/cmdline | tr '\0' ' '; cat /proc/self/cgroup /proc/1/oom_score_adj /proc/net/dev
ulimit -a; ls -ln /dev /proc/1/fd 2>&1 | sed -E 's/[A-Z][a-z]{2} +[0-9]+ +[0-9:]+//'
stat -c '%u %g %a' / /dev /dev/pts/ptmx /proc; ps -e | wc -l; echo $$
"""


async def test_it_is_as_any_other(backend: Any, yard: Yard) -> None:
    """Mounts, ids, capabilities, filter, limits, descriptors, devices and processes inside are those of a sandbox made when it was ordered;
    names, arguments and environment are its own, and so are its namespaces and cgroups."""
    env = ({"WHOSE": "first", "SECRET": "of the first"}, {"WHOSE": "second"})
    first, second = (yard.plan(backend.node, env=each) for each in env)
    second = msgspec.structs.replace(second, hostname="another-name")
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    assert not backend._cgroups.names() - {first.ulid}
    backend.site.upcoming = lambda _: ()
    taken = await backend.launch(second)
    assert taken.pid == pid
    assert backend.site.from_pool == 1
    assert not groups(backend) | sockets(backend)
    told = [(await sh(each, FACTS))[1] for each in (box, taken)]
    assert told[0] == told[1]
    assert (await sh(taken, "cat /proc/sys/kernel/hostname; echo $WHOSE-$SECRET"))[1].split() == ["another-name", "second-"]
    assert b"first" not in Path(f"/proc/{taken.pid}/environ").read_bytes()
    assert second.idmap is not None
    assert (await sh(taken, "cat /proc/self/uid_map"))[1].split() == ["0", str(second.idmap.base), str(second.idmap.count)]
    assert (await sh(taken, "python3 -c 'import os; m, s = os.openpty(); print(os.fstat(s).st_gid)'"))[1] == "5\n"
    for kind in ("pid", "mnt", "net", "ipc", "uts", "user", "cgroup"):
        assert os.readlink(f"/proc/{box.pid}/ns/{kind}") != os.readlink(f"/proc/{taken.pid}/ns/{kind}")
    assert limits(backend, first) == limits(backend, second)
    assert pid in backend.pids(second)
    places = re.findall(r"^\d+:(?:memory|pids|freezer|cpu|cpuacct):(.*)$", Path(f"/proc/{pid}/cgroup").read_text(), re.MULTILINE)
    assert len(places) == len(backend._cgroups.directories(""))
    assert all(place.endswith(f"/{second.ulid}") for place in places)
    await sh(taken, "echo mine > /file")
    assert (await sh(box, "ls /file"))[0] != 0
    await taken.stop()
    await box.stop()


@pytest.mark.parametrize(("memory", "pids"), [(48 * MIB, 32), (192 * MIB, 128)])
async def test_limits_are_those_of_its_order(backend: Any, yard: Yard, memory: int, pids: int) -> None:
    """Smaller and larger ones than those of the sandbox that it was made like."""
    first = yard.plan(backend.node, resources=SMALL)
    second = yard.plan(backend.node, resources=msgspec.structs.replace(SMALL, memory=memory, pids=pids, cpus=0.5))
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    taken = await backend.launch(second)
    assert taken.pid == pid
    plain = yard.plan(backend.node, resources=second.resources)
    backend.site.upcoming = lambda _: ()
    like = await backend.launch(plain)
    assert limits(backend, second) == limits(backend, plain)
    for each in (like, taken, box):
        await each.stop()


@pytest.mark.parametrize("other", ["disk", "capabilities", "masked", "seccomp"])
async def test_what_an_order_wants_otherwise_is_not_made_ahead(backend: Any, yard: Yard, other: str) -> None:
    """It gets a process of its own, which has what it ordered; what was made ahead ends, with all that it had, and is waited for."""
    first, second = yard.plan(backend.node), yard.plan(backend.node)
    if other == "disk":
        second = yard.plan(backend.node, resources=msgspec.structs.replace(SMALL, disk=16 * MIB))
    changed = {"capabilities": second.capabilities[1:], "masked": second.masked[1:], "seccomp": ""}
    second = msgspec.structs.replace(second, **({other: changed[other]} if other in changed else {}))
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    backend.site.upcoming = lambda _: ()
    mine = await backend.launch(second)
    assert mine.pid != pid
    status = (await sh(mine, "cat /proc/1/status"))[1]
    assert ("\nSeccomp:\t0\n" in status) == (other == "seccomp")
    assert ((await sh(box, "cat /proc/1/status | grep CapBnd"))[1] not in status) == (other == "capabilities")
    blocks, size = map(int, (await sh(mine, "stat -f -c '%b %S' /"))[1].split())
    assert (blocks * size == 16 * MIB) == (other == "disk")
    await until(lambda: not groups(backend) | sockets(backend), "something that was made ahead stays")
    await until(lambda: not os.path.exists(f"/proc/{pid}"), "its process is waited for by nobody")
    await mine.stop()
    await box.stop()


async def test_its_groups_have_its_names_before_its_agent_answers(backend: Any, yard: Yard) -> None:
    """However late the zygote is when it gives them: a sandbox that is stopped at once takes all its groups along."""
    if (strace := shutil.which("strace")) is None:
        pytest.skip("no strace, which makes a system call late")
    box = await backend.launch(yard.plan(backend.node))
    zygotes = (await backend.site.holder.request("zygotes"))["pids"]
    late = ["-e", "trace=rename", "-e", "inject=rename:delay_enter=100000:when=2+"]
    slow = [await asyncio.create_subprocess_exec(strace, "-qo", "/dev/null", "-p", str(pid), *late) for pid in zygotes]
    try:
        await asyncio.sleep(0.5)
        if any("\nTracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text() for pid in zygotes):
            pytest.skip("this machine lets nobody trace")
        second = yard.plan(backend.node)
        announced(backend, second)
        more = await backend.launch(yard.plan(backend.node))
        [pid] = await made(backend)
        backend.site.upcoming = lambda _: ()
        taken = await backend.launch(second)
        assert taken.pid == pid
        assert all(map(os.path.isdir, backend._cgroups.directories(second.ulid)))
        await taken.stop()
    finally:
        for each in slow:
            with contextlib.suppress(ProcessLookupError):
                each.terminate()
            await each.wait()
    await more.stop()
    await box.stop()
    await until(lambda: not backend._cgroups._children(), "a group stays")


async def test_a_layer_that_goes_takes_along_what_stands_on_it(backend: Any, yard: Yard) -> None:
    """Nothing made ahead keeps a layer's file system once the layer is dropped."""
    box = await backend.launch(yard.plan(backend.node))
    second = yard.plan(backend.node)
    announced(backend, second)
    more = await backend.launch(yard.plan(backend.node))
    [pid] = await made(backend)
    await box.stop()
    await more.stop()
    for layer in second.lowers:
        assert await backend.drop_layer(layer.digest)
    await until(lambda: not groups(backend) | sockets(backend), "something that was made ahead stays")
    await until(lambda: not os.path.exists(f"/proc/{pid}"), "its process is waited for by nobody")
    again = await backend.launch(second)
    assert (await sh(again, "echo works"))[1] == "works\n"
    await again.stop()


async def test_one_that_was_killed_costs_nothing(backend: Any, yard: Yard) -> None:
    """The sandbox for which it was made is launched as if there had been none."""
    first, second = yard.plan(backend.node), yard.plan(backend.node)
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not waiting(backend), "it lives on")
    again = await backend.launch(second)
    assert (await sh(again, "echo works"))[1] == "works\n"
    await again.stop()
    await box.stop()


async def test_it_ends_with_its_zygote(backend: Any, yard: Yard) -> None:
    """Its process at once; its groups and its socket, which the zygote cannot remove any more, when the Edge next begins."""
    first, second = yard.plan(backend.node), yard.plan(backend.node)
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    zygotes = (await backend.site.holder.request("zygotes"))["pids"]
    for zygote in zygotes:
        os.kill(zygote, signal.SIGKILL)
    await until(lambda: not waiting(backend), "it lives on")
    await until(lambda: not os.path.exists(f"/proc/{pid}"), "its process is waited for by nobody")
    backend._cgroups._drop_spares()
    backend._make_directories()
    assert not groups(backend) | sockets(backend)
    assert (await sh(box, "echo works"))[1] == "works\n"
    await box.stop()


async def test_large_environments_and_many_arguments_come_with_the_order(backend: Any, yard: Yard) -> None:
    """What is executed is the order's, however much of it there is; nothing is made ahead like an order that is very large."""
    env = {f"V{number}": "x" * 100 for number in range(2000)}
    first = yard.plan(backend.node)
    second = yard.plan(backend.node, env=env)
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    backend.site.upcoming = lambda _: [901]
    taken = await backend.launch(second)
    assert taken.pid == pid
    assert int((await sh(taken, "env | grep -c ^V"))[1]) == 2000
    third = await backend.launch(yard.plan(backend.node, resources=Resources(memory=128 * MIB, disk=16 * MIB)))
    for each in (third, taken, box):
        await each.stop()


async def test_a_node_that_is_asked_for_nothing_has_only_namespaces_ahead(backend: Any, yard: Yard) -> None:
    """After some seconds no process, group or socket waits any more; the next sandbox still finds its namespaces made."""
    first, second = yard.plan(backend.node), yard.plan(backend.node)
    announced(backend, second)
    box = await backend.launch(first)
    [pid] = await made(backend)
    network = os.readlink(f"/proc/{pid}/ns/net")
    await until(lambda: not groups(backend) | sockets(backend), "something that was made ahead stays")
    await until(lambda: not os.path.exists(f"/proc/{pid}"), "its process is waited for by nobody")
    backend.site.upcoming = lambda _: ()
    taken = await backend.launch(second)
    assert taken.pid != pid
    assert os.readlink(taken.netns) == network
    assert (await sh(taken, "cat /proc/sys/kernel/hostname"))[1].strip() == second.hostname
    await taken.stop()
    await box.stop()
