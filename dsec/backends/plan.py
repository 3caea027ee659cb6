"""From a `SandboxSpec` to a `LaunchPlan`: every default decided, every name resolved, nothing done yet.

Pure: the same spec on the same node gives the same plan, so it can be printed before anything happens and recorded before the
first resource exists. What the node cannot enforce is named in ``degraded``; what nobody enforces yet is refused.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dsec.backends.base import IdMap, LaunchPlan, Mount
from dsec.errors import InvalidRequest, Unsupported
from dsec.model import MIB, LayerRef, Qos, SandboxId, SandboxSpec
from dsec.security.network import Block

IDMAP_BASE = 100_000
IDMAP_COUNT = 65_536
MAX_SLOTS = (2**32 - 1 - IDMAP_BASE) // IDMAP_COUNT
MIN_MEMORY = 24 * MIB  # the runtime, Aether and one shell; measured by tests/system/test_container.py
MIN_PIDS = 16  # the runtime, Aether, a shell and what it starts
MAX_ENV_BYTES = 1 << 20
SHARED_ENV = 1024  # bytes of values
MAX_BYTES = 1 << 50
MAX_INODES = 1 << 32
MAX_ENV_STRING = 32 * 4096  # the kernel's MAX_ARG_STRLEN, NAME=VALUE and a NUL
DISK_MODES = ("quota", "btrfs", "tmpfs", "loop", "dir")
MAX_LOWERS = 490  # of the 500 that overlayfs stacks; the agent and the network have their own

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Docker's fourteen without CAP_MKNOD: a device node made in a user namespace cannot be opened, and without one it must not be.
# Never SYS_ADMIN (crun makes the user namespace first, so root inside could unmount masks), SYS_PTRACE or DAC_READ_SEARCH
# (either could take PID 1's listening socket).
CAPABILITIES = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)

MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
)
READONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_PROC = Mount(target="/proc", fstype="proc", source="proc", options=("nosuid", "noexec", "nodev"))
_PTS = Mount(
    target="/dev/pts",
    fstype="devpts",
    source="devpts",
    options=("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5", "max=64"),
)
# Superblocks of a sandbox: the overlay, the upper's file system, proc and devpts. /dev and /dev/shm are directories of the
# agent's layer (holder.py), where the runtime binds the node's devices.
MOUNTS = (_PROC, _PTS)
# Without a user namespace the runtime makes device nodes, which the overlay does not open.
MOUNTS_WITHOUT_USERNS = (
    _PROC,
    Mount(target="/dev", fstype="tmpfs", source="tmpfs", options=("nosuid", "strictatime", "mode=755", "size=64k", "nr_inodes=256")),
    _PTS,
    Mount(target="/dev/shm", fstype="tmpfs", source="shm", options=("nosuid", "noexec", "nodev", "mode=1777", "size=64m")),
)

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_USER_PART = r"(?:[a-z_][a-z0-9_.-]{0,31}\$?|[0-9]{1,10})"
_USER = re.compile(rf"{_USER_PART}(?::{_USER_PART})?", re.IGNORECASE)
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*")


class LayerDefaults(Protocol):
    """What a layer says about how its contents want to be run (an image's ENV, WORKDIR and USER)."""

    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def workdir(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def entrypoint(self) -> tuple[str, ...]: ...
    @property
    def cmd(self) -> tuple[str, ...]: ...


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What planning must know about this node; all of it is found once, when the backend opens."""

    edge: str
    state_dir: str  # the Edge's directory; a sandbox's is <state_dir>/sandboxes/<ulid>
    cgroup_root: str = "dsec"
    backends: tuple[str, ...] = ("container",)
    userns: bool = True
    userns_missing: str = ""  # why not
    disk_modes: tuple[str, ...] = ("tmpfs", "dir")
    seccomp: bool = True
    cpu_idle: bool = True
    arch: str = platform.machine()
    net: Block | None = None  # addresses for open sandboxes
    net_missing: str = ""  # why there are none


def make_plan(
    spec: SandboxSpec,
    *,
    id: SandboxId,  # noqa: A002 - it is what everything else calls it
    slot: int,
    refs: Sequence[LayerRef],
    node: Node,
    layer_configs: Sequence[LayerDefaults | None] = (),
) -> LaunchPlan:
    """The plan of one sandbox.

    ``refs`` are its layers, topmost first, and ``layer_configs`` what each says (same order; a higher layer wins). ``slot`` is
    a number that no other live sandbox of the node has: it selects the range of ids.

    Raises `InvalidRequest` with field, value and fix; `Unsupported` for what this node or version does not enforce.
    """
    _check(spec, node)
    if not refs:
        raise InvalidRequest("a sandbox needs a base layer", field="image", value=spec.image, fix="name an image (dsec layer ls)")
    if len(refs) > MAX_LOWERS:
        raise InvalidRequest(f"more than {MAX_LOWERS} layers", field="toolkits", value=len(refs), fix="pack some of them into one layer")
    if not 0 <= slot < MAX_SLOTS:
        raise InvalidRequest("no such slot", field="slot", value=slot)

    degraded: list[str] = []
    mode = _disk_mode(spec, node, degraded)
    if not node.userns:
        degraded.append(f"userns: {node.userns_missing or 'off'}; root inside is the node's root without most capabilities")
    if not node.seccomp:
        degraded.append("seccomp: this kernel has no filter mode")
    if spec.qos is Qos.BE and not node.cpu_idle:
        degraded.append("qos: this kernel has no cpu.idle; best effort has the least weight, and still delays others' wake-ups")
    if degraded and not spec.best_effort and not node.userns and spec.isolation == "user":
        raise Unsupported("isolation=user needs user namespaces on this node", reason="userns", fix="set best_effort to accept it")

    if spec.network.mode == "open" and node.net is not None:
        degraded += node.net.notes

    configs = [config for config in layer_configs if config is not None]
    env, workdir, user = _process(spec, configs)
    return LaunchPlan(
        **_own(spec, id, slot, node),
        lowers=tuple(refs),
        resources=spec.resources,
        disk_mode=mode,
        qos=spec.qos,
        env=env,
        workdir=workdir,
        user=user,
        command=next(((*config.entrypoint, *config.cmd) for config in configs if config.entrypoint or config.cmd), ()),
        network=spec.network.mode,
        mounts=MOUNTS if node.userns else MOUNTS_WITHOUT_USERNS,
        capabilities=CAPABILITIES,
        seccomp="default" if node.seccomp else "",
        masked=MASKED,
        readonly=READONLY,
        degraded=tuple(degraded),
    )


def another(plan: LaunchPlan, spec: SandboxSpec, id: SandboxId, slot: int, node: Node) -> LaunchPlan:  # noqa: A002
    """As `make_plan` for the same spec on the same layers and node, from a plan that it has made."""
    if not 0 <= slot < MAX_SLOTS:
        raise InvalidRequest("no such slot", field="slot", value=slot)
    return msgspec.structs.replace(plan, **_own(spec, id, slot, node))


def _own(spec: SandboxSpec, id: SandboxId, slot: int, node: Node) -> dict[str, Any]:  # noqa: A002
    """What no two plans have in common."""
    return {
        "id": str(id),
        "ulid": id.ulid,
        "state_dir": f"{node.state_dir}/sandboxes/{id.ulid}",
        "cgroup": f"{node.cgroup_root}/{node.edge}/{id.ulid}",
        "hostname": spec.hostname or f"sb-{id.ulid[-8:]}",
        "idmap": ids_of(slot) if node.userns else None,
        "wiring": node.net.wiring(slot, id.ulid) if spec.network.mode == "open" and node.net is not None else None,
    }


def ids_of(slot: int) -> IdMap:
    """The ids of the sandbox that has the slot."""
    return IdMap(base=IDMAP_BASE + IDMAP_COUNT * slot, count=IDMAP_COUNT)


def memory_bytes(plan: LaunchPlan) -> int:
    """Bytes that a sandbox can occupy, and therefore its memory limit and what admission reserves: a tmpfs upper is memory."""
    return plan.resources.memory + (plan.resources.disk if plan.disk_mode == "tmpfs" else 0)


def check_env(env: Mapping[str, str], field: str = "env") -> None:
    """Raises `InvalidRequest` for names that no shell can hold and for NUL bytes."""
    total = 0
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise InvalidRequest("not a usable variable name", field=f"{field}.{name[:64]}", value=name, fix="use letters, digits and _")
        if "\0" in value:
            raise InvalidRequest("holds a NUL byte", field=f"{field}.{name}", value=value, fix="leave the byte out")
        size = len(name) + len(value.encode(errors="surrogateescape")) + 2
        if size > MAX_ENV_STRING:
            fix = f"the kernel takes {MAX_ENV_STRING} bytes of one variable; put large data into a file"
            raise InvalidRequest("too large for a variable", field=f"{field}.{name[:64]}", value=size, fix=fix)
        total += size
    if total > MAX_ENV_BYTES:
        raise InvalidRequest("the environment is larger than 1 MiB", field=field, value=total, fix="put large data into a file")


def check_user(user: str, field: str = "user") -> None:
    """``name``, ``uid``, or either with ``:group``. Raises `InvalidRequest`."""
    if user and not _USER.fullmatch(user):
        raise InvalidRequest("not a user", field=field, value=user, fix="use name, uid, name:group or uid:gid")
    for part in user.split(":"):
        if part.isdigit() and int(part) >= IDMAP_COUNT:
            raise InvalidRequest("an id above the sandbox's range", field=field, value=user, fix=f"use ids below {IDMAP_COUNT}")


def check_path(path: str, field: str) -> None:
    """An absolute path without ``..``. Raises `InvalidRequest`."""
    if not path:
        return
    if "\0" in path:
        raise InvalidRequest("holds a NUL byte", field=field, value=path, fix="leave the byte out")
    if not path.startswith("/"):
        raise InvalidRequest("not an absolute path", field=field, value=path, fix=f"use /{path}")
    if ".." in path.split("/"):
        raise InvalidRequest("holds ..", field=field, value=path, fix="name the directory itself")
    if len(path.encode(errors="surrogateescape")) > 4095:
        raise InvalidRequest("longer than 4095 bytes", field=field, value=path)


def _check(spec: SandboxSpec, node: Node) -> None:
    if spec.backend not in node.backends:
        raise InvalidRequest("this node has no such backend", field="backend", value=spec.backend, fix=f"use {' or '.join(node.backends)}")
    if spec.arch and spec.arch != node.arch:
        raise InvalidRequest("not this node's architecture", field="arch", value=spec.arch, fix=f"leave it out or use {node.arch}")
    if spec.resources.memory < MIN_MEMORY:
        raise InvalidRequest(
            "less memory than the guest needs", field="resources.memory", value=spec.resources.memory, fix=f"use {MIN_MEMORY} or more"
        )
    for name, most in (("memory", MAX_BYTES), ("disk", MAX_BYTES), ("inodes", MAX_INODES)):
        if (value := getattr(spec.resources, name)) > most:
            raise InvalidRequest("more than a kernel can be told", field=f"resources.{name}", value=value, fix=f"use {most} or less")
    if spec.resources.pids < MIN_PIDS:
        raise InvalidRequest(
            "fewer processes than the guest needs", field="resources.pids", value=spec.resources.pids, fix=f"use {MIN_PIDS} or more"
        )
    if spec.network.mode not in ("none", "open") or spec.network.rules:
        raise Unsupported(
            "network rules are not enforced yet, so what they ask for is not given",
            field="network",
            value=", ".join(spec.network.rules) or spec.network.mode,
            fix='use network="none", or "open" for all but the node and other sandboxes',
            reason="network",
        )
    if spec.network.mode == "open" and node.net is None:
        raise Unsupported(
            f"this node gives no network: {node.net_missing or 'the backend has none'}", field="network", value="open", reason="network"
        )
    if spec.devices:
        raise Unsupported(
            "devices cannot be passed to a container yet", field="devices", value=spec.devices, fix="leave it out", reason="devices"
        )
    if spec.hostname and (len(spec.hostname) > 64 or not _HOSTNAME.fullmatch(spec.hostname)):
        raise InvalidRequest(
            "not a host name", field="hostname", value=spec.hostname, fix="use letters, digits, dots and inner dashes, 64 at most"
        )
    check_env(spec.env)
    check_user(spec.user)
    check_path(spec.workdir, "workdir")


def _disk_mode(spec: SandboxSpec, node: Node, degraded: list[str]) -> str:
    asked = spec.disk_mode
    if asked == "auto":
        asked = node.disk_modes[0]
    elif asked not in DISK_MODES:
        raise InvalidRequest("not a disk mode", field="disk_mode", value=asked, fix=f"use auto, {', '.join(DISK_MODES[:-1])} or dir")
    elif asked not in node.disk_modes:
        raise Unsupported(
            "this node has no such disk mode", field="disk_mode", value=asked, fix=f"use {' or '.join(node.disk_modes)}", reason="disk"
        )
    if asked == "dir":
        if not spec.best_effort and spec.disk_mode != "dir":
            raise Unsupported(
                "this node cannot limit a sandbox's disk", field="resources.disk", fix="set best_effort to accept it", reason="disk"
            )
        degraded.append("disk: a plain directory has no limit")
    if asked == "tmpfs":  # the kernel has one limit for a group's anonymous memory and its tmpfs: a large disk is more memory
        other = next((mode for mode in node.disk_modes if mode in ("quota", "btrfs", "loop")), "")
        asks = f'disk_mode="{other}" of the sandbox or ' if other else ""
        apart = f"; {asks}container.disk_store_bytes of the node keeps them apart"
        degraded.append(f"memory: the writable layer is in memory, so that one limit, memory and disk together, holds for both{apart}")
    if asked == "btrfs":
        degraded.append("inodes: btrfs counts the bytes that a file and its name take, and not the number of files")
    return asked


def _process(spec: SandboxSpec, configs: list[LayerDefaults]) -> tuple[dict[str, str], str, str]:
    """Environment, working directory and user: the node's are never looked at, the spec's win over any layer's."""
    env = {"PATH": DEFAULT_PATH, "HOME": "/root", "LANG": "C.UTF-8"}
    workdir = user = ""
    for config in reversed(configs):
        env.update(config.env)
        workdir = config.workdir or workdir
        user = config.user or user
    env.update(spec.env)
    user = spec.user or user
    workdir = spec.workdir or workdir
    check_env(env)
    check_user(user)
    check_path(workdir, "workdir")
    if sum(map(len, env.values())) <= SHARED_ENV:
        env = _shared(tuple(env.items()))
    return env, workdir or "/", user


@functools.lru_cache(256)
def _shared(env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The same object for all plans that are alike: nobody changes one."""
    return dict(env)
