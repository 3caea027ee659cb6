"""Who ends what, on real containers: a driver that is killed, interrupted or cancelled leaves no sandbox; named after the cases."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dsec.actors.up import Cluster
from libdsec import Client, spec
from tests import drivers
from tests.system.container_box import SMALL, client, cluster  # noqa: F401

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]


def drive(url: str, seconds: str) -> subprocess.Popen[bytes]:
    """A driver with four sandboxes, each in the middle of a command."""
    return drivers.drive(url, 4, "small", SMALL, ["sleep", seconds], lease_ttl=2)


def sleepers(seconds: str) -> list[int]:
    """Processes outside and inside whose command line is that sleep."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\0" + seconds.encode() + b"\0":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def none_left(client: Client, seconds: str = "", timeout: float = 40.0) -> None:  # noqa: F811
    """Until no sandbox is listed and no such sleep runs."""
    end = time.monotonic() + timeout
    while (listed := await client.list()) or (seconds and sleepers(seconds)):
        assert time.monotonic() < end, (listed, sleepers(seconds))
        await asyncio.sleep(0.1)


@pytest.fixture
def seconds() -> str:
    """How long a sleep takes that is nobody else's."""
    return f"6{secrets.randbelow(10**8):08d}"


async def test_c01_c02_a_killed_driver(client: Client, cluster: Cluster, seconds: str) -> None:  # noqa: F811
    """SIGKILL in the middle of its commands: sandboxes and commands are gone after the lease and a sweep, and the lease is the reason."""
    driver = await asyncio.to_thread(drive, cluster.url, seconds)
    ids = {info.id for info in await client.list()}
    assert len(ids) == 4
    while len(sleepers(seconds)) < 4:  # noqa: ASYNC110 - each command has begun
        await asyncio.sleep(0.05)
    driver.kill()
    await asyncio.to_thread(driver.communicate)
    await none_left(client, seconds)
    ends = {info.id: info.exit.reason for info in await client.list(stopped=True) if info.exit and info.id in ids}
    assert ends == dict.fromkeys(ids, "lease")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_c04_c05_an_interrupted_driver(
    client: Client,  # noqa: F811
    cluster: Cluster,  # noqa: F811
    seconds: str,
    signum: signal.Signals,
) -> None:
    """Ctrl+C inside gather(): one KeyboardInterrupt and no cascade of errors of the loop; SIGTERM needs no last words; all are stopped."""
    driver = await asyncio.to_thread(drive, cluster.url, seconds)
    driver.send_signal(signum)
    _, err = await asyncio.to_thread(driver.communicate, None, 60)
    text = err.decode()
    if signum == signal.SIGINT:
        drivers.interrupted_once(text)
    else:
        assert text == ""
    await none_left(client, seconds)


async def test_c06_cancelled_creates(client: Client) -> None:  # noqa: F811
    """A create, and a burst, cancelled at one moment or another of a real launch leave nothing."""

    async def use() -> None:
        async with client.sandbox("small", **SMALL) as sandbox:
            await sandbox.exec("true")

    for pause in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15):
        many = client.create_many(spec("small", **SMALL), 6)
        tasks = [asyncio.ensure_future(use()), asyncio.ensure_future(many)]
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        one, several = await asyncio.gather(*tasks, return_exceptions=True)
        assert one is None or isinstance(one, asyncio.CancelledError)
        assert isinstance(several, asyncio.CancelledError | list)
        if isinstance(several, list):  # it was done before it was cancelled
            await client.stop(ids=[each.id for each in several])
    await none_left(client)


async def test_c07_many_are_stopped_together(client: Client) -> None:  # noqa: F811
    """The sandboxes of a job end side by side: all of them take not much longer than a few of them one after another."""
    labels = {"job": os.urandom(4).hex()}
    one_by_one = []
    for _ in range(3):
        box = await client.create("small", **SMALL)
        began = time.monotonic()
        await box.stop()
        one_by_one.append(time.monotonic() - began)
    made = await client.create_many(spec("small", labels=labels, on_client_loss="keep", **SMALL), 32)
    began = time.monotonic()
    outcomes = await client.stop(labels)
    assert time.monotonic() - began < 14 * max(1.0, *one_by_one)
    assert {outcome.id for outcome in outcomes} == {box.id for box in made}
    assert [outcome.error for outcome in outcomes if outcome.error is not None] == []
    await none_left(client)
