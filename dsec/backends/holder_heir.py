"""The holder's part of a death without a successor: when no Edge has been there for a while, somebody ends its sandboxes.

What to do is the Edge's knowledge (cgroups, networks, disks, Docker), so an Edge leaves its holder a command, the heir, that does the
same as an Edge which starts and finds records of nothing: `dsec.backends.orphans`. Where even that cannot be started, the sandboxes are
killed, and what they held on disk waits for the next Edge. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

from dsec.backends.holder_parts import Call, Core, Edge

OUTSIDE_FD = 3  # of the heir: the mount namespace of the Edge that left it
AGAIN = 60.0  # seconds until an heir that left something is started again, at most


class Heirs(Core):
    """A part of the holder: whom the sandboxes are left to, and since when nobody has been there."""

    def __init__(self) -> None:
        self.heir: list[str] = []
        self.grace = 0.0  # seconds; 0 = never
        self.heir_pid = 0
        self.outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._away_since = time.monotonic()
        self._wait = 0.0

    def op_heir(self, call: Call) -> dict[str, Any]:
        """Leave the sandboxes to ``argv``, to be started when no Edge has been connected for ``grace`` seconds (0: never)."""
        self.heir, self.grace = [str(word) for word in call["argv"]], float(call["grace"])
        self._wait = self.grace
        return {}

    def op_edges(self, _call: Call) -> dict[str, Any]:
        """How many are connected, the one that asks included."""
        return {"count": len(self.edges)}

    def patience(self, most: float) -> float:
        """Seconds that the loop may sleep."""
        return min(most, max(0.05, self.grace / 4)) if self.grace and self.sandboxes and not self.edges else most

    def look_after(self) -> None:
        """Called whenever the loop has come round."""
        now = time.monotonic()
        if self.heir_pid:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.heir_pid, os.WNOHANG) == (0, 0):
                    return
            self.heir_pid = 0
            self._away_since, self._wait = now, min(self.grace, AGAIN)
        if self.edges or not self.sandboxes or not self.grace:
            self._away_since = now
            if self.edges:
                self._wait = self.grace
        elif now - self._away_since >= self._wait:
            self._inherit()

    def _inherit(self) -> None:
        try:
            self.heir_pid = os.posix_spawn(
                self.heir[0],
                self.heir,
                dict(os.environ),
                file_actions=[(os.POSIX_SPAWN_DUP2, self.outside, OUTSIDE_FD)],
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE),
            )
        except OSError as error:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"holder: no heir: {error}; the sandboxes are killed\n")
            for ulid in list(self.sandboxes):
                self.op_kill(Call({"ulid": ulid}, [], Edge(self.listener)))  # nobody asks, so nobody is answered
            self._away_since = time.monotonic()
