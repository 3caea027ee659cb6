"""Many small files into a sandbox and out again, as directories."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from benchmarks import harness

ABOUT = "10,000 small files up and down as directories"
KEYS = ("files", "up_s", "down_s")
DEFAULTS = {"n": 10_000}


def make_tree(root: Path, count: int) -> None:
    """A hundred files a directory, 0 to 2 KB of random bytes each."""
    for number in range(count):
        folder = root / f"d{number // 100}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{number}").write_bytes(os.urandom(number % 2000))


async def run(options: Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="dsec-trees-", dir=options.cache if Path(options.cache).is_dir() else None) as folder:
        source, back = Path(folder, "source"), Path(folder, "back")
        await asyncio.to_thread(make_tree, source, options.n)
        size = 128 * harness.MIB
        async with (
            harness.session(options) as session,
            session.client.sandbox(session.image, memory=size, disk=size, inodes=options.n * 2) as sandbox,
        ):
            started = time.perf_counter()
            await sandbox.files.upload(source, "/root/tree")
            up = time.perf_counter() - started
            started = time.perf_counter()
            await sandbox.files.download("/root/tree", back)
            down = time.perf_counter() - started
            same = await asyncio.to_thread(subprocess.run, ["diff", "-r", str(source), str(back)], capture_output=True, check=False)
            if same.returncode:
                raise harness.WrongAnswer("the tree is not the same after its way")
            return {
                "files": options.n,
                "up_s": harness.rounded(up),
                "down_s": harness.rounded(down),
                "features": await harness.features(session, sandbox),
                "driver": session.driver,
            }
