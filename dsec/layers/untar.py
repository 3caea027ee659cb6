"""Extract a tar that nobody vouches for into a private directory, as root, so that nothing lands outside it.

The kernel keeps the boundary, not string checks: each member's parent directory is opened with openat2(RESOLVE_IN_ROOT), so links
inside the archive (absolute ones too, which honest archives contain) resolve inside the target, and the member itself is created
by descriptor with O_EXCL | O_NOFOLLOW or replaced. Refused with a typed error: names with ``..``, device nodes, hard links to
what is not in the archive, more members or bytes than `Limits`, headers of absurd size. A leading ``/`` is dropped, as GNU tar does.
A later member replaces an earlier one of the same name. Blocking: run it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from dsec import syscalls
from dsec.errors import InvalidRequest, NodeError, Unsupported

Stop = threading.Event

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20
_MAX_HEADER = 1 << 20  # an extended header is read into memory whole
_EXTENDED = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.SOLARIS_XHDTYPE})
_XATTR = "SCHILY.xattr."
_DIR = os.O_RDONLY | os.O_DIRECTORY


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one archive may hold: entries, and bytes of file content after decompression (holes count)."""

    members: int = 2_000_000
    bytes: int = 64 << 30


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was extracted; ``notes`` say what was left out on purpose, once a kind."""

    members: int
    bytes: int
    notes: tuple[str, ...] = ()


class _Member(tarfile.TarInfo):
    """A header, checked before tarfile acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or (info.type in _EXTENDED and info.size > _MAX_HEADER):
            raise _refuse("a header of impossible size", info.name)
        return info


def extract(source: str | BinaryIO, target: Path, limits: Limits, stop: Stop, keep_owners: bool = True) -> Done:
    """Extract a tar file (path) or stream into an existing directory. ``stop``, once set, ends it with `NodeError`.
    ``keep_owners``: as the archive says, where the caller may (root); else everything belongs to the caller.

    Raises `InvalidRequest` for the archive's faults (damaged, truncated, hostile; the value names the member), `Unsupported` for zstd
    without its program, `NodeError` for the disk's. What was extracted before an error stays: the caller removes the directory.
    """
    root = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _open(source) as stream, tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member, errorlevel=2) as archive:
            return _Extraction(root, limits, stop, keep_owners and os.geteuid() == 0).run(archive)
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"not a readable tar: {error}", field="path", value=str(source), fix="check the file") from error
    except OSError as error:
        # zlib and lzma report damage in the data as OSError without an errno.
        if error.errno is None:
            raise InvalidRequest(f"not a readable tar: {error}", field="path", value=str(source), fix="check the file") from error
        raise NodeError(f"cannot extract: {error}", retryable=error.errno == errno.ENOSPC) from error
    finally:
        os.close(root)


def _refuse(why: str, name: str) -> InvalidRequest:
    return InvalidRequest(why, field="tar", value=name, fix="make the archive without it")


