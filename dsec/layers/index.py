"""The store's names: an append-only journal of JSON lines, replayed into a map. Blocking; `store` calls it in threads.

A line is ``{"op": "tag", "name": "debian-12", "digest": "sha256:…", "ts": 1700000000.0}`` or ``{"op": "untag", …}``. Appends happen
under the store's lock and are fsynced. A crash leaves at most one torn last line: readers skip it and the next append starts on
a fresh line. The journal is also the history: what a name meant before. Names of checkpoints (`PASSING`) come and go by the thousand, each
for one layer: what they meant is left out once it is most of the journal.
"""

from __future__ import annotations

import os
import re
import time
from typing import Literal

import msgspec

from dsec.errors import InvalidRequest

PASSING = "checkpoint/"
COMPACT_BYTES = 256 * 1024  # of a journal that is worth the trouble
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?:[0-9]{1,5}/)?"  # a registry with its port
_NAME = re.compile(rf"{_HOST}{_PART}(?:/{_PART}){{0,7}}(?:[@:][A-Za-z0-9._-]{{1,128}})?(?:@sha256:[0-9a-f]{{64}})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHORT = re.compile(r"sha256:[0-9a-f]{12,63}")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a name."""

    op: Literal["tag", "untag"]
    name: str
    digest: str = ""
    ts: float = 0.0


def check_name(name: str, field: str = "name") -> str:
    """A layer's name: ``debian-12``, ``name:tag``, ``repo@tag``, ``team/repo@tag``. Raises `InvalidRequest`."""
    if not _NAME.fullmatch(name) or name.startswith("sha256:"):
        raise InvalidRequest(
            "not a usable layer name", field=field, value=name, fix="use letters, digits and inner . _ - /, then optionally @tag or :tag"
        )
    return name


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def is_short_digest(text: str) -> bool:
    """A digest's beginning: at least 12 hex digits."""
    return _SHORT.fullmatch(text) is not None


class Index:
    """The journal at ``path``; re-read when another process changed it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] = (-1, -1)
        self._entries: list[Entry] = []
        self._names: dict[str, str] = {}

    def names(self) -> dict[str, str]:
        """Every name and the digest that it means now."""
        self._refresh()
        return dict(self._names)

    def digest(self, name: str) -> str | None:
        """What one name means now; `names` copies them all."""
        self._refresh()
        return self._names.get(name)

    def history(self, name: str) -> tuple[Entry, ...]:
        """What became of one name, oldest first."""
        self._refresh()
        return tuple(entry for entry in self._entries if entry.name == name)

    def append(self, entry: Entry) -> None:
        """Add a line and fsync it. The caller holds the store's lock."""
        line = msgspec.json.encode(msgspec.structs.replace(entry, ts=entry.ts or time.time())) + b"\n"
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a writer died in the middle of its line
                line = b"\n" + line
            if os.write(fd, line) != len(line):
                raise OSError(28, f"{self._path}: short write")
            os.fsync(fd)
        finally:
            os.close(fd)
        if size > COMPACT_BYTES and entry.op == "untag" and entry.name.startswith(PASSING):
            self._compact()

    def _compact(self) -> None:
        """Write the journal anew, when that halves it. Readers see the old one or the new one, by its inode."""
        self._refresh()
        kept = [entry for entry in self._entries if entry.name in self._names or not entry.name.startswith(PASSING)]
        if 2 * len(kept) > len(self._entries):
            return
        temporary = f"{self._path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.writelines(msgspec.json.encode(entry) + b"\n" for entry in kept)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, self._path)
        fd = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._seen, self._entries, self._names = (-1, -1), [], {}
            return
        if self._seen == (status.st_ino, status.st_size):  # the journal only grows
            return
        with open(self._path, "rb") as file:
            data = file.read()
        entries = []
        for line in data.split(b"\n"):
            try:
                entries.append(msgspec.json.decode(line, type=Entry))
            except msgspec.DecodeError:  # a torn line: its writer was never told that it had succeeded
                continue
        names: dict[str, str] = {}
        for entry in entries:
            if entry.op == "tag":
                names[entry.name] = entry.digest
            else:
                names.pop(entry.name, None)
        self._seen, self._entries, self._names = (status.st_ino, len(data)), entries, names
