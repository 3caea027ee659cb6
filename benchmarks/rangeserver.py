"""A directory over HTTP with ranges and a given delay, in a process of its own; `/stats` says how much went out."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


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
    sent = {"bytes": 0, "requests": 0, "other": 0}
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path in ("/stats", "/reset"):
                with lock:
                    body = json.dumps(sent).encode()
                    if self.path == "/reset":
                        sent.update(dict.fromkeys(sent, 0))
                self.reply(200, body)
                return
            time.sleep(delay)
            path = root / self.path.strip("/").replace("%3D", "=")
            if not path.is_file():
                self.reply(404, b"")
                return
            size = path.stat().st_size
            first, last = 0, size - 1
            if asked := self.headers.get("Range"):
                start, _, end = asked.removeprefix("bytes=").partition("-")
                first, last = int(start), min(int(end), last) if end else last
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(last - first + 1)
            with lock:
                if path.name == "data":
                    sent["bytes"] += len(body)
                    sent["requests"] += 1
                else:
                    sent["other"] += len(body)
            self.reply(206 if asked else 200, body, f"bytes {first}-{last}/{size}" if asked else "")

        def reply(self, code: int, body: bytes, span: str = "") -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Mon, 02 Jan 2023 00:00:00 GMT")
            if span:
                self.send_header("Content-Range", span)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3)
