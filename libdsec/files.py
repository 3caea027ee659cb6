"""Files inside a sandbox: small ones whole, large ones in pieces with a window of requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import secrets
import stat as stat_module
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dsec.errors import Conflict, Denied, DsecError, InvalidRequest, NotFound, SandboxError
from dsec.model import FileReply, FileRequest, Stat
from libdsec.spec import text, user_name, whole

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

PIECE = 256 * 1024  # what the guest takes in one request
WINDOW = 8  # pieces in flight: 2 MiB, whatever the file's size
TIMEOUT = 60.0  # seconds for one piece
READ_LIMIT = 64 << 20
LINKS = 40  # as the kernel follows

Progress = Callable[[int, int], None]


class Files:
    """``sandbox.files``. Paths are absolute, or relative to ``/``; links resolve inside the sandbox and never leave it.

    Errors: `NotFound` (no such file), `SandboxError` (disk full, not a directory, …), `InvalidRequest`, `SandboxGone`.
    """

    def __init__(self, sandbox: Sandbox, user: str = "") -> None:
        self._sandbox = sandbox
        self._user = user

    def as_user(self, user: str) -> Files:
        """The same files with another user's rights."""
        return Files(self._sandbox, user_name(user))

    # ------------------------------------------------------------------ whole files
    async def read(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """The file's content, at most ``limit`` bytes (64 MiB): larger ones are for `download`."""
        parts: list[bytes] = []
        size = 0
        async for piece in self._pieces(path):
            size += len(piece)
            if size > limit:
                raise InvalidRequest(f"is longer than {limit} bytes", field="path", value=path, fix="use files.download, or raise limit=")
            parts.append(piece)
        return b"".join(parts)

    async def read_text(self, path: str, *, limit: int = READ_LIMIT) -> str:
        """The content as UTF-8, undecodable bytes replaced."""
        return (await self.read(path, limit=limit)).decode("utf-8", "replace")

    async def write(self, path: str, data: bytes | bytearray | memoryview | str, *, mode: int | None = None) -> None:
        """Replace the file's content. Readers see the old content or the new, never a part (a temporary name, then a rename).

        An existing file keeps its owner and, unless ``mode`` is given, its mode; a link is written through; missing directories are
        made. A new file gets 0644.
        """
        raw = memoryview(data.encode() if isinstance(data, str) else data).cast("B")

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(raw), PIECE):
                yield bytes(raw[at : at + PIECE])

        try:
            target, found = await self._resolve(_path(path))
        except NotFound:
            await self._put(path, pieces(), 0o644 if mode is None else mode)
            return
        if found.kind == "dir":
            raise InvalidRequest("is a directory", field="path", value=path)
        kept = found.mode & 0o7777 if mode is None else mode
        if found.kind != "file":
            await self._fill(target, pieces(), kept, user=self._user)
        elif self._user or (found.uid, found.gid) == (0, 0):
            await self._put(target, pieces(), kept)
        else:
            try:
                await Files(self._sandbox, f"{found.uid}:{found.gid}")._put(target, pieces(), kept)
            except (Denied, InvalidRequest):  # its owner may not make names there, we may fill what is there
                await self._fill(target, pieces(), kept, user="", truncate=True)

    # ------------------------------------------------------------------ transfers
    async def upload(self, source: str | os.PathLike[str], target: str, *, progress: Progress | None = None) -> int:
        """Copy a local file or directory into the sandbox; bytes copied. A file's mode goes with it, links are copied as links.

        ``target`` is the file's (or directory's) own name inside, not the directory to put it into; missing parents are made.
        """
        local = Path(source)
        info = await asyncio.to_thread(_local_stat, local)
        if stat_module.S_ISREG(info.st_mode):
            return await self._upload_file(local, target, info, progress)
        if not stat_module.S_ISDIR(info.st_mode):
            raise InvalidRequest("is neither a file nor a directory", field="source", value=str(local))
        return await self._upload_tree(local, target, progress)

    async def download(self, source: str, target: str | os.PathLike[str], *, progress: Progress | None = None) -> int:
        """Copy a file or directory of the sandbox to a local path; bytes copied.

        A local file appears whole or not at all. Names that a hostile sandbox might send cannot leave ``target``: links are
        made last, as links, and nothing is ever written through one.
        """
        local = Path(target)
        info = await self.stat(source, follow=True)
        if info.kind == "dir":
            return await self._download_tree(source, local, progress)
        return await self._download_file(source, local, info, progress)

    # ------------------------------------------------------------------ names
    async def stat(self, path: str, *, follow: bool = False) -> Stat:
        """Of the path itself; with ``follow``, of what a link points to. Raises `NotFound`."""
        if follow:
            return (await self._resolve(_path(path)))[1]
        return await self._lstat(_path(path))

    async def _lstat(self, path: str) -> Stat:
        reply = await self._ask(FileRequest(verb="stat", path=path, user=self._user))
        if reply.stat is None:
            raise NotFound("no such file", field="path", value=path, sandbox=self._sandbox.id)
        return reply.stat

    async def _resolve(self, path: str) -> tuple[str, Stat]:
        """Where a path ends after all links, and what is there."""
        where = path
        for _ in range(LINKS):
            found = await self._lstat(where)
            if found.kind != "link":
                return where, found
            where = posixpath.join(posixpath.dirname(where), found.target)
        raise InvalidRequest("too many links in a row", field="path", value=path)

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def list(self, path: str = "/") -> list[Stat]:
        """Entries of a directory by name, without ``.`` and ``..``."""
        entries: list[Stat] = []
        while True:
            reply = await self._ask(FileRequest(verb="list", path=_path(path), offset=len(entries), length=500, user=self._user))
            entries += reply.entries
            if reply.eof or not reply.entries:
                return sorted(entries, key=lambda entry: entry.name)

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        """Make a directory; with ``parents`` one that exists is fine."""
        mode = whole(mode, "mode", 0, 0o7777)
        await self._ask(FileRequest(verb="mkdir", path=_path(path), create=parents, mode=mode, user=self._user), repeat=parents)

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link or an empty directory; with ``recursive`` a whole tree."""
        try:
            await self._ask(FileRequest(verb="remove", path=_path(path), recursive=recursive, user=self._user), repeat=missing_ok)
        except NotFound:
            if not missing_ok:
                raise

    async def rename(self, path: str, target: str) -> None:
        """Rename inside one file system, replacing ``target``."""
        await self._ask(FileRequest(verb="rename", path=_path(path), target=_path(target), user=self._user), repeat=False)

    # ------------------------------------------------------------------ inside
    async def _ask(self, request: FileRequest, *, repeat: bool = True, bulk: bool = False) -> FileReply:
        return await self._sandbox._request("files", request, FileReply, timeout=TIMEOUT, repeat=repeat, bulk=bulk)

    async def _pieces(self, path: str) -> AsyncIterator[bytes]:
        """The content in order, with `WINDOW` reads under way."""
        checked = _path(path)
        flying: deque[tuple[int, asyncio.Task[FileReply]]] = deque()
        ahead = 0
        window = 1  # most files are small: look at the first piece before asking for more
        try:
            while True:
                while len(flying) < window:
                    request = FileRequest(verb="read", path=checked, offset=ahead, length=PIECE, user=self._user)
                    flying.append((ahead, asyncio.ensure_future(self._ask(request, bulk=True))))
                    ahead += PIECE
                offset, task = flying.popleft()
                reply = await task
                if reply.data:
                    yield reply.data
                if reply.eof or not reply.data:
                    return
                window = WINDOW
                if len(reply.data) < PIECE:  # a short read, as /proc gives them: go on from where it ended
                    await _drop(flying)
                    ahead, window = offset + len(reply.data), 1
        finally:
            await _drop(flying)

    async def _put(self, path: str, pieces: AsyncIterator[bytes], mode: int) -> int:
        """Write under a temporary name beside ``path``, then rename; bytes written."""
        target = _path(path)
        if target == "/":
            raise InvalidRequest("is a directory", field="path", value=path)
        mode = whole(mode, "mode", 0, 0o7777)
        name = posixpath.basename(target)
        temp = posixpath.join(posixpath.dirname(target), f".{name[:200]}.{secrets.token_hex(6)}")
        first = FileRequest(verb="write", path=temp, create=True, truncate=True, mode=mode, user=self._user)
        try:
            try:
                await self._ask(first, bulk=True)
            except NotFound:
                await self.mkdir(posixpath.dirname(target))
                await self._ask(first, bulk=True)
            size = await self._send(temp, pieces, self._user)
            await self._rename_over(temp, target)
        except BaseException as error:
            with contextlib.suppress(DsecError, TimeoutError):  # the first error is the one to tell; the sandbox may be gone
                await asyncio.wait_for(asyncio.shield(self.remove(temp, missing_ok=True)), 5)
            if isinstance(error, DsecError) and error.value == temp:
                error.value = path
            raise
        return size

    async def _fill(self, path: str, pieces: AsyncIterator[bytes], mode: int, *, user: str, truncate: bool = False) -> None:
        """Write into what is there: a device, a FIFO, or a file whose directory is closed to its owner."""
        await self._ask(FileRequest(verb="write", path=path, truncate=truncate, mode=mode, user=user), bulk=True)
        await self._send(path, pieces, user)

    async def _send(self, path: str, pieces: AsyncIterator[bytes], user: str) -> int:
        """Pieces one after the other, `WINDOW` under way."""
        size = 0
        flying: deque[tuple[int, asyncio.Task[FileReply]]] = deque()
        try:
            async for data in pieces:
                if len(flying) >= WINDOW:
                    await _written(flying)
                request = FileRequest(verb="write", path=path, offset=size, data=data, user=user)
                flying.append((len(data), asyncio.ensure_future(self._ask(request, bulk=True))))
                size += len(data)
            while flying:
                await _written(flying)
        finally:
            await _drop(flying)
        return size

    async def _rename_over(self, temp: str, target: str) -> None:
        """A rename repeated after a lost answer finds the temporary name gone: then it had worked."""
        request = FileRequest(verb="rename", path=temp, target=target, user=self._user)
        try:
            await self._ask(request)
        except NotFound:
            if not await self.exists(target):
                raise

    async def _upload_file(self, local: Path, target: str, info: os.stat_result, progress: Progress | None) -> int:
        done = 0

        async def pieces(file: BinaryIO) -> AsyncIterator[bytes]:
            nonlocal done
            while block := await asyncio.to_thread(file.read, PIECE * 4):
                for at in range(0, len(block), PIECE):
                    yield block[at : at + PIECE]
                    done += len(block[at : at + PIECE])
                    if progress is not None:
                        progress(done, info.st_size)

        with await asyncio.to_thread(local.open, "rb") as file:
            return await self._put(target, pieces(file), stat_module.S_IMODE(info.st_mode))

    async def _upload_tree(self, local: Path, target: str, progress: Progress | None) -> int:
        total = 0
        links: list[tuple[str, str]] = []
        await self.mkdir(target)
        for path in await asyncio.to_thread(lambda: sorted(local.rglob("*"))):
            info = await asyncio.to_thread(path.lstat)
            inside = posixpath.join(target, path.relative_to(local).as_posix())
            if stat_module.S_ISLNK(info.st_mode):
                links.append((await asyncio.to_thread(os.readlink, path), inside))
            elif stat_module.S_ISDIR(info.st_mode):
                await self.mkdir(inside, mode=stat_module.S_IMODE(info.st_mode))
            elif stat_module.S_ISREG(info.st_mode):
                total += await self._upload_file(path, inside, info, progress)
            else:
                raise InvalidRequest("is neither a file, a directory nor a link", field="source", value=str(path))
        for link, inside in links:
            result = await self._sandbox.exec(["ln", "-sfn", "--", link, inside], user=self._user or None, timeout=30)
            if not result.ok:
                why = result.stderr.text.strip()
                raise SandboxError(f"cannot make a link: {why}", field="target", value=inside, sandbox=self._sandbox.id)
        return total

    async def _download_file(self, source: str, local: Path, info: Stat, progress: Progress | None) -> int:
        if await asyncio.to_thread(local.is_dir):
            local = local / posixpath.basename(_path(source))
        temp = local.with_name(f".{local.name[:200]}.{secrets.token_hex(6)}")
        done = 0
        try:
            with await asyncio.to_thread(_fresh_file, temp) as file:
                async for piece in self._pieces(source):
                    await asyncio.to_thread(_write_all, file, piece)
                    done += len(piece)
                    if progress is not None:
                        progress(done, info.size)
                os.fchmod(file.fileno(), info.mode & 0o777)
            await asyncio.to_thread(os.replace, temp, local)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temp.unlink()
            raise
        return done

    async def _download_tree(self, source: str, local: Path, progress: Progress | None) -> int:
        total = 0
        links: list[tuple[Path, str]] = []
        todo = [(_path(source), local)]
        while todo:
            directory, here = todo.pop()
            await asyncio.to_thread(_make_directory, here)
            for entry in await self.list(directory):
                if entry.name in (".", "..", "") or "/" in entry.name or "\0" in entry.name:
                    raise SandboxError("sent a name that is none", field="name", value=entry.name, sandbox=self._sandbox.id)
                inside, outside = posixpath.join(directory, entry.name), here / entry.name
                if entry.kind == "dir":
                    todo.append((inside, outside))
                elif entry.kind == "link":
                    links.append((outside, entry.target or (await self.stat(inside)).target))
                elif entry.kind == "file":
                    total += await self._download_file(inside, outside, entry, progress)
        for outside, target in links:
            await asyncio.to_thread(_make_link, target, outside)
        return total


def _path(path: str | os.PathLike[str]) -> str:
    checked = text(os.fspath(path), "path")
    return checked if checked.startswith("/") else f"/{checked}"


def _local_stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise NotFound("no such local file", field="source", value=str(path)) from error


def _fresh_file(path: Path) -> io.FileIO:
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w")


def _write_all(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise Conflict("is a link; a download does not follow links", field="target", value=str(path), fix="download to a fresh directory")


def _make_link(target: str, path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    try:
        os.symlink(target, path)
    except FileExistsError:
        raise Conflict("is something else than a link already", field="target", value=str(path)) from None


async def _written(flying: deque[tuple[int, asyncio.Task[FileReply]]]) -> None:
    length, task = flying.popleft()
    reply = await task
    if reply.written != length:
        raise SandboxError(f"{reply.written} of {length} bytes were written", fix="see the sandbox's disk limit")


async def _drop(flying: deque[tuple[int, asyncio.Task[FileReply]]]) -> None:
    tasks = [task for _, task in flying]
    flying.clear()
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
