"""The real guest binary as PID 1 of a pid namespace of its own, nothing else around it: what the Aether tests run against."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from pathlib import Path

from dsec.backends.guest.build import ensure
from dsec.backends.guest.link import Link
from dsec.model import ExecSpec, OpStatus

# The agent under test is root among the machine's files: its devices at least it can neither remove nor replace.
SHIELD = 'mount --rbind /dev /dev && mount -o remount,bind,ro /dev && exec "$@"'
NO_HELP = "-sys_ptrace,-dac_read_search,-sys_admin,-perfmon"  # capabilities that a sandbox never has


class Box:
    """``path`` is the socket outside, ``pid`` the init's pid outside, ``fd`` the listener's number inside."""

    def __init__(self, folder: Path, *arguments: str, program: Path | None = None) -> None:
        self.path = str(folder / "aether")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(16)
            self.fd = listener.fileno()
            self.unshare = subprocess.Popen(
                [
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("sh", "-c", SHIELD, "sh"),
                    *("setpriv", f"--bounding-set={NO_HELP}", f"--inh-caps={NO_HELP}"),
                    *(str(program or ensure()), "--fd", str(self.fd), *arguments),
                ],
                pass_fds=[self.fd],
                env={"PATH": os.environ["PATH"], "MARK": "of-the-sandbox"},
            )
        self.links: list[Link] = []
        self.pid = self._init()

    def _init(self) -> int:
        for _ in range(200):
            children = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text().strip().startswith("aether"):
                return int(children[0])
            time.sleep(0.01)
        raise RuntimeError("the guest did not start")

    def link(self, generation: int = 1, *, idle_seconds: float = 30.0) -> Link:
        link = Link(self.path, generation=generation, expect_pid=lambda: self.pid, idle_seconds=idle_seconds, sandbox_id="t-box")
        self.links.append(link)
        return link

    def rss(self) -> int:
        """Bytes of memory of the agent."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS")

    def processes(self) -> list[tuple[int, str, str]]:
        """(pid outside, state, command line) of every process in the namespace but the init."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            try:
                if os.readlink(entry / "ns/pid") == mine:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found.append((int(entry.name), state, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")))
            except OSError:
                continue
        return found

    def alive(self, word: str) -> list[int]:
        """Processes of the namespace whose command line holds ``word`` and that are no zombies."""
        return [pid for pid, state, line in self.processes() if word in line and state not in "ZX"]

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        self.unshare.kill()
        self.unshare.wait(10)
        for _ in range(100):
            try:  # a zombie waits for whoever inherits it; it runs no more
                if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return
            except OSError:
                return
            await asyncio.sleep(0.02)


def new_op() -> str:
    return os.urandom(16).hex()


async def run(link: Link, *argv: str, seconds: float = 20.0, **spec: object) -> OpStatus:
    """Start and wait."""
    op = new_op()
    await link.start(op, ExecSpec(argv=argv, **spec))  # type: ignore[arg-type]
    return await link.wait(op, seconds)


async def shell(link: Link, text: str, **spec: object) -> OpStatus:
    return await run(link, "/bin/sh", "-c", text, **spec)
