"""Turn a directory into an EROFS image with mkfs.erofs, so that one tree always gives one image, bit for bit.

What must not vary: the UUID (a fixed one), the order of entries (mkfs.erofs sorts names) and the build time. The last is the trap:
``-T0`` would fix it but also sets every file's mtime to 0, which makes each .pyc stale (Python starts 4 to 15 times slower). With
SOURCE_DATE_EPOCH the build time is fixed and mtimes are only clamped to it, so the tree's newest mtime as the epoch keeps
every mtime and varies with nothing else.

Works from erofs-utils 1.5 (Debian 12) on. From 1.8 on holes are left out of the blob, and the images differ from those of 1.5: nodes
that are to make the same digests need the same. Where the release has an older one, set-up builds 1.8 beside our own Python (`program`).
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import sys

import msgspec

from dsec import syscalls
from dsec.errors import InvalidRequest, NodeError, Unsupported
from dsec.layers import tools

_UUID = "6a1f5f2e-64c5-4d5e-8a0c-d5ec00000001"  # the same in every image: content, not identity, names a layer
MAGIC = struct.pack("<I", 0xE0F5E1E2)
_MAGIC_OFFSET = 1024


class Survey(msgspec.Struct, frozen=True):
    """What a tree holds: entries, bytes in regular files, the newest mtime in seconds, sockets left out."""

    entries: int
    bytes: int
    newest: int
    sockets: int = 0


def program() -> str:
    """The mkfs.erofs that makes layers: the one that set-up put beside our Python (DSEC_DISABLE=erofs_utils hides it), else the system's.

    Raises `Unsupported` when there is none."""
    own = os.path.join(sys.prefix, "bin", "mkfs.erofs")
    if not syscalls.disabled("erofs_utils") and os.access(own, os.X_OK):
        return own
    return tools.find("mkfs.erofs", "erofs-utils")


def available() -> bool:
    """True when images can be built here: mkfs.erofs is installed (and not hidden by DSEC_DISABLE=mkfs_erofs)."""
    if syscalls.disabled("mkfs_erofs"):
        return False
    try:
        program()
    except Unsupported:
        return False
    return True


def is_image(path: str | os.PathLike[str]) -> bool:
    """True when the file has EROFS's magic number."""
    with open(path, "rb") as file:
        file.seek(_MAGIC_OFFSET)
        return file.read(4) == MAGIC


def survey(tree: str, prune: bool = False) -> Survey:
    """Count a tree that is about to become a layer; blocking. ``prune`` removes sockets: they mean nothing without their process.

    Raises `InvalidRequest` for a device node: inside a sandbox it would be a door to the host's devices. Overlayfs's own
    whiteout (a character device 0:0) is not one.
    """
    entries = size = sockets = 0
    links: set[tuple[int, int]] = set()
    stack = [tree]
    newest = int(os.lstat(tree).st_mtime)
    while stack:
        with os.scandir(stack.pop()) as listing:
            for entry in listing:
                status = entry.stat(follow_symlinks=False)
                entries += 1
                if stat.S_ISSOCK(status.st_mode):
                    sockets += 1
                    if prune:
                        os.unlink(entry.path)
                    continue
                if stat.S_ISBLK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev != 0):
                    raise InvalidRequest(
                        "a layer must not hold device nodes", field="path", value=os.path.relpath(entry.path, tree), fix="remove it first"
                    )
                newest = max(newest, int(status.st_mtime))
                if stat.S_ISDIR(status.st_mode):
                    stack.append(entry.path)
                elif stat.S_ISREG(status.st_mode) and (status.st_nlink == 1 or (status.st_dev, status.st_ino) not in links):
                    size += status.st_size
                    if status.st_nlink > 1:
                        links.add((status.st_dev, status.st_ino))
    return Survey(entries, size, max(newest, 0), sockets)


async def build(
    tree: str, image: str, found: Survey, *, all_root: bool = False, blob: str = "", progress: tools.Progress = tools.silent
) -> None:
    """Write ``image`` from ``tree``, uncompressed (pages are shared by all sandboxes, and on-demand loading needs plain offsets).

    With ``blob`` the image holds the metadata alone and the files' data goes to that file, in 64 KiB units of which equal ones are kept
    once (`manifest`). Extended attributes (file capabilities, ACLs, user.*) are kept. ``all_root``: every entry belongs to root. Raises
    `NodeError` and leaves no image when mkfs.erofs fails, `Unsupported` when it is missing.
    """
    argv = [program(), "--quiet", "-U", _UUID, *(["--all-root"] if all_root else [])]
    argv += [*(["--chunksize=65536", f"--blobdev={blob}"] if blob else []), image, tree]
    try:
        await tools.run(argv, env={"SOURCE_DATE_EPOCH": str(found.newest)}, progress=progress)
        if not is_image(image):  # 1.5 exits 0 after some failures to write
            raise NodeError(f"mkfs.erofs wrote no EROFS image from {tree}", retryable=False)
    except BaseException:
        if os.path.lexists(image):
            os.unlink(image)
        raise


def file_digest(path: str | os.PathLike[str]) -> str:
    """``sha256:…`` of a file's bytes; blocking, about 0.6 ms a MiB without SHA instructions."""
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(tree: str) -> str:
    """``sha256:…`` of all that a sandbox could see of a directory: names, kinds, modes, owners, mtimes, xattrs, contents; blocking."""
    total = hashlib.sha256()
    seen: dict[tuple[int, int], str] = {}
    for path in _walk_sorted(tree):
        status = os.lstat(path)
        name = os.path.relpath(path, tree)
        target = ""
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            # Hard links are content: two names of one file behave unlike two equal files.
            twin = seen.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
            target = f"link:{twin}" if twin != name else file_digest(path)
        xattrs = sorted((key, os.getxattr(path, key, follow_symlinks=False)) for key in os.listxattr(path, follow_symlinks=False))
        row = (name, status.st_mode, status.st_uid, status.st_gid, int(status.st_mtime), status.st_rdev, target, xattrs)
        total.update(repr(row).encode("utf-8", "surrogateescape") + b"\n")
    return "sha256:" + total.hexdigest()


def _walk_sorted(tree: str) -> list[str]:
    paths = [tree]
    for parent, dirs, files in os.walk(tree):
        paths += [os.path.join(parent, name) for name in (*dirs, *files)]
    return sorted(paths)
