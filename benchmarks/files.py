"""One large file into a sandbox and out again. The client is a process of its own, so that its memory is its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import libdsec
from benchmarks import harness

ABOUT = "a 2 GiB file up and down; the client's peak memory"
KEYS = ("mib_s_up", "mib_s_down", "client_rss_mib")
DEFAULTS = {"mib": 2048}
REMOTE = "/root/large"


def make_file(path: Path, size: int) -> str:
    """Random bytes, made anew for this run; returns their sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(size // harness.MIB):
            block = os.urandom(harness.MIB)
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def child(url: str, sandbox_id: str, source: str, back: str) -> dict[str, float]:
    """Runs in the client's process: upload, download, and what it took."""
    async with libdsec.connect(url) as client:
        sandbox = await client.attach(sandbox_id)
        started = time.perf_counter()
        await sandbox.files.upload(source, REMOTE)
        up = time.perf_counter() - started
        started = time.perf_counter()
        await sandbox.files.download(REMOTE, back)
        down = time.perf_counter() - started
    return {"up": up, "down": down, "rss": harness.peak_rss()}


async def run(options: Namespace) -> dict[str, object]:
    size = options.mib * harness.MIB
    with tempfile.TemporaryDirectory(prefix="dsec-files-", dir=options.cache if Path(options.cache).is_dir() else None) as folder:
        source, back = Path(folder, "source"), Path(folder, "back")
        digest = await asyncio.to_thread(make_file, source, size)
        async with (
            harness.session(options) as session,
            session.client.sandbox(session.image, memory=512 * harness.MIB, disk=size + 256 * harness.MIB) as sandbox,
        ):
            arguments = ("-m", "benchmarks.files", session.cluster.url, str(sandbox.id), str(source), str(back))
            process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
            output, _ = await process.communicate()
            if process.returncode:
                raise RuntimeError(f"the client ended with {process.returncode}")
            times = json.loads(output.decode().splitlines()[-1])
            inside = (await sandbox.exec(["sha256sum", REMOTE], timeout=300)).stdout.text.split()[:1]
            if inside != [digest] or await asyncio.to_thread(hash_file, back) != digest:
                raise harness.WrongAnswer("the file is not the same after its way")
            return {
                "mib_s_up": harness.rounded(options.mib / times["up"], 1),
                "mib_s_down": harness.rounded(options.mib / times["down"], 1),
                "client_rss_mib": harness.rounded(times["rss"] / harness.MIB, 1),
                "mib": options.mib,
                "features": await harness.features(session, sandbox),
                "driver": session.driver,
            }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(child(*sys.argv[1:5]))))
