"""Layers filled while they are read: no reader ever gets a wrong byte, whoever dies and whatever the store says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dsec import doctor
from dsec.layers import fetch, manifest
from dsec.layers.fetch import NodeLayers
from dsec.layers.lazy import Kit, Loader
from dsec.layers.manifest import CHUNK
from dsec.layers.mounts import bitmap, open_layer
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from tests.layer_box import Box, Shared, readers

pytestmark = [pytest.mark.needs("erofs_file"), pytest.mark.timeout(90)]


@pytest.fixture(params=["fanotify", "fuse"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What holds readers back: a mark on the blob, or, as on older kernels, a FUSE file in its place."""
    chosen = str(request.param)
    if sentence := doctor.reason(chosen):
        pytest.skip(sentence)
    if chosen == "fuse":
        monkeypatch.setenv("DSEC_DISABLE", "fanotify")
    return chosen


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("shared"))
    yield made
    made.close()


@pytest.fixture
async def box(tmp_path: Path, shared: Shared, way: str) -> AsyncIterator[Box]:
    made = Box(tmp_path / "box", shared)
    await made.open()
    yield made
    made.close()


async def test_every_byte_is_right_and_only_what_is_read_is_fetched(box: Box) -> None:
    """One small file costs few chunks; in the end all is the source's, each chunk came once, and the layer is whole without its mark."""
    plan = await box.plan()
    fd = box.mount(plan)
    one = "f003"
    assert box.read(fd, one) == box.files[one]
    assert len(box.server.chunks()) <= len(box.files[one]) // CHUNK + 2
    box.check(fd)
    chunks = box.server.chunks()
    assert len(chunks) == len(set(chunks))
    box.news(box.loaders[0], "whole")
    assert not os.path.exists(bitmap(plan.devices[0]))
    box.settle()
    os.close(open_layer(plan))  # a mount needs no mark any more
    await box.node.store.verify(box.digest)


async def test_without_a_mark_holes_would_read_as_zeros_so_such_a_mount_is_refused(box: Box) -> None:
    """The hazard is real: the same blob, mounted past the guard without its mark, gives zeros where the source has none."""
    plan = await box.plan()
    with pytest.raises(OSError, match="partly filled") as caught:
        open_layer(plan)
    assert caught.value.errno == errno.EIO
    fd = open_layer(plan, marked=True)  # a lie
    box.mounts.append(fd)
    assert box.read(fd, "f000") == bytes(len(box.files["f000"])) != box.files["f000"]


