"""Extract a tar that nobody vouches for, so that nothing lands outside the target: the core of importing layers (`dsec.layers.untar`)
and of downloads (libdsec).

String checks are not the boundary: every directory is opened by a function that cannot leave the target, and the member itself is
created by descriptor with O_EXCL | O_NOFOLLOW or replaced. Layers resolve links inside the target (openat2, RESOLVE_IN_ROOT), since
honest images hold members behind them; a download follows no link at all (`beneath`). Refused with a typed error: names with ``..``,
hard links to what is not in the archive, more members or bytes than `Limits`, headers of absurd size. A leading ``/`` is dropped, as GNU
tar does. A later member replaces an earlier one of the same name. Memory does not grow with the archive but for its directories.
Blocking: run it in a thread. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tarfile
import threading
from collections.abc import Callable
from typing import IO, Any

import msgspec

from dsec.errors import InvalidRequest, NodeError

Stop = threading.Event
Opener = Callable[[int, str, int], int]  # (root, path below it, flags) -> descriptor, which cannot be outside of root

_CHUNK = 1 << 20
_BUFFER = 256 << 10  # bytes read of the stream at once
_MAX_HEADER = 1 << 20  # an extended header is read into memory whole
_MAX_LATER = 100_000  # directories whose mode and time are set when all is there
_MAX_PIECES = 65_536  # of one sparse file
_EXTENDED = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.SOLARIS_XHDTYPE})
_XATTR = "SCHILY.xattr."
_PATH: int = getattr(os, "O_PATH", os.O_RDONLY)
_DIR = os.O_RDONLY | os.O_DIRECTORY


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one archive may hold: entries, and bytes of file content after decompression (holes count)."""

    members: int = 2_000_000
    bytes: int = 64 << 30


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was extracted; ``notes`` say what was left out on purpose, once a kind. ``implicit``: directories that the archive has no entry
    for, though it has something in them."""

    members: int
    bytes: int
    notes: tuple[str, ...] = ()
    implicit: tuple[str, ...] = ()


class _Member(tarfile.TarInfo):
    """A header, checked before tarfile acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or (info.type in _EXTENDED and info.size > _MAX_HEADER):
            raise _refuse("a header of impossible size", info.name)
        return info

    def _proc_gnusparse_10(self, next: Any, pax_headers: Any, tar: Any) -> None:  # noqa: A002, ARG002 - tarfile's signature
        """As tarfile's, with a bound: the map of a hostile archive would not end."""
        text: bytes = b""
        numbers: list[int] = []
        while not numbers or len(numbers) < 1 + 2 * numbers[0]:
            while b"\n" not in text:
                block = tar.fileobj.read(tarfile.BLOCKSIZE)
                if len(block) < tarfile.BLOCKSIZE or len(text) > 20:
                    raise _refuse("a malformed sparse map", self.name)
                text += block
            line, _, text = text.partition(b"\n")
            if not line.isdigit() or len(line) > 19 or int(line) > (_MAX_PIECES if not numbers else 1 << 62):
                raise _refuse("a malformed sparse map", self.name)
            numbers.append(int(line))
        next.offset_data = tar.fileobj.tell()
        next.sparse = list(zip(numbers[1::2], numbers[2::2], strict=True))


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How members become files.

    ``owners``: as the archive says (needs root), with set-id bits and file capabilities; else everything is the caller's and plain.
    ``devices``: "refuse" or "skip" (with a note). ``strict``: only what our own packer writes; else whatever tars hold.
    """

    owners: bool = False
    devices: str = "refuse"
    strict: bool = False


def beneath(root: int, path: str, flags: int) -> int:
    """Open ``path`` below the directory ``root`` through no link at all, on any system. Raises `OSError` (ENOTDIR, ELOOP for a link)."""
    at = os.dup(root)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        os.close(at)
        raise OSError(errno.ENOTDIR, "leads out", path)
    try:
        for part in [*parts[:-1], None] if parts else []:
            step = parts[-1] if part is None else part
            how = flags if part is None else _PATH | _DIR
            below = os.open(step, how | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        if not parts:
            below = os.open(".", flags | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


def unpack(stream: IO[bytes], root: int, *, opener: Opener = beneath, rules: Rules, limits: Limits, stop: Stop) -> Done:
    """Extract a stream (also compressed with gzip, bzip2 or xz) into the open directory ``root``.

    Raises `InvalidRequest` for the archive's faults (damaged, truncated, hostile; the value names the member), `NodeError` when ``stop``
    is set meanwhile, `OSError` for the disk's. What was extracted before an error stays.
    """
    mode = "r|" if rules.strict else "r|*"
    try:
        with tarfile.open(fileobj=stream, mode=mode, tarinfo=_Member, bufsize=_BUFFER, errorlevel=2, errors="surrogateescape") as archive:  # type: ignore[call-overload]
            return _Extraction(root, opener, rules, limits, stop).run(archive)
    except InvalidRequest:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"not a readable tar: {error}", field="tar", fix="check the archive") from error
    except OSError as error:
        if error.errno is None:  # zlib and lzma report damage in the data so
            raise InvalidRequest(f"not a readable tar: {error}", field="tar", fix="check the archive") from error
        raise


def _refuse(why: str, name: str) -> InvalidRequest:
    return InvalidRequest(why, field="tar", value=name, fix="make the archive without it")


class _Extraction:
    def __init__(self, root: int, opener: Opener, rules: Rules, limits: Limits, stop: Stop) -> None:
        self._root = root
        self._opener = opener
        self._rules = rules
        self._limits = limits
        self._stop = stop
        self._directories: dict[str, tarfile.TarInfo] = {}
        self._notes: dict[str, None] = {}
        self._made: set[str] = set()
        self._bytes = 0

    def run(self, archive: tarfile.TarFile) -> Done:
        members = 0
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined] # tarfile would keep every header
            members += 1
            if self._stop.is_set():
                raise NodeError("the extraction was cancelled")
            if members > self._limits.members:
                raise _refuse(f"more than {self._limits.members} members", member.name)
            self._one(archive, member)
        # Deepest first: a directory's mtime changes with every entry made in it, and its mode may forbid making one.
        for name in sorted(self._directories, reverse=True):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # replaced by a later member
                fd = self._opener(self._root, name, _DIR | os.O_NOFOLLOW)
                try:
                    self._finish(fd, self._directories[name])
                finally:
                    os.close(fd)
        implicit = tuple(sorted(self._made - self._directories.keys()))
        return Done(members=members, bytes=self._bytes, notes=tuple(self._notes), implicit=implicit)

    def _one(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _clean(member.name, member.name)
        if name == ".":
            if not member.isdir():
                raise _refuse("the archive's root is not a directory", member.name)
            self._directories["."] = member
            return
        if member.ischr() or member.isblk():
            if self._rules.devices == "skip":
                self._notes["device nodes left out"] = None
                return
            raise _refuse("a layer must not hold device nodes", member.name)
        if self._rules.strict and (member.type == tarfile.GNUTYPE_SPARSE or archive.pax_headers):
            raise _refuse("a header that is not expected here", member.name)
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
            return self._opener(self._root, path, _DIR | _PATH)
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
        self._made.add(path)
        return self._opener(self._root, path, _DIR | _PATH)

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
        if len(self._directories) < _MAX_LATER:
            self._directories[name] = member
            return
        fd = self._opener(where, leaf, _DIR | os.O_NOFOLLOW)  # at once: what it will hold may change its time
        try:
            self._finish(fd, member)
        finally:
            os.close(fd)

    def _file(self, archive: tarfile.TarFile, where: int, leaf: str, member: tarfile.TarInfo) -> None:
        self._bytes += member.size
        if self._bytes > self._limits.bytes:
            raise _refuse(f"more than {self._limits.bytes} bytes of content", member.name)
        content = archive.extractfile(member)
        assert content is not None  # it is a regular file
        fd = os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=where)
        try:
            if member.sparse is None:
                self._copy(content, fd, member.size, member)
            else:
                end = 0
                pieces: list[tuple[int, int]] = member.sparse  # type: ignore[assignment] # typeshed says int
                stored: Any = archive.fileobj  # the pieces one after the other; reading the member would make up its holes
                stored.seek(member.offset_data)
                for offset, size in pieces:
                    if offset < end or offset + size > member.size:
                        raise _refuse("a malformed sparse map", member.name)
                    end = offset + size
                    os.lseek(fd, offset, os.SEEK_SET)
                    self._copy(stored, fd, size, member)
                os.ftruncate(fd, member.size)
            self._finish(fd, member)
        finally:
            os.close(fd)

    def _copy(self, content: IO[bytes], fd: int, size: int, member: tarfile.TarInfo) -> None:
        left = size
        while left:
            chunk = content.read(min(left, _CHUNK))
            if not chunk:
                raise _refuse(f"truncated: {size - left} of {size} bytes", member.name)
            if self._stop.is_set():
                raise NodeError("the extraction was cancelled")
            left -= len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]

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
            origin = self._opener(self._root, parent or ".", _DIR | _PATH)
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
        if self._rules.owners:
            os.fchown(fd, *_ids(member))
        os.fchmod(fd, self._mode(member))
        for key, value in member.pax_headers.items():
            if key.startswith(_XATTR):
                self._attribute(fd, key.removeprefix(_XATTR), value)
        os.utime(fd, ns=_times(member))

    def _finish_at(self, where: int, leaf: str, member: tarfile.TarInfo) -> None:
        if self._rules.owners:
            os.chown(leaf, *_ids(member), dir_fd=where, follow_symlinks=False)
        if not member.issym():
            os.chmod(leaf, self._mode(member), dir_fd=where)
        os.utime(leaf, ns=_times(member), dir_fd=where, follow_symlinks=False)

    def _mode(self, member: tarfile.TarInfo) -> int:
        mode = stat.S_IMODE(member.mode)
        return mode if self._rules.owners or not self._rules.strict else mode & 0o777

    def _attribute(self, fd: int, key: str, value: str) -> None:
        # trusted.overlay.* would steer the overlay that the layer ends up in, security.* other than capabilities the host's policy.
        capability = key == "security.capability" and (self._rules.owners or not self._rules.strict)
        honest = (key.startswith("user.") and not key.startswith("user.overlay.")) or capability
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
    if not (0 <= member.uid < 65_536 and 0 <= member.gid < 65_536):
        raise InvalidRequest("an owner outside of 0…65535", field="tar", value=member.name, fix="give --owner or make it as another user")
    return member.uid, member.gid


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    exact = member.pax_headers.get("mtime", "")
    if re.fullmatch(r"\d{1,10}\.\d{1,9}", exact):  # as a float it would lose digits
        whole, _, rest = exact.partition(".")
        ns = int(whole) * 1_000_000_000 + int(rest.ljust(9, "0"))
    else:
        ns = int(min(max(member.mtime, 0), 1 << 33) * 1_000_000_000)
    return ns, ns
