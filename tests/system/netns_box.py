"""An Edge in a network namespace of its own, whose way to the bus can be cut: whole, or in one direction only (half-open)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from dsec import config as configs
from dsec.config import Config

RULES = """table inet cut {{
    chain from_bus {{ type filter hook input priority 0; policy {inbound}; }}
    chain to_bus {{ type filter hook output priority 0; policy {outbound}; }}
}}"""


class Wire:
    """A namespace and a pair of interfaces. ``host`` is this side's address, where nats-server listens."""

    def __init__(self, name: str) -> None:
        self.name = name
        net = secrets.randbelow(1 << 15) * 4  # of 198.18.0.0/15, which is for such tests
        first = (198 << 24) + (18 << 16) + net
        self.host, self.there = (".".join(str(first + n >> shift & 255) for shift in (24, 16, 8, 0)) for n in (1, 2))
        self.near, self.far = f"va{name}", f"vb{name}"

    def open(self) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
        run("ip", "address", "add", f"{self.host}/30", "dev", self.near)
        run("ip", "link", "set", self.near, "up")
        run("ip", "-n", self.name, "address", "add", f"{self.there}/30", "dev", self.far)
        run("ip", "-n", self.name, "link", "set", self.far, "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")

    def close(self) -> None:
        for command in (("ip", "link", "delete", self.near), ("ip", "netns", "delete", self.name)):
            subprocess.run(command, check=False, capture_output=True)

    def inside(self, *command: str) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self.name}", *command)

    def cut(self, how: str) -> None:
        """``both``, ``in`` (nothing reaches the Edge) or ``out`` (nothing leaves it); packets vanish without a word."""
        inbound, outbound = ("drop" if how in (way, "both") else "accept" for way in ("in", "out"))
        run(*self.inside("nft", "-f", "-"), text=RULES.format(inbound=inbound, outbound=outbound))

    def heal(self) -> None:
        run(*self.inside("nft", "delete", "table", "inet", "cut"))


def run(*command: str, text: str = "") -> None:
    subprocess.run(command, check=True, input=text.encode(), capture_output=True, timeout=30)


class EdgeProcess:
    """`python -m dsec.actors.run edge`, started by a command that may put it somewhere else; it dies with this process."""

    def __init__(self, folder: Path, tables: dict[str, dict[str, Any]], prefix: tuple[str, ...] = ()) -> None:
        name = tables["edge"]["name"]
        self.config = folder / f"{name}.toml"
        self.log = folder / f"{name}.log"
        self.prefix = prefix
        whole: dict[str, dict[str, Any]] = msgspec.to_builtins(Config())
        for room, table in tables.items():
            whole[room] |= table
        self.config.write_text(configs.dump(configs.parse(whole)))
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        libc = ctypes.CDLL(None)
        env = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_") or key == "DSEC_DISABLE"}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.prefix, sys.executable, "-m", "dsec.actors.run", "edge", str(self.config),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True,
                preexec_fn=lambda: libc.prctl(1, signal.SIGTERM, 0, 0, 0),
            )  # fmt: skip
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert line, self.log.read_text()[-2000:]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 60)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