@contextlib.contextmanager
def _open(source: str | BinaryIO) -> Iterator[IO[bytes]]:
    if not isinstance(source, str):
        yield source
        return
    with open(source, "rb") as file:
        if file.read(4) != _ZSTD_MAGIC:
            file.seek(0)
            yield file
            return
    program = shutil.which("zstd")
    if program is None:
        raise Unsupported("the archive is compressed with zstd", field="path", value=source, reason="no zstd", fix="apt-get install zstd")
    with subprocess.Popen([program, "-dcq", "--", source], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
            while process.stdout.read(_CHUNK):  # padding after the archive's end
                pass
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise InvalidRequest("zstd says the archive is damaged", field="path", value=source, fix="check the file")


class _Extraction:
    def __init__(self, root: int, limits: Limits, stop: Stop, owners: bool) -> None:
        self._root = root
        self._limits = limits
        self._stop = stop
        self._owners = owners
        self._directories: dict[str, tarfile.TarInfo] = {}
        self._notes: dict[str, None] = {}
        self._bytes = 0

    def run(self, archive: tarfile.TarFile) -> Done:
        members = 0
        for member in archive:
            members += 1
            if self._stop.is_set():
                raise NodeError("the import was cancelled")
            if members > self._limits.members:
                raise _refuse(f"more than {self._limits.members} members", member.name)
            self._one(archive, member)
        # Deepest first: a directory's mtime changes with every entry made in it, and its mode may forbid making one.
        for name in sorted(self._directories, reverse=True):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # replaced by a later member
                fd = syscalls.openat2(self._root, name, _DIR | os.O_NOFOLLOW)
                try:
                    self._finish(fd, self._directories[name])
                finally:
                    os.close(fd)
        return Done(members=members, bytes=self._bytes, notes=tuple(self._notes))

    def _one(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _clean(member.name, member.name)
        if name == ".":
            if not member.isdir():
                raise _refuse("the archive's root is not a directory", member.name)
            self._directories["."] = member
            return
        if member.ischr() or member.isblk():
            raise _refuse("a layer must not hold device nodes", member.name)
        parent, _, leaf = name.rpartition("/")
        where = self._parent(parent, member.name)
        try:
            if member.isdir():
                self._directory(where, leaf, name, member)
                return
            self._clear(where, leaf, member.name)
            if member.isreg():
                self._file(archive, where, leaf, member)
            elif member.issym():
                self._link(where, leaf, member)
            elif member.islnk():
                self._hard_link(where, leaf, member)
            elif member.isfifo():
                os.mkfifo(leaf, 0o600, dir_fd=where)
                self._finish_at(where, leaf, member)
            else:
                raise _refuse(f"a member of unknown type {member.type!r}", member.name)
        finally:
            os.close(where)

    def _parent(self, path: str, member: str) -> int:
        """A descriptor of the directory, made where absent (root, 0755), never outside of the target."""
        if not path:
            return os.dup(self._root)
        try:
            return syscalls.openat2(self._root, path, _DIR | os.O_PATH)
        except FileNotFoundError:
            pass
        except (NotADirectoryError, OSError) as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise
            raise _refuse("its parent is not a directory", member) from error
        above, _, leaf = path.rpartition("/")
        where = self._parent(above, member)
        try:
            os.mkdir(leaf, 0o755, dir_fd=where)
        except FileExistsError:  # a link that leads nowhere
            raise _refuse("its parent is a link to nothing in the archive", member) from None
        finally:
            os.close(where)
        return syscalls.openat2(self._root, path, _DIR | os.O_PATH)

    def _clear(self, where: int, leaf: str, member: str) -> None:
        try:
            status = os.stat(leaf, dir_fd=where, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise _refuse("a name longer than 255 bytes", member) from error
            raise
        if stat.S_ISDIR(status.st_mode):
            try:
                os.rmdir(leaf, dir_fd=where)
            except OSError as error:
                raise _refuse("it would replace a directory that is not empty", member) from error
        else:
            os.unlink(leaf, dir_fd=where)

    def _directory(self, where: int, leaf: str, name: str, member: tarfile.TarInfo) -> None:
        try:
            status = os.stat(leaf, dir_fd=where, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(leaf, 0o700, dir_fd=where)
        else:
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(leaf, dir_fd=where)
                os.mkdir(leaf, 0o700, dir_fd=where)
        self._directories[name] = member

    def _file(self, archive: tarfile.TarFile, where: int, leaf: str, member: tarfile.TarInfo) -> None:
        self._bytes += member.size
        if self._bytes > self._limits.bytes:
            raise _refuse(f"more than {self._limits.bytes} bytes of content", member.name)
        content = archive.extractfile(member)
        assert content is not None  # it is a regular file
        fd = os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=where)
        try:
            written = 0
            while chunk := content.read(_CHUNK):
                if self._stop.is_set():
                    raise NodeError("the import was cancelled")
                written += len(chunk)
                if member.sparse is not None and not chunk.strip(b"\0"):
                    os.lseek(fd, len(chunk), os.SEEK_CUR)
                    continue
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            if written != member.size:
                raise _refuse(f"truncated: {written} of {member.size} bytes", member.name)
            os.ftruncate(fd, written)  # a sparse file may end in a hole
            self._finish(fd, member)
        finally:
            os.close(fd)

    def _link(self, where: int, leaf: str, member: tarfile.TarInfo) -> None:
        # Where it points is not our concern: it is only ever followed inside a sandbox, or in-root by this extraction.
        if not member.linkname or "\0" in member.linkname or len(os.fsencode(member.linkname)) > 4095:
            raise _refuse("a symbolic link without a usable target", member.name)
        os.symlink(member.linkname, leaf, dir_fd=where)
        self._finish_at(where, leaf, member)

    def _hard_link(self, where: int, leaf: str, member: tarfile.TarInfo) -> None:
        target = _clean(member.linkname, member.name)
        parent, _, name = target.rpartition("/")
        try:
            origin = syscalls.openat2(self._root, parent or ".", _DIR | os.O_PATH)
        except OSError as error:
            raise _refuse("a hard link to what is not in the archive", member.name) from error
        try:
            os.link(name, leaf, src_dir_fd=origin, dst_dir_fd=where, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EPERM, errno.ENOTDIR):  # EPERM: a directory
                raise
            raise _refuse("a hard link to what is not a file of the archive", member.name) from error
        finally:
            os.close(origin)

    def _finish(self, fd: int, member: tarfile.TarInfo) -> None:
        """Owner before mode (chown clears set-id bits) before attributes (chown drops capabilities) before time."""
        if self._owners:
            os.fchown(fd, *_ids(member))
        os.fchmod(fd, stat.S_IMODE(member.mode))
        for key, value in member.pax_headers.items():
            if key.startswith(_XATTR):
                self._attribute(fd, key.removeprefix(_XATTR), value)
        os.utime(fd, ns=_times(member))

    def _finish_at(self, where: int, leaf: str, member: tarfile.TarInfo) -> None:
        if self._owners:
            os.chown(leaf, *_ids(member), dir_fd=where, follow_symlinks=False)
        if not member.issym():
            os.chmod(leaf, stat.S_IMODE(member.mode), dir_fd=where)
        os.utime(leaf, ns=_times(member), dir_fd=where, follow_symlinks=False)

    def _attribute(self, fd: int, key: str, value: str) -> None:
        # trusted.overlay.* would steer the overlay that the layer ends up in, security.* other than capabilities the host's policy.
        honest = (key.startswith("user.") and not key.startswith("user.overlay.")) or key == "security.capability"
        if not honest:
            self._notes[f"extended attribute {key.partition('.')[0]}.* left out"] = None
            return
        try:
            os.setxattr(fd, key, value.encode("utf-8", "surrogateescape"))
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM):
                raise
            self._notes[f"extended attribute {key} cannot be set here"] = None


def _clean(name: str, member: str) -> str:
    """A member's name relative to the root. Raises `InvalidRequest` for one that tries to leave it or cannot be a path."""
    if "\0" in name or len(os.fsencode(name)) > 4095:
        raise _refuse("a name that cannot be a path", member)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _refuse("a name that leads out of the archive", member)
    if any(len(os.fsencode(part)) > 255 for part in parts):
        raise _refuse("a name longer than 255 bytes", member)
    return "/".join(parts) or "."


def _ids(member: tarfile.TarInfo) -> tuple[int, int]:
    if not (0 <= member.uid < 65_534 and 0 <= member.gid < 65_534):
        raise InvalidRequest("an owner outside of 0…65533", field="tar", value=member.name, fix="give --owner or make it as another user")
    return member.uid, member.gid


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    ns = int(min(max(member.mtime, 0), 1 << 33) * 1_000_000_000)
    return ns, ns
