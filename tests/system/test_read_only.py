"""A node whose disk becomes read-only: what cannot be kept is refused by the disk's name and leaves nothing; what runs goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.errors import DsecError, NodeError
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from dsec.trees import clear
from tests.fixtures_backend import build_small_base

pytestmark = [pytest.mark.needs("root", "cgroup", "guest"), pytest.mark.timeout(180)]
SMALL: libdsec.Options = {"memory": "64MiB", "disk": "16MiB", "cpus": 0.5, "pids": 32}
ULID = "?" * 26  # names of sandboxes' groups; others are made ahead


class Disk:
    """An ext4 of its own, that finds a fault in itself when it is told to and takes nothing from then on."""

    def __init__(self, image: Path, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)
        with image.open("wb") as file:
            file.truncate(128 << 20)
        self._run("mkfs.ext4", "-q", str(image))
        self._run("mount", "-o", "loop,errors=remount-ro", str(image), str(place))
        self.device = os.path.basename(self._run("findmnt", "-no", "SOURCE", str(place)).strip())

    @staticmethod
    def _run(*argv: str) -> str:
        return subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout

    def breaks(self) -> None:
        Path("/sys/fs/ext4", self.device, "trigger_fs_error").write_text("1")
        with pytest.raises(OSError, match="Read-only"):
            (self.place / "probe").touch()

    def close(self) -> None:
        self._run("umount", "--lazy", str(self.place))


def holders(place: Path) -> list[int]:
    """Processes that an Edge below ``place`` has left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            if b"dsec.backends.holder" in words and str(place).encode() in words:
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    yield folder
    clear(folder)


async def test_a_node_goes_on_as_far_as_it_can(place: Path) -> None:
    """A read-only layer store takes no layer and gives all; without its records a node takes no sandbox, and loses none of its own."""
    edge = f"t{secrets.token_hex(4)}"
    layers, records = Disk(place / "layers.img", place / "up/layers"), Disk(place / "records.img", place / "up/edges")
    try:
        await asyncio.to_thread(build_small_base, place / "base")
        cluster = Cluster(place / "up", edges=(edge,))
        await import_dir(LayerStore(cluster.layer_store), place / "base", "small")
        async with cluster, libdsec.connect(cluster.url) as client:
            sandbox = await client.create("small", **SMALL)
            layers.breaks()
            async with client.sandbox("small", **SMALL) as other:
                assert (await other.exec("echo here")).stdout.text == "here\n"
                with pytest.raises(NodeError, match=f"Read-only.*{layers.place}"):
                    await other.checkpoint()
            records.breaks()
            with pytest.raises(DsecError, match=f"not written in {records.place}/{edge}"):
                await client.create("small", timeout=2, **SMALL)
            with pytest.raises(NodeError, match=f"not written in {records.place}/{edge}"):
                await sandbox.exec("echo once", step="one")
            await sandbox.pause()
            await sandbox.files.write("/root/note", b"here")
            assert (await sandbox.exec("cat /root/note")).stdout.text == "here"
            assert [info.id for info in await client.list()] == [sandbox.id]
            assert {path.name for path in Path("/sys/fs/cgroup").glob(f"*/dsec/{edge}/{ULID}/")} == {sandbox.id.rpartition("-")[2]}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox.stop(), 1)  # its end is not on disk
            assert "Read-only" in (stuck := (await sandbox.info()).stuck) or "not on disk" in stuck
            child = cluster.edges[edge]
            await child.kill()
            with pytest.raises(NodeError, match=f"Read-only.*{records.place}/{edge}"):
                await child.start()
    finally:
        for disk in (layers, records):
            disk.close()
        for pid in holders(place):  # of an Edge that was killed, as are its groups
            os.kill(pid, signal.SIGKILL)
        for group in Path("/sys/fs/cgroup").glob(f"*/dsec/{edge}"):
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
