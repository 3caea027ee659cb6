"""Layers that an Edge keeps from being removed: from when a create has named them until its sandbox has ended.

A name keeps a layer in its store, and so does a mount. One that is given by its digest alone has neither until its first sandbox is
launched, and `dsec layer gc` is another process. So the Edge holds what that one looks at (`mounts.pin_layer`), one descriptor a layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from dsec.errors import NotFound
from dsec.layers.store import LayerStore

_NOTHING = -1  # in a descriptor's place


class Pins:
    """Counted. Each method takes some microseconds, and reads two small files for a layer that is not held yet.

    What is mounted keeps its layer anyway, so a descriptor that nobody needs any more stays until `unmounted` says that the mount has
    gone: the next create finds it.
    """

    def __init__(self, store: LayerStore) -> None:
        self._store = store
        self._held: dict[str, tuple[int, int]] = {}  # digest -> its descriptor, and how often it is held

    def take(self, digests: Iterable[str], *, mounted: bool = False) -> None:
        """Hold all of them once more, or none. Raises `NotFound` for one that has gone; where they are ``mounted`` it is counted only."""
        taken: list[str] = []
        try:
            for digest in digests:
                fd, count = self._held.get(digest, (_NOTHING, 0))
                self._held[digest] = (self._pin(digest, mounted) if fd == _NOTHING else fd, count + 1)
                taken.append(digest)
        except NotFound:
            self.give_back(taken)
            raise

    def _pin(self, digest: str, mounted: bool) -> int:
        try:
            return self._store.pin(digest)
        except NotFound:
            if not mounted:
                raise
            return _NOTHING

    def give_back(self, digests: Iterable[str], mounted: Callable[[str], bool] = lambda _: False) -> None:
        """Hold each of them once less; one that is not held stays so. ``mounted``: which are."""
        for digest in digests:
            fd, count = self._held.pop(digest, (_NOTHING, 0))
            if count > 1 or (fd != _NOTHING and mounted(digest)):
                self._held[digest] = (fd, max(0, count - 1))
            elif fd != _NOTHING:
                os.close(fd)

    def unmounted(self, digest: str) -> None:
        """It is mounted no more."""
        fd, count = self._held.get(digest, (_NOTHING, 1))
        if not count:
            del self._held[digest]
            os.close(fd)
