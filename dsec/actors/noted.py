"""Where the `dsec up` that runs on this machine is noted, for commands that work on its files: a small file that it keeps locked.

The lock is the kernel's, so a note whose writer was killed is known as such, and removed by whoever finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dsec.errors import InvalidRequest

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Note(msgspec.Struct, frozen=True):
    """One that runs. ``config``: the file that its Edge was started with."""

    pid: int
    url: str
    config: str


def folder() -> Path:
    """Of root's notes, or of this user's."""
    mine = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(mine if mine and os.geteuid() else "/run") / "dsec"


@contextlib.contextmanager
def noted(note: Note, where: Path) -> Iterator[None]:
    """Keep the note while the block runs. Where it cannot be written there is none: nothing but convenience hangs on it. Blocks for a
    moment at begin and end."""
    path = where / f"up-{note.pid}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            where.mkdir(mode=0o755, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".new"), "wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(msgspec.json.encode(note))
            file.flush()
            os.rename(file.name, path)
            stack.callback(_remove, path, where)
        yield


def _remove(path: Path, where: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
        where.rmdir()  # where no other one is noted


def running(where: Path) -> list[Note]:
    """Every one that runs now. Blocks for a moment."""
    found = []
    for path in sorted(where.glob("up-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError), open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(msgspec.json.decode(file.read(), type=Note))
            else:
                path.unlink()
    return found


def chosen(notes: list[Note], url: str, asked: bool) -> Note | None:
    """The one that serves at ``url``; where nobody ``asked`` for that address, the only one that there is will do. Raises `InvalidRequest`
    where it cannot be told which one is meant."""
    if not asked and len(notes) == 1:
        return notes[0]
    found = next((note for note in notes if _address(note.url) == _address(url)), None)
    if found is None and notes and not asked:
        several = ", ".join(note.url for note in notes)
        raise InvalidRequest("several `dsec up` run here", field="url", value=several, fix="give the --url of one of them, or --store")
    return found


def _address(url: str) -> tuple[str, int]:
    first = url.split(",", maxsplit=1)[0].strip()
    parts = urlsplit(first if "://" in first else f"nats://{first}")
    host = parts.hostname or ""
    try:
        port = parts.port or 4222
    except ValueError as error:
        raise InvalidRequest("not a server's address", field="url", value=url, fix="use nats://host:4222") from error
    return "" if host in _LOOPBACK else host, port
