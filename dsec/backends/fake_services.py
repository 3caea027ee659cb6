"""The guest's services (`ExecSpec.service`) inside a fake sandbox: tars into and out of its dict of files, and an echo on port 7."""

from __future__ import annotations

import io
import posixpath
import tarfile
from typing import TYPE_CHECKING

from dsec.errors import InvalidRequest, SandboxError, Unsupported

if TYPE_CHECKING:
    from dsec.backends.fake_guest import FakeGuest, Op

ECHO_PORT = 7
PIECE = 64 * 1024


def check(argv: tuple[str, ...]) -> None:
    """Refuse what cannot start, as the guest does."""
    match argv:
        case ("dsec:connect", "tcp", port):
            if int(port) != ECHO_PORT:
                raise SandboxError("cannot connect: Connection refused", field="port", value=port, reason="ECONNREFUSED")
        case ("dsec:pack", _, _, _, *_) | ("dsec:unpack", _, _):
            pass
        case ("dsec:watch", *_):
            raise Unsupported("a fake sandbox tells no changes of files", field="argv")
        case _:
            raise InvalidRequest("no such service", field="argv", value=argv[:1])


async def run(guest: FakeGuest, op: Op, argv: tuple[str, ...]) -> int:
    """Its exit code."""
    if argv[0] == "dsec:connect":
        while data := await _read(op):
            await guest.emit(op, op.streams[0], data)
        return 0
    if argv[0] == "dsec:pack":
        return await _pack(guest, op, argv[1], argv[3:])
    return await _unpack(guest, op, argv[1])


async def _read(op: Op) -> bytes:
    async with op.changed:
        await op.changed.wait_for(lambda: op.stdin or op.stdin_eof)
        data = bytes(op.stdin)
        op.stdin.clear()
    return data


async def _fail(guest: FakeGuest, op: Op, number: int, about: str, message: str) -> int:
    await guest.emit(op, op.streams[1], f"error\t{number}\t{about}\t{message}\0".encode())
    return 1


async def _unpack(guest: FakeGuest, op: Op, target: str) -> int:
    archive = io.BytesIO()
    while data := await _read(op):
        archive.write(data)
    archive.seek(0)
    target = posixpath.normpath(target)
    members = size = 0
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                members += 1
                if ".." in member.name.split("/"):
                    return await _fail(guest, op, 0, member.name, "a name that leads out of the archive, or is too long")
                path = posixpath.normpath(posixpath.join(target, member.name.lstrip("/")))
                above = path if member.isdir() else posixpath.dirname(path)
                while above not in guest.dirs:
                    guest.dirs.add(above)
                    above = posixpath.dirname(above)
                content = tar.extractfile(member) if member.isreg() else None
                if content is not None:
                    guest.files[path] = content.read()
                    size += member.size
    except tarfile.TarError as error:
        return await _fail(guest, op, 0, target, str(error))
    await guest.emit(op, op.streams[0], f"{members} {size}".encode())
    return 0


async def _pack(guest: FakeGuest, op: Op, name: str, paths: tuple[str, ...]) -> int:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in map(posixpath.normpath, paths):
            found = [one for one in sorted({*guest.dirs, *guest.files}) if one == path or one.startswith(path.rstrip("/") + "/")]
            if not found:
                return await _fail(guest, op, 2, path, "No such file or directory")
            for one in found:
                member = tarfile.TarInfo(posixpath.normpath(posixpath.join(name or posixpath.basename(path), posixpath.relpath(one, path))))
                if one in guest.dirs:
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(member)
                else:
                    member.size = len(guest.files[one])
                    tar.addfile(member, io.BytesIO(guest.files[one]))
    data = archive.getvalue()
    for at in range(0, len(data), PIECE):
        await guest.emit(op, op.streams[0], data[at : at + PIECE])
    return 0
