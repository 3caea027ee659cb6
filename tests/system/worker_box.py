"""Workers on real containers: a cluster whose node has a base with Python and the client's layer, and what runs inside."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgpack
import msgspec
import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.client import bootstrap_client
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from dsec.trees import clear
from libdsec import Client
from tests.fixtures_backend import build_small_base, libraries_of

WORKER: libdsec.Options = {
    "toolkits": ["libdsec"], "worker": True, "memory": "160MiB", "disk": "64MiB", "cpus": 1, "pids": 128,
}  # fmt: skip
CHILD: libdsec.Options = {"memory": "48MiB", "disk": "16MiB", "cpus": 0.5, "pids": 32}
PYTHON = ("python3", "-c")
HEAD = "import asyncio, json, os, sys, libdsec\nCHILD = dict(memory='48MiB', disk='16MiB', cpus=0.5, pids=32)\n"


def build_base(root: Path) -> None:
    """The small base, with what the client's compiled modules need of libc."""
    build_small_base(root)
    for module in (msgspec, msgpack):
        for extension in Path(module.__file__).parent.glob("*.so"):
            for library in libraries_of(str(extension)):
                target = root / library.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(library).resolve(), target)


@pytest.fixture(scope="module", params=["native", pytest.param("crun", marks=pytest.mark.slow)])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(driver: str) -> AsyncIterator[Cluster]:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        await asyncio.to_thread(build_base, place / "base")
        overrides = {"edge": {"sweep_ms": 200}, "container": {"driver": driver}}
        cluster = Cluster(place / "up", edges=(f"t{secrets.token_hex(4)}",), overrides=overrides)
        store = LayerStore(cluster.layer_store)
        await import_dir(store, place / "base", "small")
        await bootstrap_client(store)
        async with cluster:
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with libdsec.connect(cluster.url) as client:
        yield client
        await settled(client, 0)


async def settled(client: Client, count: int, timeout: float = 20.0) -> None:
    """Until so many sandboxes are left: what ends with a worker does so a moment after it."""
    end = time.monotonic() + timeout
    while len(left := await client.list()) != count:
        assert time.monotonic() < end, left
        await asyncio.sleep(0.1)


async def until(what: Callable[[], Awaitable[object]], timeout: float = 60.0) -> None:
    """Until it is true."""
    end = time.monotonic() + timeout
    while not await what():
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


async def inside(worker: libdsec.Sandbox, body: str, *, timeout: float = 60.0) -> str:
    """What a program prints that is run in the worker; ``body`` is that of an async function with ``dsec`` connected."""
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    program = f"{HEAD}async def main():\n    async with libdsec.connect() as dsec:\n{lines}asyncio.run(main())\n"
    result = await worker.exec([*PYTHON, program], timeout=timeout)
    assert result.ok, result.stderr.text[-3000:]
    return result.stdout.text


RAW = r"""
import os, socket, sys, time
ME = os.environ["DSEC_PRINCIPAL"].encode()
def connect():
    made = socket.create_connection(("127.0.0.1", 4222), timeout=20)
    made.sendall(b'CONNECT {"verbose":false,"headers":true,"user":"local","pass":"x"}\r\n')
    return made
def everything(of):
    found = b""
    try:
        while data := of.recv(65536):
            found += data
    except OSError:
        pass
    return found
sock = connect()
def say(data):
    sock.sendall(data)
def hear(until):
    found = b""
    while until not in found and (data := sock.recv(65536)):
        found += data
    return found.decode()
"""


async def raw(worker: libdsec.Sandbox, body: str, *, timeout: float = 90.0) -> str:
    """What a program prints that speaks NATS's protocol by itself, over ``sock`` and what else ``connect()`` makes."""
    result = await worker.exec([*PYTHON, RAW + body], timeout=timeout)
    assert result.ok, result.stderr.text[-3000:]
    return result.stdout.text
