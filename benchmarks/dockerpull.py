"""The same base as an image of a registry on loopback: seconds until Docker has pulled it and the workload has run on it.

A dockerd and a docker-registry of our own are started for it, and end with it. What goes before (importing the tree, pushing it) is not in
the figure. The registry answers without the delay that the layer store's server has, which is in Docker's favour.

    python -m benchmarks.dockerpull TREE        # the workload on standard input; one JSON object on standard output
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks import peers
from dsec import trees


async def seconds(tree: Path, workload: str, want: str) -> float:
    """Pull and run, on an engine that has nothing. Raises `peers.Absent` with the reason where it cannot be measured."""
    for program in ("dockerd", "docker", "docker-registry"):
        if shutil.which(program, path=peers.SEARCH) is None:
            raise peers.Absent(f"{program} is not installed")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.dockerpull", str(tree)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PATH": peers.SEARCH},
    )
    out, _ = await process.communicate(workload.encode())
    answer = json.loads(out or b'{"error": "its process ended"}')
    if "error" in answer:
        raise peers.Absent(answer["error"])
    if answer["said"] != want:
        raise RuntimeError(f"Docker's workload answered {answer['said']!r}")
    return float(answer["seconds"])


@asynccontextmanager
async def registry(place: Path) -> AsyncIterator[str]:
    """docker-registry on a free port; its host:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    storage = {"filesystem": {"rootdirectory": str(place / "registry")}}
    (place / "registry.json").write_text(
        json.dumps({"version": 0.1, "log": {"level": "error"}, "storage": storage, "http": {"addr": host}})
    )
    log = (place / "registry.log").open("wb")
    process = await asyncio.create_subprocess_exec("docker-registry", "serve", str(place / "registry.json"), stdout=log, stderr=log)
    log.close()
    try:
        for _ in range(200):
            try:
                await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{host}/v2/", timeout=2).close())
                break
            except OSError as error:
                if process.returncode is not None:
                    raise peers.Absent(f"docker-registry ended: {(place / 'registry.log').read_text()[-300:]}") from error
                await asyncio.sleep(0.1)
        yield host
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def measure(tree: Path, workload: str, place: Path) -> dict[str, object]:
    engine = peers.Docker(tree, place)
    docker = ("docker", "-H", engine.url)
    try:
        async with registry(place) as host:
            await engine.open()
            image = f"{host}/base:1"
            for words in (("tag", "peer:base", image), ("push", "-q", image), ("rmi", "peer:base", image)):
                await peers._output(*docker, *words)
            began = time.perf_counter()
            await peers._output(*docker, "pull", "-q", image)
            said = await peers._output(*docker, "run", "--rm", "--network", "none", image, "/bin/sh", "-c", workload)
            return {"seconds": time.perf_counter() - began, "said": said}
    except peers.Absent as error:
        return {"error": str(error)}
    finally:
        await engine.close()


def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="dsec-dockerpull-"))
    try:
        answer = asyncio.run(measure(Path(sys.argv[1]), sys.stdin.read(), place))
    finally:
        trees.clear(place)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
