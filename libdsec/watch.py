"""Changes of files inside a sandbox, told by the kernel's inotify through the guest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from dsec.errors import SandboxError
from libdsec.channel import Channel

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

KINDS = frozenset({"ready", "created", "changed", "attributes", "removed", "moved_from", "moved_to", "overflow"})


class FileEvent(msgspec.Struct, frozen=True):
    """``kind``: ready created changed (written and closed) attributes removed moved_from moved_to overflow."""

    kind: str
    path: str
    directory: bool = False


async def watch_tree(sandbox: Sandbox, user: str, path: str, recursive: bool) -> AsyncIterator[FileEvent]:
    async with Channel(sandbox, ("dsec:watch", path, "r" if recursive else ""), user=user) as channel:
        rest = b""
        while data := await channel.receive():
            *records, rest = (rest + data).split(b"\0")
            for record in records:
                yield _event(record, sandbox.id)
            if len(rest) > 8192:
                raise SandboxError("sent a record that does not end", sandbox=sandbox.id)
        await channel.finish()


def _event(record: bytes, sandbox: str) -> FileEvent:
    parts = record.decode("utf-8", "surrogateescape").split("\t", 2)
    if len(parts) != 3 or parts[0] not in KINDS or parts[1] not in ("d", "f"):
        raise SandboxError("sent a record of no known kind", sandbox=sandbox)
    return FileEvent(parts[0], parts[2], parts[1] == "d")
