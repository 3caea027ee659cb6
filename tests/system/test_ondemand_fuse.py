"""What only the FUSE way of loading on demand has: its end, its file, its other kinds of mounts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.layers import fetch, fuse
from dsec.layers.mounts import bitmap, open_layer
from tests.layer_box import Box, Shared, readers

pytestmark = [pytest.mark.needs("erofs_file", "fuse"), pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("shared"), megabytes=6)
    yield made
    made.close()


@pytest.fixture
async def box(tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    monkeypatch.setenv("DSEC_DISABLE", "fanotify")
    made = Box(tmp_path / "box", shared)
    await made.open()
    yield made
    made.close()


def die(box: Box) -> None:
    """Worker and holder, at once."""
    loader = box.loaders[0]
    signal.pidfd_send_signal(loader.pidfd, signal.SIGKILL)
    loader.ended()
    loader.drop(box.digest)


def uncached(box: Box, fd: int) -> None:
    """Out of the page cache, so that it is asked for again."""
    for name in box.files:
        file = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


async def test_when_nobody_holds_the_device_readers_get_eio_and_never_zeros(box: Box) -> None:
    """Those that wait, and those that come later; what they had read stays right."""
    plan = await box.plan()
    fd = box.mount(plan)
    box.check(fd, ["f000"])
    box.server.delay = 30.0
    box.server.asked.clear()
    found: list[int | None] = []

    def read() -> None:
        try:
            box.read(fd, list(box.files)[-1])
        except OSError as error:
            found.append(error.errno)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert await asyncio.to_thread(box.server.asked.wait, 10)
    assert fuse.served(plan.devices[0]) is True
    die(box)
    await asyncio.to_thread(thread.join, 20)
    assert found == [errno.EIO]
    with pytest.raises(OSError, match="Input/output"):
        box.check(fd)
    box.check(fd, ["f000"])
    assert fuse.served(plan.devices[0]) is False  # by this the next Edge knows that who stands on it is broken
    fuse.forget(plan.devices[0])
    assert fuse.served(plan.devices[0]) is None


async def test_a_whole_layer_stays_behind_fuse_for_who_has_it_and_is_a_plain_file_for_the_next(box: Box) -> None:
    """Served to the end, also by a new worker; when the last mount goes the worker says so, and nothing is left of it."""
    plan = await box.plan()
    fd = box.mount(plan)
    loader = box.loaders[0]
    box.check(fd)
    await asyncio.to_thread(box.news, loader, "whole")
    box.settle()
    assert not os.path.exists(bitmap(plan.devices[0]))
    plain = open_layer(await box.plan())
    box.check(plain)
    os.close(plain)
    signal.pidfd_send_signal(loader.pidfd, signal.SIGKILL)
    loader.ended()
    loader.start()
    uncached(box, fd)
    box.check(fd)
    await asyncio.to_thread(box.news, loader, "whole")  # the new worker serves it
    assert fuse.served(plan.devices[0]) is True
    box.unmount()
    await asyncio.to_thread(box.news, loader, "unused")
    for _ in range(200):
        if fuse.served(plan.devices[0]) is None:
            break
        await asyncio.sleep(0.05)
    assert not os.path.exists(fuse.beside(plan.devices[0]))
    await box.node.store.verify(box.digest)


async def test_a_blob_that_was_cut_short_gives_eio_and_no_zeros(box: Box) -> None:
    """The kernel would take a short answer for the end of the file, and show zeros from there on."""
    plan = await box.plan()
    fd = box.mount(plan)
    box.check(fd)
    await asyncio.to_thread(box.news, box.loaders[0], "whole")
    uncached(box, fd)
    os.truncate(plan.devices[0], 100_000)
    last = list(box.files)[-1]
    with pytest.raises(OSError, match="Input/output"):
        box.check(fd, [last])


@pytest.mark.needs("erofs_loop")
async def test_kernels_without_file_backed_mounts_go_through_a_loop_device(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 6.12: the same bytes, each chunk fetched once, and no loop device left."""
    monkeypatch.setenv("DSEC_DISABLE", "fanotify,erofs_file")
    plan = await box.plan()
    assert plan.kind == "erofs_loop"
    assert plan.lazy is not None
    fd = box.mount(plan)
    with readers(4, lambda number: box.check(fd)) as problems:
        pass
    assert not problems
    chunks = box.server.chunks()
    assert len(chunks) == len(set(chunks))
    box.unmount()
    await asyncio.to_thread(box.news, box.loaders[0], "whole")
    box.settle()
    await asyncio.to_thread(box.news, box.loaders[0], "unused")


async def test_a_pull_completes_what_a_node_serves_through_fuse(box: Box) -> None:
    """`dsec layer fetch --whole` beside a node that runs: both see a whole layer, and who reads goes on."""
    plan = await box.plan()
    fd = box.mount(plan)
    box.check(fd, ["f000"])
    await box.node.pull(box.digest)
    assert not os.path.exists(bitmap(plan.devices[0]))
    await asyncio.to_thread(box.news, box.loaders[0], "whole")
    box.check(fd)
    await box.node.store.verify(box.digest)


def test_the_way_that_a_node_takes_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """fanotify, else FUSE, else whole; each with the reason against the better ones."""
    monkeypatch.setenv("DSEC_DISABLE", "fanotify")
    assert fetch.way_to_load() == ("fuse", "fanotify: disabled by DSEC_DISABLE")
    monkeypatch.setenv("DSEC_DISABLE", "fanotify,fuse")
    way, why = fetch.way_to_load()
    assert way == "whole"
    assert "fanotify: disabled" in why
    assert "FUSE is disabled" in why
    assert fetch.way_to_load(on_demand=False) == ("whole", "switched off in the configuration")
