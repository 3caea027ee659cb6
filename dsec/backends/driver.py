"""What starts a container: the protocol of a driver, and what a driver is told of its node.

A driver turns a `LaunchPlan` into a running Aether as PID 1 and does nothing else: cgroups, the listening socket, layers, network and
release are the backend's. Every driver gets the same plan, and refuses one that it cannot enforce whole.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dsec.backends.base import LaunchPlan
from dsec.backends.holder_client import HolderClient
from dsec.backends.network import OpenNetwork
from dsec.qos.cgroup import Order

LAUNCH_TIMEOUT = 60.0  # seconds of a launch in the holder; it takes 10 ms


class Site:
    """What the backend found out about its node; filled while it opens, and again with each new holder."""

    def __init__(self, holder: HolderClient, network: OpenNetwork) -> None:
        self.holder = holder
        self.network = network
        self.root = self.prefix = ""  # where roots and layers are attached in the holder's namespace
        self.launcher = ""  # the launcher's program
        self.zygotes = False  # the holder that serves may be of an earlier version
        self.by_paths = False  # overlays by paths, not by descriptors: the holder knows what its kernel can
        self.cgroup_v2 = False
        self.launches = self.from_pool = 0  # by zygotes; those of them whose namespaces had been made ahead
        self.from_stock = 0  # and those whose groups had been
        self.upcoming: Callable[[int], Sequence[int]] = lambda _: ()  # slots of the sandboxes that will be next, as many as are asked for
        self.masked_directories: frozenset[str] = frozenset()
        self.mappable: frozenset[str] = frozenset()  # disk modes whose file system can be id-mapped


class Place(NamedTuple):
    """What a launch needs besides its plan: the sandbox's cgroups and the socket on which its agent is to listen."""

    groups: Order
    path: str
    listener: socket.socket | None  # None: cgroups and socket are the driver's to make


class Driver(Protocol):
    """One way to start containers."""

    @property
    def name(self) -> str:
        """What doctor, heartbeat and benchmarks call it."""
        ...

    @property
    def keep(self) -> str:
        """A path that must stay visible in the holder's namespace; "" when there is none."""
        ...

    @property
    def makes_place(self) -> bool:
        """Whether it makes cgroups and socket itself, and needs the sandbox's directory only for what lies in it."""
        ...

    def make(self, plan: LaunchPlan) -> None:
        """Write what a launch needs into the sandbox's directory, which exists (in a thread)."""
        ...

    async def start(self, plan: LaunchPlan, place: Place) -> int:
        """The pid of the sandbox's init on the node. It may have steps to go until it is the agent; should one fail, it ends.

        Raises `NodeError`; what was started is then found by the holder and by the cgroups.
        """
        ...

    async def detail(self, plan: LaunchPlan) -> str:
        """What the driver's own log says of a failed launch, or ""."""
        ...


def launch_env() -> dict[str, str]:
    """The environment of what the holder starts for a launch: nothing of the Edge's but where programs are."""
    return {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}


def upper_path(plan: LaunchPlan) -> str:
    """Where the upper of a plan that has one on a disk is, in the holder's namespace: a directory (``dir``, ``quota``, ``btrfs``: bound
    as it is) or an ext4 image (``loop``). The overlay on it is volatile: an upper is never mounted twice, and without that the end of
    each sandbox would wait until its whole file system, which others share, is synced."""
    if plan.disk_mode == "btrfs":
        return f"{os.path.dirname(os.path.dirname(plan.state_dir))}/disks/{plan.ulid}"
    return f"{plan.state_dir}/disk"


def launcher_options(site: Site, plan: LaunchPlan, groups: tuple[str, ...]) -> list[str]:
    """What the launcher (launch.c) is told of a plan besides its layers and where the root is."""
    if plan.disk_mode == "tmpfs":
        argv = ["-v", "-t", f"{plan.resources.disk}:{plan.resources.inodes}"]
    else:
        argv = ["-v", "-b" if plan.disk_mode == "loop" else "-d", upper_path(plan)]
    if plan.idmap is not None:
        argv += ["-u", f"{plan.idmap.base}:{plan.idmap.count}"]
        if plan.disk_mode not in site.mappable:
            argv.append("-o")
    if site.by_paths:
        argv += ["-p", site.prefix]
    for path in groups:
        argv += ["-g", path]
    return argv
