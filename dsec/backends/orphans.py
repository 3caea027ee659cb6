"""Ends the sandboxes of an Edge that never came back, with all that they hold: the heir of a holder (holder_heir.py).

    python -m dsec.backends.orphans JSON

It is the backend that launched them, which opens, adopts nothing, reaps everything and shuts down: the same door out as ever. When an
Edge comes back meanwhile, the rest is left to it. What was ended is noted, so that the Edge that starts one day knows why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from dsec import syscalls
from dsec.backends.holder_heir import OUTSIDE_FD
from dsec.errors import NotFound

if TYPE_CHECKING:
    from dsec.backends.container import ContainerBackend
    from dsec.layers.mounts import LayerMount

log = structlog.get_logger("dsec.orphans")
NOTE = "orphans.json"
DETAIL = "no Edge was there for longer than edge.orphan_grace_ms"


class NoLayers:
    """Nothing is launched, so no layer is asked for."""

    def staging(self) -> Any:
        raise NotFound("an heir packs nothing")

    async def put_image(self, *_: Any, **__: Any) -> Any:
        raise NotFound("an heir packs nothing")

    async def mount_plan(self, digest: str) -> LayerMount:
        raise NotFound("an heir mounts nothing", field="layer", value=digest)

    async def pull(self, digest: str) -> None:
        raise NotFound("an heir fetches nothing", field="layer", value=digest)


def command(kind: str, options: msgspec.Struct, more: msgspec.Struct | None = None) -> list[str]:
    """What a holder is left: how to open the same backend again, without an heir of its own and without loading layers."""
    told = {"kind": kind, "options": msgspec.to_builtins(options) | {"orphan_grace": -1.0, "remote": False}}
    if more is not None:
        told["more"] = msgspec.to_builtins(more)
    return [sys.executable, "-m", "dsec.backends.orphans", msgspec.json.encode(told).decode()]


def note(state_dir: str, ended: dict[str, float]) -> None:
    """Say which were ended, and when."""
    with open(f"{state_dir}/{NOTE}.new", "wb") as file:
        file.write(msgspec.json.encode(ended))
    os.replace(f"{state_dir}/{NOTE}.new", f"{state_dir}/{NOTE}")


def noted(state_dir: str) -> dict[str, float]:
    """Which were ended, and when (Unix seconds); empty where no note is, or half a one of a disk that was full."""
    try:
        with open(f"{state_dir}/{NOTE}", "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, float])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def forget(state_dir: str) -> None:
    """It has been told."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{state_dir}/{NOTE}")


def _backend(told: dict[str, Any]) -> ContainerBackend:
    from dsec.backends.container import ContainerBackend, Options

    options = msgspec.convert(told["options"], Options)
    if told["kind"] == "docker":
        from dsec.backends.docker import DockerBackend
        from dsec.config import DockerConfig

        return DockerBackend(options, NoLayers(), msgspec.convert(told["more"], DockerConfig))
    return ContainerBackend(options, NoLayers())


async def inherit(told: dict[str, Any]) -> None:
    """Raises what the backend raises; the holder then starts another heir."""
    backend = _backend(told)
    await backend.open()
    done = False
    try:
        if await backend.alone():
            earlier = noted(backend.options.state_dir)  # of an heir that did not get through; reaping takes the note for read
            freed = await backend.reap(frozenset())
            note(backend.options.state_dir, earlier | dict.fromkeys(freed, time.time()))
            log.warning("orphans.ended", count=len(freed))
            done = await backend.alone()
    finally:
        await (backend.shutdown() if done else backend.close())


def main() -> None:
    with contextlib.suppress(OSError):  # started by hand, it is where it should be
        syscalls.setns(OUTSIDE_FD, syscalls.CLONE_NEWNS)
        os.close(OUTSIDE_FD)
    asyncio.run(inherit(msgspec.json.decode(sys.argv[1])))


if __name__ == "__main__":
    main()
