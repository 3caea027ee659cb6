"""A small base layer, of this machine's busybox where it has one: it may have no archive to fetch one from."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore


async def busybox(store: LayerStore) -> None:
    """The layer "busybox"."""
    if (program := shutil.which("busybox")) is None:
        await bootstrap_tiny(store)
        return
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        for name in ("bin", "tmp", "proc", "sys", "dev", "etc", "root"):
            (tree / name).mkdir()
        shutil.copy2(program, tree / "bin/busybox")
        names = await asyncio.create_subprocess_exec(program, "--list", stdout=asyncio.subprocess.PIPE)
        for name in (await names.communicate())[0].decode().split():
            if name != "busybox":
                (tree / "bin" / name).symlink_to("busybox")
        (tree / "tmp").chmod(0o1777)
        await import_dir(store, tree, "busybox")
