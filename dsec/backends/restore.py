"""The driver that starts a container from images of processes: the launcher builds its root, and CRIU fills it.

What is new in each: the ids on the node, the host name, the network namespace, the cgroups and their namespace, the agent's listening
socket, the pid namespace with the pids that it had. What cannot be new is what the processes hold in their memory (docs/memory.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import aiofiles
import msgspec

from dsec import trees
from dsec.backends import criu
from dsec.backends.base import LaunchPlan
from dsec.backends.capture import Tools
from dsec.backends.driver import Place, Site, launch_env, launcher_options
from dsec.backends.network import TOP
from dsec.errors import NodeError

OWN = "processes"  # in a sandbox's directory: the images as it sees them


class RestoreDriver:
    """Implements `dsec.backends.driver.Driver` for plans with ``processes``. ``programs``: CRIU and what helps it."""

    name = "criu"
    keep = ""
    makes_place = False

    def __init__(self, site: Site, programs: Tools) -> None:
        self.site = site
        self.programs = programs

    def make(self, plan: LaunchPlan) -> None:
        """The images as links, with those that are its own as files."""
        place, own = Path(plan.processes), Path(plan.state_dir, OWN)
        image = self._image(plan)
        if image.version.split(".")[0] != self.programs.version.split(".")[0]:
            text = f"its processes were kept by criu {image.version}, and this node has {self.programs.version} now"
            raise NodeError(text, sandbox=plan.id, reason="snapshot", retryable=False)
        for name, size in image.sizes.items():
            if (found := self._size(place / name)) != size:
                text = f"the images of its processes are damaged: {name} has {found} bytes of {size}"
                raise NodeError(text, sandbox=plan.id, reason="snapshot", retryable=False)
        with contextlib.suppress(FileNotFoundError):
            trees.remove(own)
        own.mkdir(mode=0o711)  # the restored tree's root opens them, by a descriptor of this directory
        for path in map(place.__truediv__, image.sizes):
            if path.name.startswith("userns-") and plan.idmap is not None:
                (own / path.name).write_bytes(criu.with_ids(path.read_bytes(), plan.idmap.base, plan.idmap.count))
            else:
                os.link(path, own / path.name)

    @staticmethod
    def _size(path: Path) -> int:
        with contextlib.suppress(OSError):
            return path.stat().st_size
        return 0

    def _image(self, plan: LaunchPlan) -> criu.Image:
        try:
            return msgspec.json.decode(Path(plan.processes, criu.RECORD).read_bytes(), type=criu.Image)
        except (OSError, msgspec.MsgspecError) as error:
            text = f"the images of its processes cannot be read: {error}"
            raise NodeError(text, sandbox=plan.id, reason="snapshot", retryable=False) from error

    async def start(self, plan: LaunchPlan, place: Place) -> int:
        assert place.listener is not None
        box = plan.state_dir
        image = await asyncio.to_thread(self._image, plan)
        site = self.site
        argv = [*launcher_options(site, plan, place.groups.joins), "-c", plan.hostname, "--"]
        argv += criu.restore_command(self.programs.criu, image, f"{box}/{OWN}", box, site.root, f"{site.prefix}0", site.launcher)
        started = site.holder.request(
            "launch",
            fds=(place.listener.fileno(),),
            ulid=plan.ulid,
            lowers=[layer.digest for layer in plan.lowers],
            top=f"{box}/{TOP}" if site.network.as_layer(plan) else "",
            argv=argv,
            env=launch_env() | {"LD_PRELOAD": self.programs.shim},
            pidfile=f"{box}/pid",
        )
        try:
            answer = await asyncio.wait_for(started, criu.TIMEOUT)
        except TimeoutError as error:
            raise NodeError(f"criu did not end within {criu.TIMEOUT:.0f} s", sandbox=plan.id, reason="snapshot") from error
        return int(answer["pid"])

    async def detail(self, plan: LaunchPlan) -> str:
        path = Path(plan.state_dir, criu.RESTORE_LOG)
        try:
            async with aiofiles.open(path, encoding="utf-8", errors="replace") as file:
                text = await file.read()
        except OSError:
            return ""
        return f": {criu.explain(text)[0]}" if text else ""
