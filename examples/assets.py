"""What the demo's layers are made of: a project's source distribution with one seeded bug, and a toolkit of pinned wheels.

Both are fetched once with pip, checked (the sdist by its sha256) and kept as plain trees in the cache; importing them as layers is the
demo's business. A tree is built beside its place and renamed, so a half-made one is never used.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from examples.trajectory import Trajectory


class AssetError(RuntimeError):
    """Something could not be fetched or is not what was pinned."""


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise AssetError(f"{' '.join(command[2:])} failed: {done.stderr.strip()[-1000:]}")


def _build(target: Path, fill: Callable[[Path], None]) -> Path:
    """``target``, filled by ``fill`` into a neighbour first unless it is there already."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as scratch:
        tree = Path(scratch, "tree")
        tree.mkdir(mode=0o755)
        fill(tree)
        try:
            tree.rename(target)
        except OSError:
            if not target.is_dir():  # somebody else was faster: theirs is as good
                raise
    return target


def fetch_sdist(trajectory: Trajectory, cache: Path) -> Path:
    """The source distribution, downloaded unless it is in the cache.

    Raises:
        AssetError: pip failed, or the file's sha256 is not the pinned one.
    """
    source = trajectory.workspace
    path = cache / source.sdist
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _pip(["download", "--no-deps", "--no-binary", ":all:", "--dest", str(cache), f"{source.project}=={source.version}"])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        path.unlink()
        raise AssetError(f"{source.sdist} has sha256 {digest}, pinned is {source.sha256}: it was removed, run again")
    return path


def workspace_tree(trajectory: Trajectory, cache: Path) -> Path:
    """A tree that holds the project at its place in the sandbox, with the bug in it. Modules are compiled, as an image would have them."""
    source = trajectory.workspace
    sdist = fetch_sdist(trajectory, cache)

    def fill(tree: Path) -> None:
        with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
            with tarfile.open(sdist) as archive:
                if hasattr(tarfile, "data_filter"):
                    archive.extractall(scratch, filter="data")
                else:  # Debian 12's Python has no extraction filters yet; the archive is the pinned one, byte by byte
                    archive.extractall(scratch)
            home = tree / source.target
            home.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(scratch, f"{source.project}-{source.version}"), home)
        broken = home / trajectory.seeded_bug.path
        broken.write_text(trajectory.seeded_bug.apply(broken.read_text()))
        _normalise(tree)
        compileall.compile_dir(str(home), quiet=2, stripdir=str(tree), prependdir="/")

    return _build(cache / f"workspace-{_key(source.sha256, str(trajectory.seeded_bug))}", fill)


def toolkit_tree(trajectory: Trajectory, cache: Path) -> Path:
    """A tree with the toolkit's wheels at their place in the sandbox."""
    kit = trajectory.toolkit

    def fill(tree: Path) -> None:
        target = tree / kit.target
        target.parent.mkdir(parents=True, exist_ok=True)
        _pip(["install", "--no-deps", "--only-binary", ":all:", "--no-compile", "--target", str(target), *kit.wheels])
        _normalise(tree)
        compileall.compile_dir(str(target), quiet=2, stripdir=str(tree), prependdir="/")

    return _build(cache / f"toolkit-{_key(*kit.wheels)}", fill)


def _key(*parts: str) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"  # compiled modules are of this Python
    return hashlib.sha256("\0".join((version, *parts)).encode()).hexdigest()[:16]


def _normalise(tree: Path) -> None:
    """Root's, and readable by all, whatever the caller's umask and the archive's owners were."""
    for folder, _, files in os.walk(tree):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o111 | 0o644)
            os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)
