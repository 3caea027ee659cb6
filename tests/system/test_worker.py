"""Workers: sandboxes that make and drive others, on real containers."""

from __future__ import annotations

import json

import pytest

import libdsec
from dsec.actors.up import Cluster
from libdsec import Client
from tests.system.worker_box import CHILD, WORKER, client, cluster, driver, inside

__all__ = ["client", "cluster", "driver"]

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def test_a_worker_drives_sandboxes_of_its_job(client: Client, cluster: Cluster) -> None:
    """Without an argument it makes, uses and stops them, from a sandbox with no network; its user sees them under the job's label."""
    async with client.sandbox("small", **WORKER) as worker:
        said = await inside(
            worker,
            """
async with dsec.sandbox("small", **CHILD) as sandbox:
    result = await sandbox.exec("echo from below")
    await sandbox.files.write("/note", b"x" * 200_000)
    size = len(await sandbox.files.read("/note"))
    async with sandbox.start("seq 3") as process:
        lines = [line async for line in process.lines()]
    info = await sandbox.info()
    alone = [each.id for each in await dsec.list()] == [sandbox.id]
    print(json.dumps([result.stdout.text, size, lines, info.labels, info.principal, alone]))
async with dsec.burst("small", 4, **CHILD) as burst:
    print(len(await burst.wait()))
""",
        )
        first, count = said.splitlines()
        text, size, lines, labels, principal, alone = json.loads(first)
        assert (text.split(), size, lines, alone, int(count)) == (["from", "below"], 200_000, ["1", "2", "3"], True, 4)
        assert (labels, principal) == ({"dsec.job": worker.id}, f"local~{worker.id}")
        assert (await worker.info()).labels == {"dsec.job": worker.id}


def test_options() -> None:
    """What a worker may is checked before anything is sent."""
    assert libdsec.spec("small", **WORKER).worker == libdsec.Worker()
    assert libdsec.spec("small", **CHILD).worker is None
    for bad in ("yes", libdsec.Worker(networks=("pypi",)), libdsec.Worker(on_end="restart"), libdsec.Worker(project="a//b")):
        with pytest.raises(libdsec.InvalidRequest):
            libdsec.spec("small", worker=bad)  # type: ignore[arg-type]
