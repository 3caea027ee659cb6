"""A Docker Engine of the tests' own: its own data, no bridge, no firewall rules, and DSec's runtime."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import syscalls
from dsec.config import DockerConfig
from dsec.trees import clear

SEARCH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
START_TIMEOUT = 60.0


class DoesNotStart(RuntimeError):
    """With the end of its log."""


class Dockerd:
    """One daemon; ``start`` and ``stop`` as often as a test likes."""

    def __init__(self, place: Path, name: str = "test") -> None:
        self.place = place
        self.socket = place / "docker.sock"
        self.config = DockerConfig(host=f"unix://{self.socket}")
        self.group = f"dsec-{name}-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._containerd: subprocess.Popen[bytes] | None = None

    def _start_containerd(self) -> str:
        """Its own process: a dockerd that is killed takes its child with it, and waits 15 s at most for the next one."""
        address = f"{self.place}/containerd.sock"
        if self._containerd is None or self._containerd.poll() is not None:
            config = self.place / "containerd.toml"
            config.write_text(
                f'version = 2\nroot = "{self.place}/containerd"\nstate = "{self.place}/exec/containerd"\n'
                f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{address}"\n'
            )
            with (self.place / "containerd.log").open("ab") as log:
                command = ["containerd", "--config", str(config)]
                self._containerd = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PATH": SEARCH}
                )
        return address

    def start(self, *, runtimes: tuple[str, ...] | None = None) -> None:
        from dsec.backends.docker import wrapper

        if runtimes is None:
            runtimes = (f"dsec={wrapper()}",)
        command = ["dockerd", "--bridge", "none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        command += ["-H", f"unix://{self.socket}", "--data-root", f"{self.place}/data", "--exec-root", f"{self.place}/exec"]
        command += [
            "--containerd",
            self._start_containerd(),
            "-p",
            f"{self.place}/pid",
            "--cgroup-parent",
            f"/{self.group}",
            "--containerd-namespace",
            self.group,
        ]
        for runtime in runtimes:
            command += ["--add-runtime", runtime]
        with (self.place / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PATH": SEARCH})
        end = time.monotonic() + START_TIMEOUT
        while subprocess.run(["docker", "-H", f"unix://{self.socket}", "version"], capture_output=True, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                text = (self.place / "log").read_text(errors="replace")[-400:]
                self.stop()
                raise DoesNotStart(text)
            time.sleep(0.1)

    def stop(self, *, kill: bool = False) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        self._process.wait(timeout=60)
        self._process = None

    def docker(self, *words: str) -> str:
        """The output of the command line client; what it says of a failure begins with "error"."""
        done = subprocess.run(["docker", "-H", f"unix://{self.socket}", *words], capture_output=True, text=True, check=False, timeout=60)
        return done.stdout if done.returncode == 0 else f"error: {done.stdout}{done.stderr}"

    def clean(self) -> None:
        self.stop()
        if self._containerd is not None and self._containerd.poll() is None:
            self._containerd.terminate()
            self._containerd.wait(timeout=60)
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in reversed([point for point in points if point.startswith(f"{self.place}/")]):  # its data, and what a kill left of it
            syscalls.umount2(point, syscalls.MNT_DETACH)
        for hierarchy in Path("/sys/fs/cgroup").glob(f"*/{self.group}"):
            hierarchy.rmdir()
        clear(self.place)


@pytest.fixture(scope="session")
def dockerd() -> Iterator[Dockerd]:
    """Skips where Docker is not installed or does not start."""
    if os.geteuid() != 0:
        pytest.skip("dockerd needs root")
    for program in ("dockerd", "docker", "containerd"):
        if shutil.which(program, path=SEARCH) is None:
            pytest.skip(f"{program} is not installed (apt-get install docker.io)")
    daemon = Dockerd(Path(tempfile.mkdtemp(prefix="dsec-d-", dir="/tmp")))
    try:
        try:
            daemon.start()
        except DoesNotStart as error:
            pytest.skip(f"dockerd does not start here: {error}")
        yield daemon
    finally:
        daemon.clean()
