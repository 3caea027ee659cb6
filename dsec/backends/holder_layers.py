"""The holder's part of layers: one detached mount for each, and a pin that keeps its store from removing it.

Another holder of this machine may take such a mount over instead of making its own: two mounts of one image have two super blocks, and
each of them caches what is read. What is taken over is the very descriptor: a mount that is attached nowhere goes with its last one.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dsec import syscalls
from dsec.backends.holder_parts import Call, Core, Refused

GUEST_LAYER = "guest"


class LayersHeld(Core):
    """A part of the holder."""

    def __init__(self) -> None:
        self.layers: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.attached: dict[str, str] = {}
        self.place = ""
        self.by_paths = False  # overlays are made by paths, and layers are attached in our namespace

    def op_layer(self, call: Call) -> dict[str, Any]:
        """Mount a layer once; idempotent by its key. ``of``: another holder's pid and what it answered to `lend_layer`."""
        if call["key"] not in self.layers:
            import msgspec

            from dsec.layers.mounts import LayerMount, pin_layer

            mount = msgspec.convert(call["mount"], LayerMount)
            pin = pin_layer(mount)  # `dsec layer rm` and gc leave a layer alone while this is open
            try:
                fd = self._borrow(**call["of"]) if call.message.get("of") and not self.by_paths else -1
                fd = fd if fd >= 0 else self.guarded(mount)
                try:
                    self._hold(call["key"], fd)
                except BaseException:
                    os.close(fd)
                    raise
            except BaseException:
                os.close(pin)
                raise
            self.pins[call["key"]] = pin
        self.hand_out(call["key"], call)
        return {}

    def op_lend_layer(self, call: Call) -> dict[str, Any]:
        """Where another holder finds the mount of a layer, and by what it knows that it is this one."""
        if self.by_paths or call["key"] not in self.layers:
            raise Refused("there is no such mount to lend")
        fd = self.layers[call["key"]]
        found = os.fstat(fd)
        return {"pid": os.getpid(), "fd": fd, "device": found.st_dev, "inode": found.st_ino}

    def _borrow(self, pid: int, fd: int, device: int, inode: int) -> int:
        """-1 where it cannot be had, or is something else by now."""
        try:
            process = syscalls.pidfd_open(pid)
            try:
                taken = syscalls.pidfd_getfd(process, fd)
            finally:
                os.close(process)
        except OSError:
            return -1
        found = os.fstat(taken)
        if (found.st_dev, found.st_ino) != (device, inode):
            os.close(taken)
            return -1
        return taken

    def op_drop_layer(self, call: Call) -> dict[str, Any]:
        if call["key"] != GUEST_LAYER and (fd := self.layers.pop(call["key"], None)) is not None:
            os.close(fd)
            os.close(self.pins.pop(call["key"]))
            if place := self.attached.pop(call["key"], ""):
                syscalls.umount2(place, syscalls.MNT_DETACH)
                os.rmdir(place)
            self.unmark(call["key"])
            self.let_go()
        return {}

    def _hold(self, key: str, fd: int) -> None:
        """Keep a layer's mount. A kernel that cannot clone detached mounts (before Linux 6.15) gets it attached here; the descriptor
        is good for both."""
        if self.by_paths:
            place = f"{self.place}/held-{time.monotonic_ns()}"
            os.mkdir(place, 0o700)
            syscalls.move_mount(fd, place)
            self.attached[key] = place
        self.layers[key] = fd

    def _layers_of(self, call: Call) -> list[int]:
        """Descriptors of a launch's layers, topmost first; the caller closes them."""
        keys = [GUEST_LAYER, *call["lowers"]]
        if missing := [key for key in keys if key not in self.layers]:
            raise Refused(f"layers are not mounted: {', '.join(missing)}")
        top = call.message.get("top", "")  # a directory of the sandbox's own above them
        above = [os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)] if top else []
        return above + [os.dup(self.layers[key]) for key in keys]
