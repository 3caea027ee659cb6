"""The driver that starts containers with an OCI runtime: crun, or runc."""

from __future__ import annotations

import asyncio
import contextlib
import os

import aiofiles
import msgspec

from dsec.backends import runtime
from dsec.backends.base import LaunchPlan
from dsec.backends.driver import LAUNCH_TIMEOUT, Place, Site, launch_env, launcher_options
from dsec.backends.network import TOP
from dsec.backends.pack import UPPER_FD
from dsec.backends.render import GUEST_PATH, guest_options, render
from dsec.errors import NodeError
from dsec.security import seccomp


class OciDriver:
    """Implements `dsec.backends.driver.Driver`. Raises `Unsupported` when the runtime is not there."""

    makes_place = False

    def __init__(self, site: Site, wanted: str) -> None:
        self.site = site
        self.keep = runtime.find_runtime(wanted)
        self.name = os.path.basename(self.keep)
        self._is_crun = self.name == "crun"

    def make(self, plan: LaunchPlan) -> None:
        profile = seccomp.profile(plan.seccomp) if plan.seccomp else None
        config = render(
            plan,
            root=self.site.root,
            args=(GUEST_PATH, "--fd", "3", "--upper", str(UPPER_FD), *guest_options(plan)),
            seccomp_blob=seccomp.compiled(profile) if profile is not None and self._is_crun else b"",
            seccomp_oci=seccomp.to_oci(profile) if profile is not None and not self._is_crun else None,
            nofile=runtime.nofile(),
            cgroups_path="" if self._is_crun else f"/{plan.cgroup}",
            empty=f"{self.site.prefix}0" if self._is_crun else "",  # runc allows no mount inside /proc
            masked_directories=self.site.masked_directories,
            join_userns=self._is_crun,
        )
        with open(f"{plan.state_dir}/config.json", "wb") as file:
            file.write(msgspec.json.encode(config))

    def options(self, plan: LaunchPlan, groups: tuple[str, ...]) -> list[str]:
        """What the launcher is told besides its layers and where the root is."""
        return [*launcher_options(self.site, plan, groups), *(["-j"] if plan.idmap is not None and self._is_crun else [])]

    async def start(self, plan: LaunchPlan, place: Place) -> int:
        assert place.listener is not None
        box = plan.state_dir
        argv = self.options(plan, place.groups.joins)
        argv += ["--", self.keep, "--root", f"{box}/runtime", "--log", f"{box}/runtime.log"]
        if self._is_crun:
            argv += ["--cgroup-manager", "disabled"]
        argv += ["run", "--detach", "--preserve-fds", "2", "--pid-file", f"{box}/pid", "--bundle", box, plan.ulid]
        started = self.site.holder.request(
            "launch",
            fds=(place.listener.fileno(),),
            ulid=plan.ulid,
            lowers=[layer.digest for layer in plan.lowers],
            top=f"{box}/{TOP}" if self.site.network.as_layer(plan) else "",
            argv=argv,
            env=launch_env(),
            pidfile=f"{box}/pid",
        )
        try:
            answer = await asyncio.wait_for(started, LAUNCH_TIMEOUT)
        except TimeoutError as error:
            raise NodeError(f"the runtime did not end within {LAUNCH_TIMEOUT} s", sandbox=plan.id, reason="runtime") from error
        return int(answer["pid"])

    async def detail(self, plan: LaunchPlan) -> str:
        with contextlib.suppress(OSError):
            async with aiofiles.open(f"{plan.state_dir}/runtime.log", errors="replace") as file:
                text = (await file.read()).strip()
            return f": {text[-500:]}" if text else ""
        return ""
