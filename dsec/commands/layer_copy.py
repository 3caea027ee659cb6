"""COPY's part of `dsec layer build`: what is taken of the build's context, and tars of it and of other stages."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.errors import InvalidRequest, NotFound, SandboxError

if TYPE_CHECKING:
    from dsec.layers.dockerfile import Step

_PIECE = 128 * 1024
_BLOCK = tarfile.BLOCKSIZE


def chosen(context: Path, ignored: Callable[[str], bool], step: Step) -> list[tuple[str, Path, str]]:
    """(source as written, local path, name below the target) of each entry of the context that a COPY takes, in order."""
    found: list[tuple[str, Path, str]] = []
    top = context.resolve()
    for source in step.sources:
        relative = posixpath.normpath(source.lstrip("/"))
        if relative.startswith(".."):
            raise InvalidRequest(f"line {step.line}: a source outside of the context", field="dockerfile", value=source)
        matches = sorted(top.glob(relative)) if any(letter in relative for letter in "*?[") else [top / relative]
        matches = [path for path in matches if os.path.lexists(path) and not ignored(path.relative_to(top).as_posix())]
        if not matches:
            raise NotFound(f"line {step.line}: nothing to copy", field="dockerfile", value=source, fix="it must be in the context")
        for match in matches:
            if not match.resolve().is_relative_to(top):
                raise InvalidRequest(f"line {step.line}: a link out of the context", field="dockerfile", value=source)
            if match.is_dir():
                found += [(source, path, path.relative_to(match).as_posix()) for path in _below(match, top, ignored)]
            else:
                found.append((source, match, match.name))
    return found


def ignore_rules(context: Path) -> Callable[[str], bool]:
    """What .dockerignore leaves out: patterns of paths below the context, ``!`` takes back, the last that fits decides."""
    rules: list[tuple[re.Pattern[str], bool]] = []
    file = context / ".dockerignore"
    for line in file.read_text().splitlines() if file.is_file() else ():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep = pattern.startswith("!")
        pattern = pattern.lstrip("!").strip("/")
        body = "".join(
            {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, re.escape(token))
            for token in re.findall(r"\*\*/|\*\*|\*|\?|.", pattern)
        )
        rules.append((re.compile(f"{body}(?:/.*)?"), not keep))

    def ignored(path: str) -> bool:
        verdict = False
        for pattern, leaves_out in rules:
            if pattern.fullmatch(path):
                verdict = leaves_out
        return verdict

    return ignored


def _below(directory: Path, top: Path, ignored: Callable[[str], bool]) -> list[Path]:
    found: list[Path] = []
    for parent, directories, files in os.walk(directory):
        directories.sort()
        links = [name for name in directories if Path(parent, name).is_symlink()]
        for name in sorted((*directories, *files)):
            path = Path(parent, name)
            if not ignored(path.relative_to(top).as_posix()):
                found.append(path)
        directories[:] = [name for name in directories if name not in links]
    return found


def fingerprint(path: Path) -> str:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"link {os.readlink(path)}"
    if not stat.S_ISREG(status.st_mode):
        return f"{stat.S_IFMT(status.st_mode)} {stat.S_IMODE(status.st_mode)}"
    with open(path, "rb") as file:
        return f"file {stat.S_IMODE(status.st_mode)} {hashlib.file_digest(file, 'sha256').hexdigest()}"


async def tar_of(rows: list[tuple[Path, str]], owner: tuple[int, int], mode: int) -> AsyncIterator[bytes]:
    """The chosen entries as a tar, piece by piece; times are left as they are."""
    for path, name in rows:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            info = archive.gettarinfo(path, arcname=name)
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                continue
            if info.islnk():  # each file on its own: the archive is made entry by entry
                info.type, info.size = tarfile.REGTYPE, path.stat().st_size
            info.uid, info.gid = owner
            info.uname = info.gname = ""
            if mode and not info.issym():
                info.mode = mode
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if info.isreg():
            left = info.size
            with open(path, "rb") as file:  # noqa: ASYNC230 - a local file, a piece at a time
                while left:
                    piece = file.read(min(_PIECE, left))
                    if not piece:
                        raise InvalidRequest("a file became shorter while it was copied", field="source", value=str(path))
                    left -= len(piece)
                    yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


async def owned(stream: AsyncIterator[bytes], owner: tuple[int, int] | None, mode: int) -> AsyncIterator[bytes]:
    """A tar of a sandbox, piece by piece, with another owner and mode (0: as it is) for all members but links' modes."""
    buffer = b""
    left = 0  # of a member's content, which passes as it is
    size_of_next = -1  # what an extended header says
    async for piece in stream:
        buffer += piece
        out = []
        while True:
            if left:
                out.append(buffer[:left])
                left -= len(out[-1])
                buffer = buffer[len(out[-1]) :]
                if left:
                    break
                continue
            if len(buffer) < _BLOCK:
                break
            head = buffer[:_BLOCK]
            if not head.strip(b"\0"):  # the end
                out.append(buffer)
                buffer = b""
                break
            try:
                info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
            except tarfile.TarError as error:
                raise SandboxError(f"the sandbox sends something else than a tar: {error}", reason="build") from error
            whole = -(-info.size // _BLOCK) * _BLOCK
            if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE):
                if len(buffer) < _BLOCK + whole:
                    break
                if (said := re.search(rb"\d+ size=(\d+)\n", buffer[_BLOCK : _BLOCK + info.size])) is not None:
                    size_of_next = int(said[1])
            else:
                head = _with_owner(head, info, owner, mode)
                if size_of_next >= 0:
                    whole, size_of_next = -(-size_of_next // _BLOCK) * _BLOCK, -1
            out.append(head)
            buffer = buffer[_BLOCK:]
            left = whole if info.type not in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE) else 0
        if out:
            yield b"".join(out)
    if buffer:
        yield buffer


def _with_owner(head: bytes, info: tarfile.TarInfo, owner: tuple[int, int] | None, mode: int) -> bytes:
    """The header with other numbers in it (POSIX ustar: mode at 100, uid at 108, gid at 116, sum at 148)."""
    made = bytearray(head)
    if mode and info.type not in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        made[100:108] = b"%07o\0" % mode
    if owner is not None:
        made[108:124] = b"%07o\0%07o\0" % owner
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)
