"""JetStream's disk is full for a while: work goes on, and what has happened is told once the server takes it again."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from libdsec import Client

pytestmark = [pytest.mark.needs("root"), pytest.mark.asyncio]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "up/nats"
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    fd = os.open(filler, os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.close(fd)
    return filler


async def told(client: Client) -> Counter[str]:
    return Counter([event.kind async for event in client.events(since="all", follow=False)])


async def test_events_of_that_time_are_told_later(small_disk: Path, tmp_path: Path) -> None:
    """Sandboxes are made, used, paused and stopped meanwhile. nats-server takes events again when it has been started anew with room on its
    disk; then all of them are there."""
    async with Cluster(tmp_path / "up", backends=("fake",)) as cluster, libdsec.connect(cluster.url) as client:
        first = await client.create("debian", backend="fake")
        filler = fill(small_disk)
        for _ in range(5):
            sandbox = await client.create("debian", backend="fake")
            assert (await sandbox.exec("echo on")).stdout.text == "on\n"
            await sandbox.pause()
            await sandbox.stop()
        last = await client.create("debian", backend="fake")
        filler.unlink()
        cluster.nats.kill()
        await cluster.nats.start(30.0)
        async with asyncio.timeout(60):
            wanted = {"created": 7, "running": 7, "paused": 5, "stopped": 5}
            while True:
                try:
                    if wanted.items() <= (await told(client)).items():
                        break
                except libdsec.DsecError:  # it is being connected to, or reads what it has
                    pass
                await asyncio.sleep(0.2)
        assert {info.id for info in await client.list()} == {first.id, last.id}
