"""A directory over HTTP with ranges and a given delay, in a process of its own; `/stats` says how much went out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import socketserver
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_RANGE = re.compile(r"^range: *bytes=(\d+)-(\d*)", re.IGNORECASE | re.MULTILINE)


class Server:
    """A running server: ``url``, and what it sent since `reset`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _ask(self, path: str) -> dict[str, int]:
        with urllib.request.urlopen(self.url + path) as answer:
            found: dict[str, int] = json.loads(answer.read())
        return found

    async def stats(self) -> dict[str, int]:
        """``bytes`` and ``requests`` of blobs, ``other`` bytes of everything else."""
        return await asyncio.to_thread(self._ask, "/stats")

    async def reset(self) -> None:
        await asyncio.to_thread(self._ask, "/reset")


@asynccontextmanager
async def serving(root: Path, delay_ms: float) -> AsyncIterator[Server]:
    arguments = (sys.executable, "-m", "benchmarks.rangeserver", str(root), str(delay_ms))
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield Server((await process.stdout.readline()).decode().strip())
    finally:
        process.kill()
        await process.wait()


def serve(root: Path, delay: float) -> None:
    """Little is done for a request and nothing copied: a store is another machine, which takes no time of this one's two cores."""
    sent = {"bytes": 0, "requests": 0, "other": 0}
    files: dict[str, int] = {}
    lock = threading.Lock()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pending = b""
            with contextlib.suppress(ConnectionError):
                while True:
                    while b"\r\n\r\n" not in pending:
                        if not (more := self.request.recv(65536)):
                            return
                        pending += more
                    head, _, pending = pending.partition(b"\r\n\r\n")
                    self.answer(head.decode("latin-1"))

        def answer(self, head: str) -> None:
            name = head.split(" ", 2)[1]
            if name in ("/stats", "/reset"):
                with lock:
                    body = json.dumps(sent).encode()
                    if name == "/reset":
                        sent.update(dict.fromkeys(sent, 0))
                self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                return
            time.sleep(delay)
            path = root / name.strip("/").replace("%3D", "=")
            try:
                with lock:
                    fd = files[name] if name in files else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if path.name == "data":  # the rest may change between two rounds
                        files[name] = fd
            except (FileNotFoundError, NotADirectoryError):
                self.request.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            try:
                self.send(fd, path.name, _RANGE.search(head))
            finally:
                if path.name != "data":
                    os.close(fd)

        def send(self, fd: int, name: str, asked: re.Match[str] | None) -> None:
            size = os.fstat(fd).st_size
            first, last = 0, size - 1
            if asked:
                first = int(asked[1])
                last = min(int(asked[2]), last) if asked[2] else last
            length = last - first + 1
            with lock:
                sent["bytes" if name == "data" else "other"] += length
                sent["requests"] += name == "data"
            status = "206 Partial Content" if asked else "200 OK"
            span = f"Content-Range: bytes {first}-{last}/{size}\r\n" if asked else ""
            date = "Last-Modified: Mon, 02 Jan 2023 00:00:00 GMT\r\n"
            self.request.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{date}{span}\r\n".encode(), socket.MSG_MORE)
            while length:
                done = os.sendfile(self.request.fileno(), fd, first, length)
                first, length = first + done, length - done

    class Threads(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

        def server_bind(self) -> None:
            with contextlib.suppress(OSError):  # the system may have BBR, which takes 47 ms of a core for 100 MB here, not 13
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            super().server_bind()

    server = Threads(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3)
