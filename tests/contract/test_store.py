"""What every layer store owes, whether it keeps images or plain directories."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.errors import Conflict, InvalidRequest, NodeError, NotFound
from dsec.layers import erofs, importer, mounts
from dsec.layers.mounts import LayerMount
from dsec.layers.pins import Pins
from dsec.layers.store import LayerConfig, LayerInfo, LayerStore


@pytest.fixture(params=["image", "directory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LayerStore]:
    if request.param == "directory":
        monkeypatch.setenv("DSEC_DISABLE", ",".join(filter(None, [os.environ.get("DSEC_DISABLE", ""), "mkfs_erofs"])))
    elif not erofs.available():
        pytest.skip("mkfs.erofs is not installed")
    made = LayerStore(tmp_path / "store")
    yield made
    assert list((made.root / "tmp").iterdir()) == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = tmp_path / "source"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_text("content")
    (tree / "link").symlink_to("/sub/file")
    for path in (tree / "sub/file", tree / "link", tree / "sub", tree):
        os.utime(path, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
    return tree


def blob(store: LayerStore, digest: str) -> Path:
    (found,) = [path for path in (store.root / "blobs").glob(digest.replace(":", "-") + ".*") if path.suffix != ".json"]
    return found


def pin(store: LayerStore, digest: str) -> int:
    return mounts.pin_layer(LayerMount(kind="dir", source=str(blob(store, digest))))


async def test_an_imported_layer_is_found_by_name_digest_and_the_digests_beginning(store: LayerStore, source: Path) -> None:
    """All three mean the same content."""
    ref = await importer.import_dir(store, source, "w@1", config=LayerConfig(env={"A": "1"}, workdir="/sub", user="agent"))
    assert ref.name == "w@1"
    for name in ("w@1", ref.digest, ref.digest[:19]):
        assert (await store.resolve(name)).digest == ref.digest
    assert await store.config(ref.digest) == LayerConfig(env={"A": "1"}, workdir="/sub", user="agent")
    assert (await store.verify("w@1")).names == ("w@1",)


async def test_the_same_content_has_the_same_digest_wherever_it_comes_from(store: LayerStore, source: Path, tmp_path: Path) -> None:
    """A directory, a copy with its entries made in another order, and a tar; other content differs."""
    first = await importer.import_dir(store, source, "a", at="/w", owner=(0, 0) if os.geteuid() == 0 else None)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "link").symlink_to("/sub/file")
    (copy / "sub").mkdir()
    (copy / "sub/file").write_text("content")
    for path in (copy / "sub/file", copy / "link", copy / "sub", copy):
        os.utime(path, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
    second = await importer.import_dir(store, copy, "b", at="/w", owner=(0, 0) if os.geteuid() == 0 else None)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(source, ".")
    stream.seek(0)
    third = await importer.import_tar(store, stream, "c", at="/w", owner=(0, 0) if os.geteuid() == 0 else None)
    assert first.digest == second.digest == third.digest
    assert [info.names for info in await store.list()] == [("a", "b", "c")]
    (copy / "sub/file").write_text("other..")
    assert (await importer.import_dir(store, copy, "b", at="/w")).digest != first.digest


async def test_a_name_may_move_and_its_history_stays(store: LayerStore, source: Path) -> None:
    """tag, import over a name, untag."""
    old = await importer.import_dir(store, source, "w")
    await store.tag("kept:v1", "w")
    (source / "new").touch()
    new = await importer.import_dir(store, source, "w")
    assert (await store.resolve("w")).digest == new.digest
    assert (await store.resolve("kept:v1")).digest == old.digest
    assert [entry.digest for entry in await store.history("w")] == [old.digest, new.digest]
    await store.untag("w")
    with pytest.raises(NotFound):
        await store.resolve("w")


@pytest.mark.parametrize("name", ["absent", "sha256:" + "0" * 64, "sha256:" + "0" * 12])
async def test_unknown_layers_are_not_found_with_a_fix(store: LayerStore, source: Path, name: str) -> None:
    """The fix names what there is."""
    await importer.import_dir(store, source, "present")
    with pytest.raises(NotFound) as caught:
        await store.resolve(name)
    assert caught.value.field == "layer"
    assert "present" in caught.value.fix


@pytest.mark.parametrize("name", ["../x", "a\0b", "", "a b"])
async def test_impossible_names_are_refused_before_anything_is_made(store: LayerStore, source: Path, name: str) -> None:
    """By look-up and by import."""
    with pytest.raises(InvalidRequest):
        await store.resolve(name)
    with pytest.raises(InvalidRequest):
        await importer.import_dir(store, source, name)
    assert await store.list() == ()


async def test_wrong_sources_are_typed_errors(store: LayerStore, source: Path) -> None:
    """Absent, a file where a directory belongs, no tar, no repository."""
    with pytest.raises(NotFound):
        await importer.import_dir(store, source / "absent", "x")
    with pytest.raises(InvalidRequest):
        await importer.import_dir(store, source / "sub/file", "x")
    with pytest.raises(NotFound):
        await importer.import_tar(store, source / "absent", "x")
    with pytest.raises(InvalidRequest):
        await importer.import_tar(store, source / "sub/file", "x")
    with pytest.raises(NotFound):
        await importer.import_git(store, str(source), "main", "x")
    with pytest.raises(InvalidRequest):
        await importer.import_git(store, str(source), "--upload-pack=x", "x")
    with pytest.raises(InvalidRequest):
        await store.put_image(source / "sub/file", "x")
    assert await store.list() == ()


async def test_writers_of_one_layer_at_the_same_time_all_succeed(store: LayerStore, source: Path) -> None:
    """Eight imports through two stores of one directory leave one layer."""
    other = LayerStore(store.root)
    refs = await asyncio.gather(*(importer.import_dir(one, source, f"n{n}") for n, one in enumerate([store, other] * 4)))
    assert len({ref.digest for ref in refs}) == 1
    (info,) = await other.list()
    assert len(info.names) == 8
    await store.verify(info.digest)


async def test_altered_content_is_found_by_verify_and_made_again_by_import(store: LayerStore, source: Path) -> None:
    """One changed byte."""
    ref = await importer.import_dir(store, source, "w")
    target = blob(store, ref.digest)
    target = target if target.is_file() else target / "sub/file"
    os.chmod(target, 0o644)
    data = target.read_bytes()
    target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(NodeError):
        await store.verify("w")
    await store.remove("w")
    again = await importer.import_dir(store, source, "w")
    assert again.digest == ref.digest
    await store.verify("w")


async def test_a_missing_or_truncated_blob_is_found_without_hashing(store: LayerStore, source: Path) -> None:
    """And a new import of the same content mends a truncated one."""
    ref = await importer.import_dir(store, source, "w")
    target = blob(store, ref.digest)
    if target.is_file():
        os.truncate(target, 1500)
        for check in (store.check, store.mount_plan):
            with pytest.raises(NodeError):
                await check(ref.digest)
        await importer.import_dir(store, source, "w")
        await store.verify("w")
        target.unlink()
    else:
        target.rename(target.with_suffix(".gone"))
    with pytest.raises(NodeError):
        await store.check(ref.digest)


async def test_remove_takes_names_and_content_unless_in_use(store: LayerStore, source: Path) -> None:
    """A pin of any process and the caller's own list both protect."""
    ref = await importer.import_dir(store, source, "w")
    await store.tag("also", "w")
    held = pin(store, ref.digest)
    try:
        with pytest.raises(Conflict):
            await store.remove("w")
    finally:
        os.close(held)
    with pytest.raises(Conflict):
        await store.remove("w", pinned=[ref.digest])
    await store.remove("w")
    assert await store.list() == ()
    assert list((store.root / "blobs").iterdir()) == []
    with pytest.raises(NotFound):
        await store.remove("also")


