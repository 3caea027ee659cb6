"""The holder's part in layers that are loaded on demand: it marks them before it mounts them, keeps the kits, and keeps a worker alive.

Every Edge that asks for such a layer is given a copy of its kit, to keep: a holder that dies is followed by one to which the Edge gives
the kits back (`restore`). The worker is started with the first kit, or ahead of it (`loader`), and again when it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any

from dsec import syscalls
from dsec.backends.holder_parts import Call, Core, Refused

if TYPE_CHECKING:
    from dsec.layers.lazy import Kit, Loader
    from dsec.layers.mounts import LayerMount

_FAST_DEATHS = 20  # after so many the worker is not started again at once: something is wrong with this node

_RETIRED_S = 30.0  # longer than any launch takes


class OnDemand(Core):
    """A part of the holder."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._loader: Loader | None = None
        self._loader_fds: tuple[int, int] = (-1, -1)
        self._by_fuse: dict[str, LayerMount] = {}  # what is mounted so, until it is whole
        self._retired: list[tuple[float, int, str]] = []

    # --- requests --------------------------------------------------------------------------------------------------

    def op_loader(self, _call: Call) -> dict[str, Any]:
        """Have a worker ready before the first layer needs it (it takes 0.3 s to start)."""
        self._watch_loader(self._get_loader().start)
        return {"pid": self._get_loader().pid}

    def op_ondemand(self, _call: Call) -> dict[str, Any]:
        """The worker's pid, how often one has died, and the layers that are served."""
        loader = self._loader
        return {"pid": loader.pid if loader else 0, "deaths": loader.deaths if loader else 0, "layers": list(loader.kits) if loader else []}

    def op_serves(self, call: Call) -> dict[str, Any]:
        """Whether somebody holds back the readers of this layer's holes: this holder, or a worker that outlived the last one. That one's
        end must not be the end of the mark under what is mounted, so this holder marks the blob too, and asks after that, so that no
        moment is unguarded. (What is mounted through FUSE gets no second guard: if its worker ends too, its readers get EIO.)"""
        import msgspec

        from dsec.layers import fuse
        from dsec.layers.lazy import guarded, make_kit
        from dsec.layers.mounts import LayerMount, bitmap

        mount = msgspec.convert(call["mount"], LayerMount)
        data = mount.devices[-1]
        if self._loader is not None and call["key"] in self._loader.kits:
            return {"served": True}
        if (served := fuse.served(data)) is not None:
            return {"served": served or guarded(data)}
        if mount.lazy is None or not os.path.exists(bitmap(data)):
            return {"served": True}
        kit = None
        if mount.lazy.way == "fanotify":
            with contextlib.suppress(OSError):  # no room for another group: that worker alone, then
                kit = make_kit(mount)
        if kit is not None:
            fcntl.flock(kit.fds[1], fcntl.LOCK_UN)  # others are asked for
        served = guarded(data) or not os.path.exists(bitmap(data))
        if kit is not None and served:
            fcntl.flock(kit.fds[1], fcntl.LOCK_SH)
            self._add(kit)
            self.hand_out(call["key"], call)
        elif kit is not None:
            kit.close()
        return {"served": served}

    def op_restore(self, call: Call) -> dict[str, Any]:
        """Take over a kit that an earlier holder made and the Edge kept; the layer's mount comes separately."""
        if len(call.fds) not in (3, 4):
            raise Refused("a kit has three descriptors, or four")
        if call["spec"]["name"] not in self._get_loader().kits:
            from dsec.layers.lazy import Kit

            self._add(Kit(call["spec"], tuple(os.dup(fd) for fd in call.fds)))
        return {}

    # --- for the holder --------------------------------------------------------------------------------------------

    def guarded(self, mount: LayerMount) -> int:
        """The layer's mount. Before it, the holes of a partly filled blob are guarded and somebody fills it. Raises `OSError`."""
        from dsec.layers import fuse
        from dsec.layers.mounts import bitmap, open_layer

        if mount.lazy is None or not os.path.exists(bitmap(mount.devices[-1])):
            if mount.devices:
                fuse.forget(mount.devices[-1])
            return open_layer(mount)
        name, loader = mount.lazy.name, self._get_loader()
        if fresh := name not in loader.kits:
            self._add(self._kit(mount))
        kit = loader.kits[name]
        if kit.by_fuse:
            self._by_fuse[name] = mount
        fd = kit.open(mount)
        if fresh:
            loader.mounted(name, fd)
        return fd

    def _kit(self, mount: LayerMount) -> Kit:
        """Through FUSE where the kernel has no room for one more fanotify group (fs.fanotify.max_user_groups, 128)."""
        import msgspec

        from dsec.layers.lazy import make_kit

        try:
            return make_kit(mount)
        except OSError as error:
            if mount.lazy is None or mount.lazy.way == "fuse" or error.errno != errno.EMFILE:
                raise
            sys.stderr.write(f"holder: {mount.lazy.name} through FUSE: {error}\n")
            return make_kit(msgspec.structs.replace(mount, lazy=msgspec.structs.replace(mount.lazy, way="fuse")))

    def hand_out(self, name: str, call: Call) -> None:
        """Give the asking Edge a copy of the layer's kit, where it has one."""
        kit = self._loader.kits.get(name) if self._loader is not None else None
        if kit is not None:
            self._send(call.edge, {"event": "kit", "spec": kit.spec}, kit.fds)

    def settle(self, name: str) -> None:
        """The layer is whole. Its mark goes; what is mounted through FUSE stays so, and whoever comes next gets the plain file."""
        from dsec.layers.mounts import open_layer

        kit = self._loader.kits.get(name) if self._loader is not None else None
        if kit is None or not kit.by_fuse:
            self.unmark(name)
            return
        kit.settle()
        if (mount := self._by_fuse.pop(name, None)) is not None:
            try:
                self._replace(name, open_layer(mount))
            except OSError as error:
                sys.stderr.write(f"holder: {name} stays behind FUSE: {error}\n")

    def unmark(self, name: str) -> None:
        """Let go of a layer that this holder no longer mounts, or that is whole: so do the Edges."""
        self._by_fuse.pop(name, None)
        if self._loader is not None and name in self._loader.kits:
            self._loader.drop(name)
            for edge in list(self.edges.values()):
                self._send(edge, {"event": "layer", "name": name, "what": "released"})

    @property
    def loader_pid(self) -> int:
        return self._loader.pid if self._loader is not None else 0

    def end_loader(self) -> None:
        """This holder ends in good order, with no sandbox left: so does its worker. (It outlives a holder that is killed.)"""
        if self._loader is not None:
            self._loader.quit()

    def loader_event(self, fd: int) -> bool:
        """Deal with a descriptor of the worker's; False when it is none."""
        if self._loader is None or fd not in self._loader_fds:
            return False
        if fd == self._loader_fds[1]:
            while (news := self._loader.read()) is not None:
                for edge in list(self.edges.values()):
                    self._send(edge, news)
                if news["what"] == "whole":
                    self.settle(news["name"])
                elif news["what"] == "unused":
                    self.unmark(news["name"])
            if self._loader.sock is not None and self._hung_up(self._loader.sock.fileno()):
                self.epoll.unregister(fd)
                self._loader_fds = (self._loader_fds[0], -1)
            return True
        self._loader.ended()
        self._unwatch_loader()
        for edge in list(self.edges.values()):
            self._send(edge, {"event": "layer", "name": "", "what": "loader_died", "deaths": self._loader.deaths})
        if self._loader.kits and self._loader.deaths < _FAST_DEATHS:
            self._watch_loader(self._loader.start)
        return True

    def sweep(self) -> None:
        """Let go of mounts that were replaced a while ago."""
        while self._retired and self._retired[0][0] < time.monotonic():
            _, fd, place = self._retired.pop(0)
            os.close(fd)
            if place:
                syscalls.umount2(place, syscalls.MNT_DETACH)
                os.rmdir(place)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _replace(self, key: str, fd: int) -> None:
        """Another mount of the same layer, for launches from now on. Those that have begun may still need the one before."""
        if (old := self.layers.pop(key, -1)) < 0:
            os.close(fd)
            return
        self._retired.append((time.monotonic() + _RETIRED_S, old, self.attached.pop(key, "")))
        self._hold(key, fd)

    def _get_loader(self) -> Loader:
        if self._loader is None:
            from dsec.layers.lazy import Loader

            self._loader = Loader()
        return self._loader

    def _add(self, kit: Kit) -> None:
        loader = self._get_loader()
        self._watch_loader(lambda: loader.add(kit))

    def _watch_loader(self, start: Any) -> None:
        loader = self._get_loader()
        before = loader.pidfd
        start()
        if loader.pidfd != before and loader.sock is not None:
            self._loader_fds = (loader.pidfd, loader.sock.fileno())
            for fd in self._loader_fds:
                self.epoll.register(fd, select.EPOLLIN)

    def _unwatch_loader(self) -> None:
        # Closing a descriptor has taken it out of the epoll set.
        self._loader_fds = (-1, -1)

    def _hung_up(self, fd: int) -> bool:
        poll = select.poll()
        poll.register(fd, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))
