"""A crash of an environment is a final state and an event, never a silent restart: whatever of it is killed, and whoever is away then."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

import pytest

from dsec.actors.up import Cluster
from dsec.bus.messages import Event
from dsec.model import ExitReason, State
from libdsec import Client, Sandbox, SandboxGone
from tests.system.container_box import SMALL, client, cluster  # noqa: F401
from tests.system.test_cases_container import init_of
from tests.system.test_edge_restart import _is_holder

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


def holder_of(cluster: Cluster) -> int:  # noqa: F811
    (pid,) = (pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_holder(pid, Path(cluster.dir)))
    return pid


async def told(client: Client, label: str, kind: str) -> list[Event]:  # noqa: F811
    """The events of a sandbox, once there is one of this kind."""
    found: list[Event] = []
    async with asyncio.timeout(60):
        while not any(event.kind == kind for event in found):
            found = [event async for event in client.events({"death": label}, since="all", follow=False)]
    return found


async def ends_once(client: Client, box: Sandbox, label: str, reasons: set[ExitReason]) -> None:  # noqa: F811
    """It is stopped for one of these reasons, its end came as one event that says the same, and nothing has been started in its place."""
    async with asyncio.timeout(60):
        while (info := await Sandbox(client, box._id).info()).state is not State.STOPPED:  # noqa: ASYNC110 - polled, as a client that comes later would
            await asyncio.sleep(0.05)
    assert info.exit is not None
    assert info.exit.reason in reasons, info.exit
    with pytest.raises(SandboxGone) as caught:
        await Sandbox(client, box._id).exec("true")
    assert caught.value.reason == info.exit.reason
    found = await told(client, label, "stopped")
    assert [event.kind for event in found] == ["created", "running", "stopped"]
    assert {event.sb for event in found} == {box.id}
    assert found[-1].detail["reason"] == info.exit.reason
    assert await client.list({"death": label}) == []


@pytest.mark.parametrize("what", ["init", "init and holder", "init while its Edge is away", "init and holder while the Edge is away"])
async def test_a_killed_environment_is_told_and_not_restarted(client: Client, cluster: Cluster, what: str) -> None:  # noqa: F811
    """The first process of a sandbox is the guest agent: its death is the sandbox's. Other sandboxes of the node live on."""
    label = secrets.token_hex(4)
    (edge,) = cluster.edges.values()
    async with client.sandbox("small", **SMALL) as other:
        box = await client.create("small", labels={"death": label}, **SMALL)
        await told(
            client, label, "running"
        )  # what is told is on disk: an Edge that dies before that may take it for one that was being made
        init, holder = init_of(box), holder_of(cluster)
        if "away" in what:
            await edge.kill()
        if "holder" in what:
            os.kill(holder, signal.SIGSTOP)  # so that it sees nothing of what follows
        os.kill(init, signal.SIGKILL)
        if "holder" in what:
            os.kill(holder, signal.SIGKILL)
        if "away" in what:
            await edge.start()
        # Who saw it can say how it ended; where nobody was there, that is what is told.
        await ends_once(client, box, label, {ExitReason.EXITED, ExitReason.BROKEN} if "holder" in what else {ExitReason.EXITED})
        assert (await other.exec("echo lives", timeout=60)).stdout == b"lives\n"


async def test_a_killed_holder_costs_no_environment(client: Client, cluster: Cluster) -> None:  # noqa: F811
    """Nothing ends by it, and the death of a sandbox after it is seen by the next one."""
    label = secrets.token_hex(4)
    box = await client.create("small", labels={"death": label}, **SMALL)
    holder = holder_of(cluster)
    os.kill(holder, signal.SIGKILL)
    assert (await box.exec("echo lives", timeout=60)).stdout == b"lives\n"
    async with client.sandbox("small", **SMALL) as new:
        assert (await new.exec("true")).ok
    assert holder_of(cluster) != holder
    os.kill(init_of(box), signal.SIGKILL)
    await ends_once(client, box, label, {ExitReason.EXITED, ExitReason.BROKEN})
