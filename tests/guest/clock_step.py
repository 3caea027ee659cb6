"""Run inside the guest: its clock is set by an hour, and back by two, while containers work: ``python3 -m tests.guest.clock_step``."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from dsec.model import ExitReason, State
from dsec.trees import clear
from tests.fixtures_backend import build_small_base

HOUR = 3_600.0
OPTIONS: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64, "idle_timeout": 900, "on_idle": "stop", "ttl": 900}


async def steps(client: libdsec.Client) -> None:
    """Each is followed by several sweeps of the Edge."""
    running = await client.create("small", timeout=300, **OPTIONS)
    paused = await client.create("small", timeout=300, **OPTIONS)
    ended = await client.create("small", timeout=300, **OPTIONS)
    await paused.pause()
    await ended.stop()
    for seconds in (HOUR, -2 * HOUR):
        command = asyncio.create_task(running.exec("sleep 6; echo through", timeout=120))
        late = asyncio.create_task(running.exec("sleep 600", timeout=4))
        await asyncio.sleep(1)
        time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)
        result = await command
        assert (result.stdout, result.timed_out) == (b"through\n", False), result
        assert (await late).timed_out
        await asyncio.sleep(5)
        assert {info.id: info.state for info in await client.list()} == {running.id: State.RUNNING, paused.id: State.PAUSED}
        end = (await libdsec.Sandbox(client, ended._id).info()).exit
        assert end is not None
        assert end.reason is ExitReason.REQUESTED
        async with client.sandbox("small", **OPTIONS) as new:
            assert (await new.exec("echo new", timeout=120)).stdout == b"new\n"
        print(f"clock set by {seconds:+.0f} s: nothing ended by it", flush=True)
    assert (await paused.exec("echo up", timeout=120)).stdout == b"up\n"


async def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        await asyncio.to_thread(build_small_base, place / "base")
        cluster = Cluster(place / "up", edges=(f"t{secrets.token_hex(4)}",))
        await import_dir(LayerStore(cluster.layer_store), place / "base", "small")
        async with cluster, libdsec.connect(cluster.url, lease_ttl=60) as client:
            await steps(client)
    finally:
        await asyncio.to_thread(clear, place)


if __name__ == "__main__":
    asyncio.run(main())
