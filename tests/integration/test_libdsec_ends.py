"""What is left when clients of the fake cluster are killed, interrupted, cancelled or come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from typing import Any

import pytest

import libdsec
import libdsec.blocking
import libdsec.many
from libdsec import (
    Client,
)
from tests import drivers
from tests.integration.client_box import FAKE, eventually, none_left


class CancelAt:
    """Awaits a coroutine and cancels it at its n-th suspension; ``reached`` tells whether there was one."""

    def __init__(self, coroutine: Any, at: int) -> None:
        self.coroutine, self.at, self.reached = coroutine, at, False

    def __await__(self) -> Any:
        step = self.coroutine.__await__()
        count = 0
        future = next(step)
        while True:
            try:
                if count == self.at:
                    self.reached = True
                    future._asyncio_future_blocking = False
                    future = step.throw(asyncio.CancelledError())
                    count += 1
                    continue
                count += 1
                try:
                    value = yield future
                except BaseException as error:  # noqa: BLE001 - handed on as it is
                    future = step.throw(error)
                else:
                    future = step.send(value)
            except StopIteration as end:
                return end.value


async def test_c06_cancel_at_every_await_of_create(dsec: Client) -> None:
    """A create that is cancelled, wherever it was waiting and however far it had come, leaves no sandbox."""

    async def use() -> None:
        async with dsec.sandbox("img", **FAKE):
            pass

    for at in range(50):
        attempt = CancelAt(use(), at)
        try:
            await asyncio.wait_for(asyncio.ensure_future(wrapped(attempt)), 20)
        except asyncio.CancelledError:
            pass
        if not attempt.reached:
            break
    else:
        raise AssertionError("never came to its end")
    for pause in (0, 0.001, 0.003, 0.005, 0.007, 0.01, 0.02):
        task = asyncio.ensure_future(use())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(20):
        for pause in (0, 0.004, 0.03):
            task = asyncio.ensure_future(dsec.create_many(libdsec.spec("img", **FAKE), 30))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: none_left(dsec))


@pytest.mark.parametrize("pause", [0.0, 0.002, 0.01])
async def test_c06_a_client_that_leaves_in_the_middle_of_a_create(dsec: Client, fake_cluster: str, pause: float) -> None:
    """Interrupted and gone before it heard where its sandboxes were placed: none of them waits for its lease to lapse."""
    async with libdsec.connect(fake_cluster, project=dsec.project) as client:
        creating = asyncio.ensure_future(client.create_many(libdsec.spec("img", on_client_loss="keep", **FAKE), 20))
        await asyncio.sleep(pause)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
    await asyncio.sleep(0.2)  # what was on its way has arrived
    await eventually(lambda: none_left(dsec))


async def wrapped(awaitable: Any) -> Any:
    return await awaitable


def child(url: str, project: str) -> subprocess.Popen[bytes]:
    return drivers.drive(url, 5, "img", FAKE, "sleep 60", project=project, lease_ttl=1)


async def test_c01_c02_killed_client_leaves_nothing(dsec: Client, fake_cluster: str) -> None:
    """SIGKILL in the middle of exec: everything is reclaimed within the lease and a sweep, with the lease as its reason."""
    process = await asyncio.to_thread(child, fake_cluster, dsec.project)
    assert len(await dsec.list()) == 5
    process.kill()
    process.communicate()
    began = time.monotonic()
    await eventually(lambda: none_left(dsec))
    assert time.monotonic() - began < 4
    assert {info.exit.reason for info in await dsec.list(stopped=True) if info.exit} == {"lease"}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_c04_c05_interrupted_client(dsec: Client, fake_cluster: str, signum: signal.Signals) -> None:
    """Ctrl+C inside gather(): one KeyboardInterrupt, no cascade of errors of the loop, all stopped; SIGTERM needs no last words."""
    process = await asyncio.to_thread(child, fake_cluster, dsec.project)
    process.send_signal(signum)
    _, err = await asyncio.to_thread(process.communicate, None, 20)
    text = err.decode()
    if signum == signal.SIGINT:
        drivers.interrupted_once(text)
        assert await none_left(dsec)
    else:
        assert text == ""
        await eventually(lambda: none_left(dsec))


async def test_lease_is_taken_up_again(dsec: Client, fake_cluster: str) -> None:
    """A restarted client with the same lease keeps its sandboxes alive; without it they end."""
    name = f"job-{os.urandom(4).hex()}"
    first = await libdsec.connect(fake_cluster, project=dsec.project, lease=name, lease_ttl=1)
    made = await first.create_many(libdsec.spec("img", **FAKE), 3)
    await first.close()
    await asyncio.sleep(0.3)
    async with libdsec.connect(fake_cluster, project=dsec.project, lease=name, lease_ttl=1):
        await asyncio.sleep(2.5)
        assert {info.id for info in await dsec.list()} == {sb.id for sb in made}
    await eventually(lambda: none_left(dsec))


async def test_create_outlives_its_client(dsec: Client, fake_cluster: str) -> None:
    """`create` makes a sandbox that stays when the client closes or its lease lapses."""
    async with libdsec.connect(fake_cluster, project=dsec.project, lease_ttl=1) as client:
        kept = await client.create("img", **FAKE)
        other = await client.create("img", on_client_loss="stop", **FAKE)
    await asyncio.sleep(2.5)
    assert [info.id for info in await dsec.list()] == [kept.id]
    assert (await dsec.attach(kept.id)).id != other.id


async def test_what_is_created_stays_and_a_spec_says_itself(dsec: Client, fake_cluster: str) -> None:
    """One rule for one and for many: by an image's name they outlive their client, unless told otherwise; a spec is taken at its word."""
    client = await libdsec.connect(fake_cluster, project=dsec.project)
    stay = [await client.create("img", **FAKE), *await client.create_many("img", 2, **FAKE)]
    go = [
        await client.create("img", on_client_loss="stop", **FAKE),
        *await client.create_many("img", 2, on_client_loss="stop", **FAKE),
        await client.create(libdsec.spec("img", **FAKE)),
        *await client.create_many(libdsec.spec("img", **FAKE), 2),
    ]
    await client.close()
    for each in go:
        with contextlib.suppress(libdsec.SandboxGone):
            await (await dsec.attach(each.id)).wait(60)
    for each in stay:
        left = await dsec.attach(each.id)
        assert (await left.info()).exit is None
        await left.stop()
