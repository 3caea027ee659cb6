"""A node is emptied before it is taken away: `dsec node drain`, on real containers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dsec.actors.up import Cluster
from dsec.model import ExitReason, State
from libdsec import Busy, Client, DeadlineExceeded
from tests.system.container_box import SMALL, client, cluster  # noqa: F401

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(loop_scope="module")
async def node(client: Client, cluster: Cluster) -> AsyncIterator[str]:  # noqa: F811
    """The one node of the cluster; it takes sandboxes again afterwards."""
    (name,) = cluster.edges
    yield name
    assert (await drain(cluster, name, "--undo"))[0] == 0
    async with client.sandbox("small", **SMALL) as box:
        assert (await box.exec("true")).ok


async def drain(cluster: Cluster, name: str, *options: str) -> tuple[int, dict[str, Any], str]:  # noqa: F811
    """Exit code, what it printed as JSON, and what it said on the way."""
    command = [sys.executable, "-m", "dsec.cli", "node", "drain", name, *options, "--json", "--url", cluster.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = await process.communicate()
    return process.returncode or 0, json.loads(out), err.decode()


async def refused(client: Client) -> None:  # noqa: F811
    """A create finds no node."""
    with pytest.raises((Busy, DeadlineExceeded)) as caught:
        await client.create("small", timeout=1.0, **SMALL)
    assert caught.value.reason == "draining"


async def test_wait_until_the_last_has_ended(client: Client, cluster: Cluster, node: str) -> None:  # noqa: F811
    """No new sandbox is taken, those that are there go on, how many are left is told, and it returns when none is; before that a time
    limit ends it with an error, and the node goes on draining."""
    boxes = [await client.create("small", **SMALL) for _ in range(2)]
    code, said, progress = await drain(cluster, node, "--wait", "--timeout", "0.5")
    assert (code, said["error"]["code"]) == (4, "deadline")
    assert "2 running" in progress
    assert (await drain(cluster, "nope"))[0] == 3
    await refused(client)
    assert (await boxes[0].exec("echo works")).stdout == b"works\n"
    waiting = asyncio.create_task(drain(cluster, node, "--wait"))
    await asyncio.sleep(0.5)
    await boxes[0].stop()
    assert not waiting.done()
    await boxes[1].stop()
    code, said, progress = await waiting
    assert (code, said["draining"], said["states"]) == (0, True, {})
    assert "no sandboxes" in progress


async def test_wait_through_a_death_of_the_edge(client: Client, cluster: Cluster, node: str) -> None:  # noqa: F811
    """An Edge that is killed and started anew while it is drained goes on draining, and its sandbox on running."""
    box = await client.create("small", **SMALL)
    waiting = asyncio.create_task(drain(cluster, node, "--wait"))
    await asyncio.sleep(1.0)
    edge = cluster.edges[node]
    await edge.kill()
    await edge.start()
    assert (await box.exec("echo here", timeout=60)).stdout == b"here\n"
    async with asyncio.timeout(60):
        while not (await client.nodes()).nodes[0].draining:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.1)
    assert not waiting.done()
    await box.stop()
    assert (await waiting)[0] == 0


async def test_stop_ends_all_as_drained(client: Client, cluster: Cluster, node: str) -> None:  # noqa: F811
    """It returns when nothing is left, and each end says why."""
    boxes = [await client.create("small", **SMALL) for _ in range(3)]
    code, said, _ = await drain(cluster, node, "--stop")
    assert (code, said["states"]) == (0, {})
    for box in boxes:
        assert (await box.wait(10)).reason is ExitReason.DRAINED
    await refused(client)


async def test_pause_freezes_all_and_undo_takes_them_up(client: Client, cluster: Cluster, node: str) -> None:  # noqa: F811
    """It returns when all are paused; they are resumed by their next request, also while the node drains."""
    boxes = [await client.create("small", **SMALL) for _ in range(3)]
    code, said, _ = await drain(cluster, node, "--pause")
    assert (code, said["states"], said["trouble"]) == (0, {"paused": 3}, [])
    assert {info.state for info in await client.list()} == {State.PAUSED}
    await refused(client)
    assert (await boxes[0].exec("echo up")).stdout == b"up\n"
    for box in boxes:
        await box.stop()
