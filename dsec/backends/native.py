"""The driver that starts containers by the project's own launcher: a frame to one of the holder's zygotes, and no runtime."""

from __future__ import annotations

import asyncio
import functools
import os
import platform

from dsec import syscalls
from dsec.backends import frame, runtime
from dsec.backends.base import LaunchPlan
from dsec.backends.driver import LAUNCH_TIMEOUT, Place, Site
from dsec.backends.network import TOP
from dsec.backends.pack import UPPER_FD
from dsec.backends.plan import ids_of
from dsec.errors import NodeError
from dsec.security import seccomp

LISTENER_FD = 3
ARCHES = ("x86_64", "aarch64")
AHEAD = os.cpu_count() or 1  # namespaces are made ahead for as many sandboxes as the holder has zygotes at most


def trouble(site: Site) -> str:
    """Why the native launcher cannot serve here; "" when it can."""
    if syscalls.disabled("native"):
        return "disabled by DSEC_DISABLE"
    if not site.zygotes:
        return "the holder of this node is of an earlier version, and sandboxes live in it"
    if platform.machine() not in ARCHES:
        return f"the launcher is not built for {platform.machine()}"
    if site.by_paths:
        return "this kernel makes no overlay from detached mounts (Linux 6.15)"
    return ""


class NativeDriver:
    """Implements `dsec.backends.driver.Driver`."""

    name = "native"
    keep = ""
    makes_place = True

    def __init__(self, site: Site) -> None:
        self.site = site

    def make(self, plan: LaunchPlan) -> None:
        """Nothing is needed on disk."""

    async def start(self, plan: LaunchPlan, place: Place) -> int:
        top = f"{plan.state_dir}/{TOP}" if self.site.network.as_layer(plan) else ""
        data = frame.render(
            plan,
            lowers=len(plan.lowers) + 1 + bool(top),
            args=frame.arguments(plan, LISTENER_FD, UPPER_FD),
            socket=place.path,
            groups=place.groups,
            group2=place.groups.directories[0] if self.site.cgroup_v2 else "",
            seccomp=seccomp.compiled(seccomp.profile(plan.seccomp)) if plan.seccomp else b"",
            nofile=_nofile(),
            own_upper=plan.idmap is not None and plan.disk_mode not in self.site.mappable,
        )
        fd = _in_memory(data)
        try:
            async with asyncio.timeout(LAUNCH_TIMEOUT):  # not `wait_for`, whose task would take another turn of the loop
                answer = await self.site.holder.request(
                    "spawn",
                    fds=(fd,),
                    ulid=plan.ulid,
                    lowers=[layer.digest for layer in plan.lowers],
                    top=top,
                    base=plan.idmap.base if plan.idmap is not None else 0,
                    coming=[ids_of(slot).base for slot in self.site.upcoming(AHEAD)] if plan.idmap is not None else [],
                )
        except TimeoutError as error:
            raise NodeError(f"no sandbox within {LAUNCH_TIMEOUT} s", sandbox=plan.id, reason="launcher") from error
        finally:
            os.close(fd)
        self.site.launches += 1
        self.site.from_pool += answer.get("ahead", False)
        return int(answer["pid"])

    async def detail(self, plan: LaunchPlan) -> str:  # noqa: ARG002 - the zygote's answer says it all
        return ""


def _in_memory(data: bytes) -> int:
    """A file without a name: no disk is waited for."""
    fd = os.memfd_create("launch", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


_nofile = functools.cache(runtime.nofile)
