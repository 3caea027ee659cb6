"""Files inside a sandbox: small ones whole, large ones in pieces with a window of requests in flight, trees as streamed tars."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import io
import os
import posixpath
import secrets
import stat as stat_module
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dsec.errors import Denied, DsecError, InvalidRequest, NotFound, SandboxError
from dsec.model import FileReply, FileRequest, Stat
from libdsec import names
from libdsec.names import Named
from libdsec.spec import text, user_name, whole
from libdsec.tree import Unpacked, download_tree, pack_inside, unpack_inside, upload_tree
from libdsec.watch import FileEvent, watch_tree

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

PIECE = 256 * 1024  # what the guest takes in one request
WINDOW = 8  # pieces in flight: 2 MiB, whatever the file's size
TIMEOUT = 60.0  # seconds for one piece
READ_LIMIT = 64 << 20
HOLE = 1 << 20  # bytes of holes that make a single file worth a tar
TREE_LIMIT = 64 << 30  # bytes of files that a download of a directory takes, holes included
LINKS = 40  # as the kernel follows

Progress = Callable[[int, int], None]


class Files(Named):
    """``sandbox.files``. Paths are absolute, or relative to ``/``; links resolve inside the sandbox and never leave it.

    Errors: `NotFound` (no such file), `SandboxError` (disk full, not a directory, …), `InvalidRequest`, `SandboxGone`.
    """

    _meant = names.FILES

    def __init__(self, sandbox: Sandbox, user: str = "") -> None:
        self._sandbox = sandbox
        self._user = user

    def as_user(self, user: str) -> Files:
        """The same files with another user's rights."""
        return Files(self._sandbox, user_name(user))

    # ------------------------------------------------------------------ whole files
    async def read(self, path: str, *, offset: int = 0, length: int | None = None, limit: int = READ_LIMIT) -> bytes:
        """The file's content, or ``length`` bytes of it from ``offset``; at most ``limit`` bytes (64 MiB).

        Larger ones are for `download`.
        """
        parts: list[bytes] = []
        size = 0
        offset = whole(offset, "offset", 0, 1 << 62)
        if length is not None:
            length = whole(length, "length", 0, limit)
        async for piece in self._pieces(path, offset, length):
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
        raw = _content(data)

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
    async def upload(self, source: str | os.PathLike[str], target: str, *, owners: bool = False, progress: Progress | None = None) -> int:
        """Copy a local file or directory into the sandbox; bytes copied.

        ``target`` is the file's (or directory's) own name inside, not the directory to put it into; missing parents are made. Of a
        directory go modes, times, symbolic and hard links, holes and ``user.*`` attributes; everything belongs to the run-as user
        unless ``owners`` (then owners, set-id bits and file capabilities go too, as far as that user may set them).
        """
        local = Path(source)
        info = await asyncio.to_thread(_local_stat, local)
        if stat_module.S_ISREG(info.st_mode):
            if getattr(info, "st_blocks", 0) * 512 < info.st_size - HOLE:  # holes are not sent
                folder, name = posixpath.split(_path(target))
                if not name:
                    raise InvalidRequest(
                        "is a directory", field="path", value=target, fix=f"give the file's own name, such as {folder}/NAME"
                    )
                return await upload_tree(self._sandbox, self._user, local, folder, owners, progress, name)
            return await self._upload_file(local, target, info, progress)
        if not stat_module.S_ISDIR(info.st_mode):
            raise InvalidRequest("is neither a file nor a directory", field="source", value=str(local))
        return await upload_tree(self._sandbox, self._user, local, _path(target), owners, progress)

    async def download(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        owners: bool = False,
        limit: int = TREE_LIMIT,
        progress: Progress | None = None,
    ) -> int:
        """Copy a file or directory of the sandbox to a local path; bytes copied.

        A local file appears whole or not at all. Of a directory come modes, times, links (as they are, absolute ones too), holes and
        ``user.*`` attributes; with ``owners``, for root, also owners and set-id bits. Whatever a hostile sandbox sends, nothing is
        written outside of ``target``: no link is ever followed there, device nodes are left out. ``limit`` bounds the bytes of a tree.
        """
        local = Path(target)
        info = await self.stat(source, follow=True)
        if info.kind == "dir":
            return await download_tree(self._sandbox, self._user, _path(source), local, owners, limit, progress)
        return await self._download_file(source, local, info, progress)

    async def upload_tar(self, stream: AsyncIterable[bytes], target: str, *, owners: bool = True) -> Unpacked:
        """Unpack a tar (PAX, GNU or ustar; not compressed) into the directory ``target``, made where absent.

        Nothing lands outside of it, whatever the archive says. ``owners`` as in the archive where the user may set them.
        Raises `InvalidRequest` for the archive's faults, with the member as its value; what came before it stays.
        """
        return await unpack_inside(self._sandbox, self._user, stream, _path(target), owners)

    def download_tar(self, *paths: str, name: str = "", follow: bool = False) -> AsyncIterator[bytes]:
        """Paths of the sandbox as one tar (PAX), piece by piece. Each is called by its own last part in the archive.

        ``name`` calls the only path otherwise ("." puts a directory's content at the archive's root); ``follow``: where a path itself
        is a link, what it points to. Raises `NotFound`, `Denied` for what the user may not read. The end comes only if all is there.
        """
        if not paths or (name and len(paths) > 1):
            raise InvalidRequest("one path with a name, or several without", field="name", value=name)
        return pack_inside(self._sandbox, self._user, [_path(path) for path in paths], name, follow)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncGenerator[FileEvent]:
        """Changes in a directory, as they happen: ``async for event in files.watch("/work", recursive=True)``.

        The first event is ``ready``: what happens after it is told. At most 8,192 directories are watched; when the kernel's queue
        ran over an ``overflow`` says so. Ends when the directory is removed. Raises `NotFound`, `SandboxError` (no inotify left).
        """
        async for event in watch_tree(self._sandbox, self._user, _path(path), recursive):
            yield event

    # ------------------------------------------------------------------ names
    async def glob(self, pattern: str) -> list[str]:
        """Paths that match, sorted: ``*``, ``?`` and ``[…]`` within one part, as a shell expands them (hidden names need a dot)."""
        found = ["/"]
        for part in _path(pattern).split("/"):
            if not part:
                continue
            if not any(sign in part for sign in "*?["):
                found = [posixpath.join(base, part) for base in found]
                continue
            matched: list[str] = []
            for base in found:
                with contextlib.suppress(NotFound, Denied):
                    names = [entry.name for entry in await self.list(base)]
                    wanted = [name for name in names if fnmatch.fnmatchcase(name, part) and (part[0] == "." or name[0] != ".")]
                    matched += [posixpath.join(base, name) for name in wanted]
            found = matched
        return sorted([path for path in found if await self.exists(path)])

    async def chmod(self, path: str, mode: int) -> None:
        """Change a file's mode; follows a link, as the command does."""
        await self._ask(FileRequest(verb="chmod", path=_path(path), mode=whole(mode, "mode", 0, 0o7777), user=self._user))

    async def chown(self, path: str, owner: str) -> None:
        """Change the owner (``user``, ``uid``, ``user:group``); of a link, the link's own."""
        await self._ask(FileRequest(verb="chown", path=_path(path), target=user_name(owner, "owner"), user=self._user))

    async def symlink(self, path: str, target: str) -> None:
        """Make the symbolic link ``path`` that says ``target``. Raises `Conflict` when the name exists."""
        await self._ask(FileRequest(verb="symlink", path=_path(path), target=text(target, "target"), user=self._user), repeat=False)

    async def readlink(self, path: str) -> str:
        """What a symbolic link says."""
        found = await self.stat(path)
        if found.kind != "link":
            raise InvalidRequest("is not a symbolic link", field="path", value=path)
        return found.target

    async def link(self, path: str, target: str) -> None:
        """Give a file a second name, ``target``."""
        await self._ask(FileRequest(verb="link", path=_path(path), target=_path(target), user=self._user), repeat=False)

    async def touch(self, path: str, mtime: float) -> None:
        """Set the time of the last change (seconds since 1970) of a file that exists."""
        await self._ask(FileRequest(verb="touch", path=_path(path), offset=int(mtime * 1e9), user=self._user))

    async def stat(self, path: str, *, follow: bool = False) -> Stat:
        """Of the path itself; with ``follow``, of what a link points to. Raises `NotFound`."""
        if follow:
            return (await self._resolve(_path(path)))[1]
        return await self._lstat(_path(path))

    async def _lstat(self, path: str) -> Stat:
        reply = await self._ask(FileRequest(verb="stat", path=path, user=self._user))
        if reply.stat is None:
            raise NotFound("no such file", field="path", value=path, sandbox=self._sandbox.id, fix="see what is there: files.list(…)")
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

    async def _pieces(self, path: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The content in order, with `WINDOW` reads under way."""
        checked = _path(path)
        flying: deque[tuple[int, asyncio.Task[FileReply]]] = deque()
        ahead = start
        end = None if length is None else start + length
        window = 1  # most files are small: look at the first piece before asking for more
        try:
            while True:
                while len(flying) < window and (end is None or ahead < end):
                    request = FileRequest(verb="read", path=checked, offset=ahead, length=PIECE, user=self._user)
                    flying.append((ahead, asyncio.ensure_future(self._ask(request, bulk=True))))
                    ahead += PIECE
                if not flying:
                    return
                offset, task = flying.popleft()
                reply = await task
                if reply.data:
                    yield reply.data if end is None else reply.data[: end - offset]
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
        if target.endswith("/"):
            raise InvalidRequest("is a directory", field="path", value=path, fix=f"give the file's own name, such as {target}NAME")
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
            if isinstance(error, InvalidRequest) and error.message == "Is a directory" and not error.fix:
                error.fix = f"give the file's own name, such as {target}/NAME"
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
                os.ftruncate(file.fileno(), done)  # it may end in a hole
                os.fchmod(file.fileno(), info.mode & 0o777)
            await asyncio.to_thread(os.replace, temp, local)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temp.unlink()
            raise
        return done


def _content(data: bytes | bytearray | memoryview | str) -> memoryview:
    if not isinstance(data, bytes | bytearray | memoryview | str):
        fix = "give text or bytes; json.dumps(…) for objects, upload() for a local file"
        raise InvalidRequest(f"must be text or bytes, not {type(data).__name__}", field="data", fix=fix)
    return memoryview(data.encode() if isinstance(data, str) else data).cast("B")


def _path(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, str | os.PathLike):
        raise InvalidRequest(f"must be a path, not {type(path).__name__}", field="path", value=repr(path), fix="give a string or a Path")
    checked = text(os.fspath(path), "path")
    return checked if checked.startswith("/") else f"/{checked}"


def _local_stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        fix = f"it is looked for on this machine, from {os.getcwd()}" if not path.is_absolute() else "it is looked for on this machine"
        raise NotFound("no such local file", field="source", value=str(path), fix=fix) from error


def _fresh_file(path: Path) -> io.FileIO:
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w")


def _write_all(file: io.FileIO, data: bytes) -> None:
    if not data.strip(b"\0"):  # a hole here too
        file.seek(len(data), os.SEEK_CUR)
        return
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


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
