"""What sandboxes may write to a node's store of disks, all together."""

from __future__ import annotations

import pytest

import libdsec
from dsec.backends.btrfs import known
from libdsec import DeadlineExceeded, InvalidRequest
from tests.system.container_box import SMALL, running

MIB = 1 << 20
pytestmark = pytest.mark.needs("root", "cgroup", "oci", "guest")


@pytest.mark.skipif(not known(), reason="this kernel has no btrfs")
async def test_limits_of_disks_fit_into_the_store() -> None:
    """Without overcommit two halves of the store are given away and no more: the next is refused by its filter, until one has ended. One
    that is larger than the store is refused at once, and what writes to memory is not counted."""
    half: libdsec.Options = {**SMALL, "disk": 256 * MIB}
    async with running(edge={"disk_overcommit": 1.0}, container={"disk_store_bytes": 512 * MIB}) as cluster:
        async with libdsec.connect(cluster.url) as client:
            made = [await client.create("small", **half) for _ in range(2)]
            assert (await client.nodes()).nodes[0].load.disk_total == 512 * MIB
            with pytest.raises(DeadlineExceeded, match="no node has room now: disk"):
                await client.create("small", **half, timeout=4)
            with pytest.raises(InvalidRequest, match="more than any node has") as never:
                await client.create("small", **{**SMALL, "disk": 1024 * MIB}, timeout=60)
            assert never.value.field == "resources.disk"
            await (await client.create("small", **{**half, "disk_mode": "tmpfs"})).stop()
            await made[0].pause()
            with pytest.raises(DeadlineExceeded, match="disk"):
                await client.create("small", **half, timeout=4)
            await made[0].stop()
            made[0] = await client.create("small", **half)
            for each in made:
                await each.stop()
