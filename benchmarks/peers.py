"""Other runtimes doing the same thing on the same base: crun and runc by their naive bundles, bubblewrap, Docker through aiodocker.

Each peer is a child process of its own (`python -m benchmarks.peers NAME ROOTFS`), so that what it needs (a private mount namespace
for crun on a hybrid cgroup hierarchy, a dockerd started by hand) stays there. It reads a nonce a line and answers with one JSON object a
line: the milliseconds from create until its first command said the nonce. Removing what was created is not in the figure.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from dsec import trees

NAMES = ("crun", "runc", "bwrap", "docker")
SEARCH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


class Absent(RuntimeError):
    """This peer cannot run here; the text says why."""


class Peer:
    """The parent's side of one peer."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Absent(f"{self.name}'s process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Absent(answer["error"])
        return answer

    async def once(self) -> float:
        """One create until its first command answered, in milliseconds. The removal before the next one is waited for as well."""
        word = secrets.token_hex(8)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        answer = await self._line()
        if answer["said"] != word:
            raise RuntimeError(f"{self.name} answered {answer['said']!r}, expected {word!r}")
        return float(answer["ms"])


@asynccontextmanager
async def peer(name: str, rootfs: Path) -> AsyncIterator[Peer]:
    """Start a peer on ``rootfs`` (a directory that holds the same base). Raises `Absent`."""
    needed = {"docker": ("dockerd", "docker")}.get(name, (name,))
    for program in needed:
        if shutil.which(program, path=SEARCH) is None:
            raise Absent(f"{program} is not installed")
    if name == "docker":
        try:
            import aiodocker  # noqa: F401  (an extra)
        except ImportError as error:
            raise Absent("aiodocker is not installed") from error
    command = [sys.executable, "-m", "benchmarks.peers", name, str(rootfs)]
    if name in ("crun", "runc"):  # a mount namespace without the unified mount: crun refuses a hybrid hierarchy
        hide = 'mount --make-rprivate / && { umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"; }'
        command = ["unshare", "-m", "sh", "-c", hide, "sh", *command]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PATH": SEARCH}
    )
    found = Peer(name, process)
    try:
        await found._line()  # ready
        yield found
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


# ------------------------------------------------------------------ the child's side
class Runtime(Protocol):
    """What the child drives."""

    async def open(self) -> None: ...

    async def answer(self, word: str) -> str:
        """Create, run ``/bin/echo word``, return what it said."""
        ...

    async def remove(self) -> None: ...

    async def close(self) -> None: ...


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise Absent(f"{' '.join(command[:4])} failed: {err.decode(errors='replace').strip()[-300:]}")
    return out.decode()


