"""The holder's part of disks: a btrfs in a file, mounted in the holder's namespace only, for uppers that are its subvolumes.

The launchers find it there; the Edge reaches it as /proc/<holder>/root/…. What sandboxes stand on it outlives a holder that is killed,
for their overlays hold it; the next holder mounts the same file system again. It ends, with its loop device, with the last of them.
Standard library only.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dsec import syscalls
from dsec.backends import btrfs
from dsec.backends.holder_parts import Call, Refused

TRIES = 40
PAUSE = 0.05  # seconds


class DiskStores:
    """Mounted stores, by where they are."""

    def __init__(self) -> None:
        self.stores: dict[str, str] = {}

    def op_disks(self, call: Call) -> dict[str, Any]:
        """Mount the store ``image`` at ``place``; idempotent."""
        place = call["place"]
        if place in self.stores:
            return {}
        os.makedirs(place, mode=0o700, exist_ok=True)
        for left in reversed(range(TRIES)):
            try:
                fd = btrfs.mount_image(call["image"])
                break
            except OSError as error:  # its last user has just gone, and its loop device is going
                if not left:
                    raise Refused(f"the store of disks {call['image']}: {error}") from error
                time.sleep(PAUSE)
        syscalls.move_mount(fd, place)
        os.close(fd)
        self.stores[place] = call["image"]
        return {}
