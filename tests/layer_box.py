"""A layer with known bytes in a remote store, web servers for it that can fail and lie, and a node's loader without a node."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import http.server
import json
import mmap
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsec.layers import importer
from dsec.layers.fetch import NodeLayers, push
from dsec.layers.lazy import Kit, Loader, make_kit
from dsec.layers.manifest import CHUNK
from dsec.layers.mounts import LayerMount
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.trees import clear


def fill_tree(tree: Path, megabytes: int, seed: int = 7) -> dict[str, bytes]:
    """Files of random sizes that hold no zeros worth speaking of; what is in each."""
    random_ = random.Random(seed)
    tree.mkdir(parents=True)
    found: dict[str, bytes] = {}
    left = megabytes << 20
    while left > 0:
        size = min(left, random_.choice((3_000, 70_000, 900_000, 2_500_000)))
        name = f"f{len(found):03d}"
        found[name] = random_.randbytes(size)
        (tree / name).write_bytes(found[name])
        left -= size
    return found


class Server:
    """A directory over HTTP with ranges. ``gone``: it answers nothing; ``delay``: seconds before each answer; while ``held`` nobody is
    given data; ``lies(path, offset, data)`` may change what it says. ``log``: (path, offset, length) of all that was sent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gone = False
        self.delay = 0.0
        self.held = False
        self.lies: Callable[[str, int, bytes], bytes] | None = None
        self.log: list[tuple[str, int, int]] = []
        self.asked = threading.Event()  # a request for data has come
        self.lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if outer.gone:
                    self.close_connection = True
                    return
                if self.path.endswith("/data"):
                    outer.asked.set()
                    while outer.held:
                        time.sleep(0.01)
                time.sleep(outer.delay)
                path = outer.root / self.path.strip("/").replace("%3D", "=")
                if not path.is_file():
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                total = path.stat().st_size
                asked = self.headers.get("Range")
                first, _, last = asked.removeprefix("bytes=").partition("-") if asked else ("0", "", str(total - 1))
                start = int(first)
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read(int(last) + 1 - start)
                if self._left():
                    return
                row = (path.name, start, len(data))
                with outer.lock:
                    outer.log.append(row)
                if outer.lies is not None:
                    data = outer.lies(path.name, start, data)
                try:
                    self.send_response(206 if asked else 200)
                    if asked:
                        self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
                    self.send_header("Content-Length", str(len(data)))
                    self.send_header("Last-Modified", "Mon, 02 Jan 2023 00:00:00 GMT")
                    self.end_headers()
                    self.wfile.write(data)
                except ConnectionError:
                    with outer.lock:
                        outer.log.remove(row)
                    self.close_connection = True

            def _left(self) -> bool:
                """Whether the one who asked was killed, or did not wait so long."""
                if not select.select([self.connection], [], [], 0)[0]:
                    return False
                with contextlib.suppress(ConnectionError):
                    if self.connection.recv(1, socket.MSG_PEEK):
                        return False
                self.close_connection = True
                return True

            def log_message(self, *_: Any) -> None:
                return

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def chunks(self) -> list[int]:
        """The blob's chunks in the order in which they were sent, as often as they were."""
        with self.lock:
            rows = [(start, length) for name, start, length in self.log if name == "data"]
        return [number for start, length in rows for number in range(start // CHUNK, -(-(start + length) // CHUNK))]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Shared:
    """A layer ``base`` of known files in a remote store, which is a directory."""

    def __init__(self, place: Path, megabytes: int = 16) -> None:
        self.place = place
        self.files = fill_tree(place / "tree", megabytes)
        self.remote = RemoteStore(str(place / "remote"), make=True)
        self.digest = asyncio.run(self._push())

    async def _push(self) -> str:
        source = LayerStore(self.place / "source")
        await importer.import_dir(source, self.place / "tree", "base")
        return (await push(source, self.remote, "base")).digest

    def close(self) -> None:
        clear(self.place)


class Box:
    """That layer behind a server, and a node's store that has its metadata alone."""

    def __init__(self, place: Path, shared: Shared) -> None:
        self.place = place
        self.shared = shared
        self.files = shared.files
        self.digest = shared.digest
        self.loaders: list[Loader] = []
        self.kits: list[Kit] = []
        self.mounts: list[int] = []
        self.server = Server(shared.place / "remote")

    async def open(self) -> None:
        self.node = NodeLayers(LayerStore(self.place / "node"), RemoteStore(self.server.url, timeout=2.0))
        await self.node.ensure(["base"])

    async def plan(self) -> LayerMount:
        return await self.node.mount_plan(self.digest)

    def mount(self, plan: LayerMount, loader: Loader | None = None) -> int:
        """Mark, serve, mount: what a holder does."""
        assert plan.lazy is not None
        loader = loader or Loader()
        self.loaders.append(loader)
        kit = make_kit(plan)
        self.kits.append(kit)
        loader.add(kit)
        fd = kit.open(plan)
        loader.mounted(plan.lazy.name, fd)
        self.mounts.append(fd)
        return fd

    def settle(self, number: int = 0) -> None:
        """What a holder does when a layer is whole: the mark goes, or nothing more is mounted through FUSE."""
        if self.kits[number].by_fuse:
            self.kits[number].settle()
        else:
            self.loaders[number].drop(self.digest)

    def unmount(self) -> None:
        for fd in self.mounts:
            os.close(fd)
        self.mounts.clear()

    def read(self, fd: int, name: str) -> bytes:
        with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
            return file.read()

    def in_memory(self, fd: int, name: str) -> bool:
        """Whether a read of the file would find all of it in the page cache."""
        with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as memory:
                pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
                start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
        return all(page & 1 for page in pages)

    def check(self, fd: int, names: list[str] | None = None) -> None:
        """Every byte is the source's."""
        for name in names or list(self.files):
            assert hashlib.sha256(self.read(fd, name)).digest() == hashlib.sha256(self.files[name]).digest(), name

    def news(self, loader: Loader, what: str, seconds: float = 60.0) -> dict[str, Any]:
        """The worker's next message of a kind."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if loader.sock is not None and select.select([loader.sock], [], [], 0.1)[0]:
                said = loader.read()
                if said and said["what"] == what:
                    return said
        raise AssertionError(f"the loader did not say {what}")

    def close(self) -> None:
        for loader in self.loaders:
            if loader.pidfd >= 0:
                signal.pidfd_send_signal(loader.pidfd, signal.SIGKILL)
                loader.ended()
            for name in list(loader.kits):
                loader.drop(name)
        for fd in self.mounts:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.server.close()
        clear(self.place)


def touched(path: Path) -> list[int]:
    found: list[int] = json.loads(path.read_text())
    return found


@contextlib.contextmanager
def readers(count: int, work: Callable[[int], None]) -> Iterator[list[BaseException]]:
    """So many threads that read at once; what went wrong in them is in the list when the block ends."""
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except (OSError, AssertionError) as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    yield problems
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a reader hangs"