async def _detached(*command: str) -> None:
    """As `_output`, for a command whose container inherits its standard streams: nobody waits for their end."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=errors
        )
        if await process.wait():
            errors.seek(0)
            raise Absent(f"{' '.join(command[:4])} failed: {errors.read().decode(errors='replace').strip()[-300:]}")


class Bundle:
    """``crun spec`` or ``runc spec`` as it comes, but for the root, the command and no terminal."""

    def __init__(self, program: str, rootfs: Path, folder: Path) -> None:
        self.program, self.rootfs, self.folder = program, rootfs, folder
        self.state = folder / "state"
        self.number = 0

    async def open(self) -> None:
        bundle = self.folder / "bundle"
        bundle.mkdir()
        await _output("sh", "-c", f"cd '{bundle}' && {self.program} spec")
        config = json.loads((bundle / "config.json").read_text())
        config["root"] = {"path": str(self.rootfs), "readonly": True}
        config["process"]["terminal"] = False
        config["process"]["args"] = ["/bin/sleep", "3600"]
        (bundle / "config.json").write_text(json.dumps(config))

    def _name(self) -> str:
        return f"peer-{os.getpid()}-{self.number}"

    async def answer(self, word: str) -> str:
        self.number += 1
        common = (self.program, "--root", str(self.state))
        await _detached(*common, "run", "-d", "--bundle", str(self.folder / "bundle"), self._name())
        return await _output(*common, "exec", self._name(), "/bin/echo", word)

    async def remove(self) -> None:
        with suppress(Absent):
            await _output(self.program, "--root", str(self.state), "delete", "-f", self._name())

    async def close(self) -> None:
        await self.remove()


class Bubblewrap:
    """One command is the whole life of it."""

    def __init__(self, rootfs: Path) -> None:
        self.rootfs = rootfs

    async def open(self) -> None:
        await self.answer("ready")

    async def answer(self, word: str) -> str:
        flags = ("--ro-bind", str(self.rootfs), "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--die-with-parent")
        return await _output("bwrap", *flags, "/bin/echo", word)

    async def remove(self) -> None:
        return

    async def close(self) -> None:
        return


class Docker:
    """A dockerd of our own, without bridge and firewall rules; the image is the same base, imported from a tar."""

    def __init__(self, rootfs: Path, folder: Path) -> None:
        self.rootfs, self.folder = rootfs, folder
        self.url = f"unix://{folder}/docker.sock"
        self.daemon: asyncio.subprocess.Process | None = None
        self.client: Any = None
        self.container: Any = None
        self.group = f"dsec-peer-{os.getpid()}"

    async def open(self) -> None:
        import aiodocker

        arguments = ("--bridge", "none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "-H", self.url)
        places = (
            "--data-root",
            f"{self.folder}/data",
            "--exec-root",
            f"{self.folder}/exec",
            "-p",
            f"{self.folder}/pid",
            "--cgroup-parent",
            f"/{self.group}",
        )
        log = (self.folder / "log").open("wb")
        self.daemon = await asyncio.create_subprocess_exec("dockerd", *arguments, *places, stdout=log, stderr=log)
        log.close()
        self.client = aiodocker.Docker(url=self.url)
        for _ in range(150):
            try:
                await self.client.version()
                break
            except Exception as error:
                if self.daemon.returncode is not None:
                    tail = (self.folder / "log").read_text(errors="replace")[-300:]
                    raise Absent(f"dockerd ended: {tail}") from error
                await asyncio.sleep(0.1)
        else:
            raise Absent("dockerd did not answer within 15 s")
        await _output("sh", "-c", f"tar -C '{self.rootfs}' -c . | docker -H '{self.url}' import - peer:base")

    async def answer(self, word: str) -> str:
        config = {"Image": "peer:base", "Cmd": ["/bin/sleep", "3600"], "HostConfig": {"NetworkMode": "none"}}
        self.container = await self.client.containers.create(config)
        await self.container.start()
        command = await self.container.exec(["/bin/echo", word], stdout=True, stderr=True)
        said = b""
        async with command.start(detach=False) as stream:
            while (message := await stream.read_out()) is not None:
                said += message.data
        return said.decode()

    async def remove(self) -> None:
        if self.container is not None:
            await self.container.delete(force=True)
            self.container = None

    async def close(self) -> None:
        with suppress(Exception):  # the daemon may be the one that failed; it is ended below in any case
            await self.remove()
        if self.client is not None:
            await self.client.close()
        if self.daemon is not None and self.daemon.returncode is None:
            self.daemon.terminate()
            await self.daemon.wait()
        for hierarchy in Path("/sys/fs/cgroup").glob(f"*/{self.group}"):
            with suppress(OSError):
                hierarchy.rmdir()


async def child(name: str, rootfs: Path) -> None:
    """Answer nonces until standard input ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"dsec-peer-{name}-"))
    runtime: Runtime
    match name:
        case "bwrap":
            runtime = Bubblewrap(rootfs)
        case "docker":
            runtime = Docker(rootfs, folder)
        case _:
            runtime = Bundle(name, rootfs, folder)
    loop = asyncio.get_running_loop()
    try:
        await runtime.open()
        print(json.dumps({"ready": True}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            word = line.strip()
            started = time.perf_counter()
            said = await runtime.answer(word)
            took = (time.perf_counter() - started) * 1e3
            await runtime.remove()
            print(json.dumps({"ms": took, "said": said.strip()}), flush=True)
    except Exception as error:  # noqa: BLE001 - whatever failed is the parent's to tell
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    finally:
        await runtime.close()
        trees.clear(folder)


if __name__ == "__main__":
    asyncio.run(child(sys.argv[1], Path(sys.argv[2])))