async def test_gc_takes_only_what_nobody_names_or_uses(store: LayerStore, source: Path) -> None:
    """Named, pinned and abandoned layers, and what crashes left behind."""
    named = await importer.import_dir(store, source, "named")
    (source / "two").touch()
    used = await importer.import_dir(store, source, "used")
    (source / "three").touch()
    free = await importer.import_dir(store, source, "free")
    await store.untag("used")
    await store.untag("free")
    (store.root / "tmp/stage-dead").mkdir()
    (store.root / "tmp/stage-dead/image").write_bytes(b"half")
    (store.root / "blobs/sha256-orphan.erofs").write_bytes(b"no record")
    held = pin(store, used.digest)
    try:
        async with store.staging() as alive:
            removed = await store.gc()
            assert alive.exists()
    finally:
        os.close(held)
    assert removed.digests == (free.digest,)
    assert removed.in_use == (used.digest,)
    assert {info.digest for info in await store.list()} == {named.digest, used.digest}
    assert not (store.root / "blobs/sha256-orphan.erofs").exists()
    assert (await store.gc(pinned=[used.digest])).digests == ()
    assert (await store.gc()).digests == (used.digest,)


async def test_a_git_layer_depends_on_the_commit_only_and_keeps_no_trace_of_the_fetch(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    """Two imports at different times agree, git finds a clean tree, and no address is inside."""
    repository = tmp_path / "project.git"
    commands = (
        f"git init -q -b main {repository} && cp -a {source}/. {repository}/ && cd {repository} && echo '#!/bin/sh' > run && chmod +x run"
        " && git add . && git -c user.name=a -c user.email=a@b commit -q -m first && git tag v1"
        " && echo more > more && git add more && git -c user.name=a -c user.email=a@b commit -q -m second"
    )
    process = await asyncio.create_subprocess_shell(commands)
    assert await process.wait() == 0
    first = await importer.import_git(store, str(repository), "v1")
    assert first.name == "project@v1"
    commit = (await store.info("project@v1")).source.split()[-1]
    by_commit = await importer.import_git(store, str(repository), commit[:10], "short")
    assert by_commit.digest == first.digest
    assert (await store.config(first.digest)).workdir == "/workspace/project"
    second = await importer.import_git(store, str(repository), "main")
    assert second.digest != first.digest
    with pytest.raises(NotFound):
        await importer.import_git(store, str(repository), "nowhere", "x")
    kept = blob(store, first.digest)
    data = kept.read_bytes() if kept.is_file() else (kept / "workspace/project/.git/config").read_bytes()
    assert str(tmp_path).encode() not in data


async def test_a_cancelled_import_leaves_nothing(store: LayerStore, source: Path) -> None:
    """Cancelled at several moments."""
    for delay in (0.0, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02):
        task = asyncio.create_task(importer.import_dir(store, source, "w", at="/w"))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await store.gc()
    assert not list((store.root / "tmp").iterdir())
    for info in await store.list():
        await store.verify(info.digest)


async def test_a_record_written_by_hand_that_is_damaged_is_the_nodes_fault(store: LayerStore, source: Path) -> None:
    """Not a traceback."""
    ref = await importer.import_dir(store, source, "w")
    next((store.root / "blobs").glob("*.json")).write_text("{")
    with pytest.raises(NodeError):
        await store.info(ref.digest)


def test_records_hold_no_names() -> None:
    """Names live in the journal alone, so that a record never disagrees with it."""
    assert LayerInfo(digest="d", stored="erofs", size=1).names == ()


async def test_a_layer_that_a_create_has_named_stays(store: LayerStore, source: Path) -> None:
    """By its digest alone, before anything is mounted: gc leaves it to whoever holds it, each time once, and says when it has gone."""
    ref = await importer.import_dir(store, source, "w")
    await store.untag("w")
    pins = Pins(store)
    pins.take([ref.digest])
    pins.take([ref.digest], mounted=True)
    pins.give_back([ref.digest])
    assert (await store.gc()).in_use == (ref.digest,)
    with pytest.raises(Conflict):
        await store.remove(ref.digest)
    pins.give_back([ref.digest])
    pins.give_back([ref.digest])
    assert (await store.gc()).digests == (ref.digest,)
    with pytest.raises(NotFound):
        pins.take([ref.digest])
    pins.take([ref.digest], mounted=True)  # of a sandbox that runs: it is counted, and the next create still finds that it has gone
    with pytest.raises(NotFound):
        pins.take([ref.digest])
    pins.give_back([ref.digest])
    again = await importer.import_dir(store, source, "w")
    pins.take([again.digest])
    assert mounts.held(blob(store, again.digest))
    pins.give_back([again.digest])
    assert mounts.held(blob(store, again.digest)) is False


async def test_what_is_mounted_stays_held_until_its_mount_goes(store: LayerStore, source: Path) -> None:
    """The mount keeps the layer anyway, and the next create finds the descriptor; one that is needed goes with who needs it."""
    ref = await importer.import_dir(store, source, "w")
    pins = Pins(store)
    for _ in range(2):
        pins.take([ref.digest])
        pins.give_back([ref.digest], lambda _: True)
        assert mounts.held(blob(store, ref.digest))
    pins.unmounted(ref.digest)
    assert mounts.held(blob(store, ref.digest)) is False
    pins.unmounted(ref.digest)
    pins.take([ref.digest])
    pins.unmounted(ref.digest)
    assert mounts.held(blob(store, ref.digest))
    pins.give_back([ref.digest])
    assert mounts.held(blob(store, ref.digest)) is False
