"""What a client has named outlives its Edge's restart; what it has not goes, though its lease lives."""

from __future__ import annotations

import asyncio

from dsec.bus import subjects
from dsec.bus.messages import Lease, LeaseAck, LeaseRenew
from dsec.bus.server import NatsServer
from dsec.model import new_ulid
from tests.integration.actors_box import ME, Asker, Box, eventually


async def test_claims_outlive_the_edge_and_what_nobody_named_does_not(nats_server: NatsServer) -> None:
    """Two sandboxes of one lease, of which its client hears of one (the other answer was lost with the Edge that gave it): after the
    restart the one that was named lives on, and the other is reaped while the lease is being renewed."""
    box = Box(nats_server.url, nats_server.dir.parent)
    try:
        edge = await box.edge(unclaimed_ms=300)
        await box.watcher()
        await box.scheduler()
        bus = await box.bus()
        asker = await Asker(bus).open()
        lease = Lease(id=new_ulid(), ttl_ms=1_500)
        await asyncio.gather(asker.create(1, burst=new_ulid(), lease=lease), asker.create(1, burst=new_ulid(), lease=lease))
        await eventually(lambda: len(edge.sandboxes) == 2)
        mine, other = sorted(edge.sandboxes)

        async def renew(*claims: str) -> LeaseAck:
            message = LeaseRenew(lease=lease.id, ttl_ms=1_500, claims=claims)
            return await bus.call(subjects.lease("main", "n1", ME), message, LeaseAck, timeout=5, retries=5)

        assert (await renew(mine)).held == 2
        await box.crash("n1")
        edge = await box.edge(unclaimed_ms=300)
        assert set(edge.sandboxes) == {mine, other}
        async with asyncio.timeout(30):
            while other in edge.sandboxes:
                await renew()
                await asyncio.sleep(0.1)
        assert set(edge.sandboxes) == {mine}
    finally:
        await box.close()