@pytest.mark.parametrize("hand", ["hand", "no hand"])
async def test_fifty_readers_of_a_cold_layer_fetch_each_chunk_once(box: Box, hand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All read everything at once, from a slow store, and nobody sees another byte than the source's; with and without the C library."""
    if hand == "no hand":
        monkeypatch.setenv("DSEC_DISABLE", ",".join(filter(None, (os.environ.get("DSEC_DISABLE"), "hand"))))
    box.server.delay = 0.01
    fd = box.mount(await box.plan())
    names = list(box.files)
    with readers(50, lambda number: box.check(fd, names[number % 25 :] + names[: number % 25])) as problems:
        pass
    assert not problems
    chunks = box.server.chunks()
    assert len(chunks) == len(set(chunks))


async def test_a_worker_killed_in_the_middle_of_events_leaves_no_reader_hanging_or_wrong(box: Box) -> None:
    """kill -9 again and again while many read: successors answer what was taken, and all bytes are right."""
    box.server.held = True  # nobody is answered, so whoever reads waits
    fd = box.mount(await box.plan())
    loader = box.loaders[0]
    with readers(8, lambda number: box.check(fd, list(box.files)[number::8])) as problems:
        for _ in range(2):
            assert await asyncio.to_thread(box.server.asked.wait, 30)
            signal.pidfd_send_signal(loader.pidfd, signal.SIGKILL)
            loader.ended()
            box.server.asked.clear()
            loader.start()
        assert await asyncio.to_thread(box.server.asked.wait, 30)  # for what the first one had taken
        box.server.held = False
        assert (await asyncio.to_thread(box.news, loader, "recovered"))["events"] > 0
    assert not problems
    assert loader.deaths == 2


async def test_a_new_holders_worker_takes_over_from_one_that_outlived_its_holder(box: Box) -> None:
    """The Edge's copy of the kit serves the next holder; the old worker ends, and readers notice nothing."""
    box.server.delay = 0.05
    plan = await box.plan()
    fd = box.mount(plan)
    old = box.loaders[0]
    with readers(8, lambda number: box.check(fd, list(box.files)[number::4])) as problems:
        await asyncio.sleep(0.5)
        copies = tuple(os.dup(part) for part in box.kits[0].fds)
        assert old.sock is not None
        old.sock.close()  # the holder is gone
        old.sock = None
        new = Loader()
        box.loaders.append(new)
        new.add(Kit(box.kits[0].spec, copies))
        await asyncio.to_thread(old.ended)
        # As a holder does: when the layer is whole, by the old worker or the new one, all let go of its mark.
        with contextlib.suppress(AssertionError):
            await asyncio.to_thread(box.news, new, "whole", 1.0)
            if not new.kits[box.digest].by_fuse:
                new.drop(box.digest)
                old.drop(box.digest)
    assert not problems
    box.check(fd)


async def test_a_worker_alone_in_the_world_completes_its_layer_and_ends(box: Box) -> None:
    """Holder and Edge are gone: readers still get the source's bytes, and what remains is a whole layer."""
    plan = await box.plan()
    fd = box.mount(plan)
    loader = box.loaders[0]
    box.read(fd, "f000")  # the worker has the kit
    box.kits[0].close()
    loader.kits.clear()
    assert loader.sock is not None
    loader.sock.close()
    loader.sock = None
    with readers(4, lambda number: box.check(fd)) as problems:
        pass
    assert not problems
    box.unmount()  # what is mounted through FUSE is served as long as it is mounted
    loader.ended()
    assert not os.path.exists(bitmap(plan.devices[0]))
    await box.node.store.verify(box.digest)


async def test_an_unreachable_store_means_eio_and_news_and_then_recovery_without_restart(box: Box) -> None:
    """Readers wait as long as they are told to, get EIO and no byte, and succeed when the store is back."""
    box.node.patience = 0.5
    fd = box.mount(await box.plan())
    assert box.read(fd, "f001") == box.files["f001"]
    box.server.gone = True
    with pytest.raises(OSError, match="Input/output") as caught:
        box.check(fd)
    assert caught.value.errno == errno.EIO
    assert "cannot be reached" in box.news(box.loaders[0], "trouble")["text"]
    assert box.read(fd, "f001") == box.files["f001"]
    box.server.gone = False
    box.check(fd)


async def test_a_store_that_is_not_there_when_the_worker_begins_is_found_later(box: Box, tmp_path: Path) -> None:
    """A directory that is not mounted yet: EIO and news; when it is there all bytes are right, without a restart."""
    place, away = box.shared.place / "remote", box.shared.place / "away"
    box.node = NodeLayers(LayerStore(tmp_path / "other"), RemoteStore(str(place)), patience=0.5)
    await box.node.ensure(["base"])
    plan = await box.plan()
    os.rename(place, away)
    try:
        fd = box.mount(plan)
        with pytest.raises(OSError, match="Input/output"):
            box.read(fd, "f001")
        assert "cannot be served" in (await asyncio.to_thread(box.news, box.loaders[0], "trouble"))["text"]
    finally:
        os.rename(away, place)

    def readable() -> bool:
        with contextlib.suppress(OSError):
            return box.read(fd, "f001") == box.files["f001"]
        return False

    await until(readable)
    box.check(fd)


@pytest.mark.parametrize("how", ["altered", "short"])
async def test_a_lying_store_is_found_at_the_chunk_and_believed_when_it_is_honest(box: Box, how: str) -> None:
    """One flipped bit or one missing byte in one chunk: EIO for its readers, the rest is right, and the truth is taken later."""
    wrong = 5

    def lie(name: str, offset: int, data: bytes) -> bytes:
        at = wrong * CHUNK - offset
        if name != "data" or not 0 <= at < len(data):
            return data
        return data[: at + 99] + bytes([data[at + 99] ^ 1]) + data[at + 100 :] if how == "altered" else data[: at + 100]

    box.node.patience = 0.3
    box.server.lies = lie
    fd = box.mount(await box.plan())
    failed = 0
    for name in box.files:
        try:
            box.check(fd, [name])
        except OSError as error:
            failed += error.errno == errno.EIO
    assert 1 <= failed <= 3 if how == "altered" else failed
    box.news(box.loaders[0], "trouble")
    box.server.lies = None
    box.check(fd)


async def test_what_was_filled_is_not_fetched_again_after_a_crash(box: Box) -> None:
    """The bitmap that was written after the data tells the next worker what is there."""
    plan = await box.plan()
    fd = box.mount(plan)
    loader = box.loaders[0]
    names = list(box.files)
    box.check(fd, names[: len(names) // 2])
    before = box.server.chunks()
    assert before
    await until(lambda: set(before) <= durable(plan.devices[0], before))
    signal.pidfd_send_signal(loader.pidfd, signal.SIGKILL)
    loader.ended()
    loader.start()
    box.check(fd)
    chunks = box.server.chunks()
    assert [chunks.count(number) for number in before] == [1] * len(before)


async def until(true: Callable[[], bool]) -> None:
    while True:
        if await asyncio.to_thread(true):
            return
        await asyncio.sleep(0.05)


def durable(data: str, all_: list[int]) -> set[int]:
    """The chunks that the bitmap says are there; all when it is gone."""
    try:
        bits = Path(bitmap(data)).read_bytes()
    except FileNotFoundError:
        return set(all_)
    return {number for number in range(8 * len(bits)) if bits[number // 8] >> number % 8 & 1}


@pytest.mark.parametrize("way", ["fanotify"], indirect=True)
async def test_the_order_of_first_reads_is_recorded_and_fetched_ahead_elsewhere(box: Box, tmp_path: Path) -> None:
    """A second node has the chunks of the first one's run before anybody asks for them, and their files in memory."""
    fd = box.mount(await box.plan())
    box.check(fd, ["f004", "f002"])
    await until(box.node.store.side(box.digest, ".touched").exists)  # it is written now and then
    assert await fetch.push_touched(box.node.store, box.shared.remote, box.digest) > 0
    first = set(box.server.chunks())
    box.server.log.clear()
    other = NodeLayers(LayerStore(tmp_path / "other"), box.node.remote)
    await other.ensure(["base"])
    plan = await other.mount_plan(box.digest)
    assert plan.lazy is not None
    assert set(plan.lazy.ahead) <= first
    fd = box.mount(plan)
    wanted = set(plan.lazy.ahead)
    await until(lambda: wanted <= set(box.server.chunks()))
    await until(lambda: box.in_memory(fd, "f002") and box.in_memory(fd, "f004"))
    assert not box.in_memory(fd, "f006")
    box.check(fd, ["f002", "f004"])
    assert len(box.server.chunks()) == len(set(box.server.chunks()))


@pytest.mark.parametrize("way", ["fanotify"], indirect=True)
async def test_a_prefetch_list_of_any_length_or_a_spoilt_one_harms_nobody(box: Box) -> None:
    """One that a store altered, an earlier version wrote or a power cut left: all is read as without it."""
    path = box.node.store.side(box.digest, ".ahead")
    count = len(manifest.load(box.node.store.side(box.digest, ".manifest"), box.digest).chunks)
    path.write_bytes(b"[1, 2")
    plan = await box.plan()
    assert plan.lazy is not None
    assert not plan.lazy.ahead
    path.write_text(json.dumps([-1, 3, 3, *range(200_000)]))
    fd = box.mount(await box.plan())
    await until(lambda: set(box.server.chunks()) == set(range(count)))
    box.check(fd)
    assert box.loaders[0].deaths == 0


@pytest.mark.parametrize("way", ["fanotify"], indirect=True)
async def test_a_layer_that_goes_while_its_list_is_replayed_stays_nowhere(box: Box) -> None:
    """The store is silent, and the layer is dropped: its file system ends soon, and the loader has no descriptor of it."""
    path = box.node.store.side(box.digest, ".ahead")
    path.write_text(json.dumps([*range(40)]))
    box.server.held = True
    box.mount(await box.plan())
    [loader] = box.loaders
    descriptors = Path(f"/proc/{loader.pid}/fd")

    def mounted() -> int:
        return sum(one.is_dir() for one in descriptors.iterdir() if one.exists() and str(one.readlink()) == "/")

    def held() -> int:
        with contextlib.suppress(FileNotFoundError):
            return mounted()
        return -1

    assert await asyncio.to_thread(box.server.asked.wait, 30)
    await until(lambda: held() > 0)
    loader.drop(box.digest)
    await until(lambda: held() == 0)
    box.server.held = False


@pytest.mark.parametrize("way", ["fanotify"], indirect=True)
async def test_a_loader_keeps_no_descriptor_of_a_layer_that_is_gone(box: Box) -> None:
    """However many it serves, one after the other: journals, connections and mounts go with their layer."""
    plan = await box.plan()
    loader = Loader()
    box.server.delay = 0.0
    counts: list[int] = []

    def links() -> list[str]:
        found = []
        for each in Path(f"/proc/{loader.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(each.readlink()))
        return found

    for number in range(9):
        fd = box.mount(plan, loader)
        box.check(fd, [f"f{number:03d}"])
        box.unmount()
        loader.drop(box.digest)
        await until(lambda: not any("fanotify" in link or "journal" in link for link in links()))
        counts.append(len(links()))
    assert max(counts[-3:]) <= max(counts[:3]) + 4, counts  # a connection may still be in use, of which a reader did not wait for the end


@pytest.mark.parametrize("lacking", ["fanotify,fuse", "fanotify,fuse,erofs_file", "fanotify,erofs_file,erofs_loop"])
@pytest.mark.parametrize("way", ["fuse"], indirect=True)
async def test_without_fanotify_and_fuse_the_whole_layer_is_fetched_first(box: Box, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can hold a reader back, or EROFS is not there at all, the same bytes come another way."""
    monkeypatch.setenv("DSEC_DISABLE", lacking)
    plan = await box.plan()
    assert plan.lazy is None
    fd = open_layer(plan)
    box.mounts.append(fd)
    box.check(fd)


@pytest.mark.parametrize("way", ["fanotify"], indirect=True)
async def test_the_cache_evicts_the_oldest_layer_that_nothing_uses(box: Box) -> None:
    """A layer that is mounted stays whatever the limit says; one that is not makes room."""
    plan = await box.plan()
    fd = box.mount(plan)
    box.check(fd)
    from dsec.layers.mounts import pin_layer

    box.node.cache = 1 << 20
    pin = pin_layer(plan)
    assert await box.node.evict() == ()
    os.close(pin)
    assert await box.node.evict() == (box.digest,)
    assert not Path(plan.source).exists()
    assert not Path(plan.devices[0]).exists()


@pytest.mark.parametrize("way", ["fanotify"], indirect=True)
async def test_whoever_reads_the_blob_itself_is_served_too(box: Box) -> None:
    """A copy of a partly filled blob, made by another process while it is marked, is whole."""
    plan = await box.plan()
    box.mount(plan)
    ended = threading.Event()
    found: list[bytes] = []

    def copy() -> None:
        found.append(Path(plan.devices[0]).read_bytes())
        ended.set()

    threading.Thread(target=copy, daemon=True).start()
    assert ended.wait(30)
    hexname = box.digest.removeprefix("sha256:")
    assert found[0] == (box.shared.place / "remote/layers" / hexname / "data").read_bytes()


async def test_two_daemons_on_one_store_fill_a_layer_together(box: Box) -> None:
    """Each guards and serves the same blob; readers of both mounts get the source's bytes, also when one daemon dies. (Behind FUSE its own
    readers get EIO.)"""
    plan = await box.plan()
    first, second = box.mount(plan), box.mount(plan)
    box.server.delay = 0.02
    with readers(8, lambda number: box.check((first, second)[number % 2], list(box.files)[number::4])) as problems:
        await asyncio.to_thread(box.server.asked.wait, 10)
        signal.pidfd_send_signal(box.loaders[1].pidfd, signal.SIGKILL)
        box.loaders[1].ended()
        box.loaders[1].drop(box.digest)
    if box.kits[0].by_fuse:
        assert all(isinstance(problem, OSError) and problem.errno == errno.EIO for problem in problems)
    else:
        assert not problems
        box.check(second)
    box.check(first)


async def test_two_daemons_that_both_live_do_not_wait_for_each_other(box: Box) -> None:
    """The second marks and serves a blob that the first has marked already: both complete, with the source's bytes for all readers."""
    plan = await box.plan()
    mounts = box.mount(plan), box.mount(plan)
    with readers(8, lambda number: box.check(mounts[number % 2], list(box.files)[number::4])) as problems:
        pass
    assert not problems
    for fd in mounts:
        box.check(fd)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 40 MB."""
    place, image = tmp_path / "small", tmp_path / "image"
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image), "40m"], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill_disk(ballast: Path, leave: int) -> None:
    with open(ballast, "wb") as file:
        while os.statvfs(ballast.parent).f_bavail * 4096 > leave:
            file.write(bytes(1 << 20))
            file.flush()


async def test_a_full_disk_is_an_error_and_no_wrong_byte(small_disk: Path, shared: Shared) -> None:
    """While the blob's disk is full readers get an error; with room again they get the source's bytes."""
    box = Box(small_disk / "box", shared)
    try:
        await box.open()
        fill_disk(small_disk / "ballast", 6 << 20)
        fd = box.mount(await box.plan())
        failed = 0
        for name in box.files:
            try:
                box.check(fd, [name])
            except OSError as error:
                failed += error.errno in (errno.ENOSPC, errno.EIO)
        assert failed
        (small_disk / "ballast").unlink()
        box.check(fd)
    finally:
        box.close()
