"""Whether one backend can keep the processes of its sandboxes and begin sandboxes from them, and with what."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dsec import trees
from dsec.backends import criu
from dsec.backends.capture import Capture, Subject, Tools
from dsec.backends.guest import build
from dsec.backends.restore import RestoreDriver
from dsec.errors import Unsupported

if TYPE_CHECKING:
    from dsec.backends.base import LaunchPlan
    from dsec.backends.driver import Driver, Site


class Snapshots:
    """``missing`` says why not; "" when it can."""

    def __init__(self, site: Site, state_dir: str) -> None:
        self._site = site
        self._place = f"{state_dir}/processes"
        self._restorer: RestoreDriver | None = None
        self._tools: Tools | None = None
        self.missing = "not looked at yet"

    def look(self) -> None:
        """For a CRIU that will do on this kernel. Blocks: it is started twice."""
        self._tools = None
        try:
            path, version = criu.find()
            shim = str(build.ensure(program="shim"))
            self.missing = criu.kernel_trouble(path, self._site.launcher, "guard", str(os.getpid()))  # what it begins ends with it
        except Unsupported as error:
            self.missing = error.message
        except build.BuildError as error:
            self.missing = str(error)
        else:
            self._tools = Tools(criu=path, version=version, launcher=self._site.launcher, shim=shim)

    def settle(self, driver: Driver, *, userns: bool) -> None:
        """Once it is known what starts the sandboxes."""
        if driver.name != "native":
            self.missing = f"processes that {driver.name} started are not kept: only the native launcher's"
        elif not userns:
            self.missing = "without user namespaces processes are not kept"
        self._restorer = RestoreDriver(self._site, self._tools) if self._tools is not None and not self.missing else None

    def driver(self, plan: LaunchPlan, usual: Driver) -> Driver:
        """What starts this plan. Raises `Unsupported`."""
        if not plan.processes:
            return usual
        if self._restorer is None:
            raise self._refused(plan.id)
        return self._restorer

    def capture(self, place: str, subject: Subject) -> Capture:
        """Raises `Unsupported`."""
        if self._restorer is None:
            raise self._refused(subject.sandbox)
        return Capture(self._restorer.programs, place, subject)

    def place(self, name: str) -> str:
        """Where the images of a capture lie that has this name."""
        return f"{self._place}/{name.replace('/', '%')}"

    def names(self) -> frozenset[str]:
        """Of the captures that have images. Blocks, as the next."""
        try:
            return frozenset(name.replace("%", "/") for name in os.listdir(self._place))
        except FileNotFoundError:
            return frozenset()

    def forget(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            trees.remove(self.place(name))

    def _refused(self, sandbox: str) -> Unsupported:
        return Unsupported(f"this node cannot keep processes: {self.missing}", sandbox=sandbox, reason="snapshot", fix='use "disk"')
