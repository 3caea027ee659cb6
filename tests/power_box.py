"""A disk whose power can be cut: a file system in a file, of which a reflink copy is taken at one moment, as it would be found after it.

What a program wrote and did not sync is lost with its pages; what the file system under test had sent to its device without a flush is
not, so a cut here is kinder than a real one to the file system, and as hard to the programs on it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

FICLONE = 0x40049409
PATIENCE = 20.0  # seconds


class Disk:
    """``place`` is the directory on it. The copies lie on a btrfs, in a file too, for that can share blocks between files."""

    def __init__(self, folder: Path, size: int = 512 << 20) -> None:
        self.place = folder / "disk"
        self._outer, self._cut = folder / "outer", folder / "cut"
        self._store = folder / "outer.img"
        self._size = size
        self._mounted: list[Path] = []

    def open(self) -> None:
        with self._store.open("wb") as file:
            file.truncate(8 * self._size)
        self._run("mkfs.btrfs", "-q", str(self._store))
        self._mount(self._store, self._outer)
        with self._image.open("wb") as file:
            file.truncate(self._size)
        self._run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount(self._image, self.place)

    @property
    def _image(self) -> Path:
        return self._outer / "disk.img"

    def cut(self, number: int) -> Path:
        """The disk as it is at this moment; blocking."""
        copy = self._outer / f"cut-{number}.img"
        source, target = os.open(self._image, os.O_RDONLY), os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.ioctl(target, FICLONE, source)
        finally:
            os.close(source)
            os.close(target)
        return copy

    def power_on(self, copy: Path) -> Path:
        """Mount a copy; the file system finds itself not unmounted, and replays its journal."""
        self._mount(copy, self._cut)
        return self._cut

    def power_off(self, copy: Path) -> None:
        self._unmount(self._cut)
        copy.unlink()

    def close(self) -> None:
        for place in reversed(list(self._mounted)):
            self._unmount(place)
        self._store.unlink(missing_ok=True)

    def _mount(self, image: Path, place: Path) -> None:
        place.mkdir(exist_ok=True)
        self._run("mount", "-o", "loop", str(image), str(place))
        self._mounted.append(place)

    def _unmount(self, place: Path) -> None:
        """What was on it may end a moment after it was told to, and a loop device lets go of its file a moment after it was unmounted."""
        end = time.monotonic() + PATIENCE
        while (done := subprocess.run(("umount", str(place)), capture_output=True, text=True, check=False)).returncode:
            assert "busy" in done.stderr, done.stderr
            assert time.monotonic() < end, done.stderr
            time.sleep(0.1)
        self._mounted.remove(place)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, (command, done.stderr)


def missing() -> str:
    """Why there is no such disk here; "" when there can be."""
    for program in ("mkfs.btrfs", "mkfs.ext4"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if os.geteuid() == 0 else "mounting needs root"
