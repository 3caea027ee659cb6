"""Extract a tar that nobody vouches for into a private directory, as root, so that nothing lands outside it: `dsec.tar` with links resolved
inside the target by openat2, and every compression that image layers come in. Blocking: run it in a thread.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from dsec import syscalls, tar
from dsec.errors import InvalidRequest, NodeError, Unsupported
from dsec.tar import Done, Limits, Stop

__all__ = ["Done", "Limits", "Plain", "Stop", "extract", "plain"]

_GZIP_MAGIC, _ZSTD_MAGIC, _BZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0"
_CHUNK = 1 << 20


def extract(
    source: str | BinaryIO | Plain, target: Path, limits: Limits, stop: Stop, keep_owners: bool = True, devices: str = "refuse"
) -> Done:
    """Extract a tar file (path) or stream into an existing directory; a stream is read to its end. ``stop``, once set, ends it with
    `NodeError`.
    ``keep_owners``: as the archive says, where the caller may (root); else everything belongs to the caller. ``devices``: "refuse" or
    "skip" device nodes.

    Raises `InvalidRequest` for the archive's faults (damaged, truncated, hostile; the value names the member), `Unsupported` for zstd
    without its program, `NodeError` for the disk's. What was extracted before an error stays: the caller removes the directory.
    """
    root = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    rules = tar.Rules(owners=keep_owners and os.geteuid() == 0, devices=devices)
    try:
        with _open(source) as stream:
            done = tar.unpack(cast("IO[bytes]", stream), root, opener=syscalls.openat2, rules=rules, limits=limits, stop=stop)
            stream.drain()
            return done
    except OSError as error:
        raise NodeError(f"cannot extract: {error}", retryable=error.errno == errno.ENOSPC) from error
    finally:
        os.close(root)


@contextlib.contextmanager
def _open(source: str | BinaryIO | Plain) -> Iterator[Plain]:
    if isinstance(source, Plain):
        yield source
    elif isinstance(source, str):
        with open(source, "rb") as file, plain(file) as stream:
            yield stream
    else:
        with plain(source) as stream:
            yield stream


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Plain:
    """An uncompressed stream that keeps the hash of what went through it. Damage in compressed data is an `OSError` without a number."""

    def __init__(self, source: _Reader) -> None:
        self._source = source
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._source.read(size if size >= 0 else _CHUNK)
        except (zlib.error, lzma.LZMAError) as error:
            raise OSError(f"damaged: {error}") from error
        self._hash.update(data)
        return data

    def drain(self) -> None:
        """Read what stands behind the archive's end."""
        while self.read(_CHUNK):
            pass

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


@contextlib.contextmanager
def plain(source: BinaryIO) -> Iterator[Plain]:
    """What a stream holds, whether it is compressed with gzip (any number of members), zstd, bzip2, xz or not at all.

    Raises `Unsupported` for zstd without its program, `InvalidRequest` when that finds damage.
    """
    # A stream that is not buffered cannot be looked at before it is read.
    peeked = source if isinstance(source, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", _Raw(source)), _CHUNK)
    magic = peeked.peek(6)[:6]
    if magic.startswith(_ZSTD_MAGIC):
        with _zstd(peeked) as stream:
            yield Plain(stream)
    elif magic.startswith(_GZIP_MAGIC):
        yield Plain(_Gunzip(peeked))
    elif magic.startswith(_XZ_MAGIC):
        yield Plain(lzma.LZMAFile(peeked))  # noqa: SIM115 - the file is the caller's
    elif magic.startswith(_BZIP_MAGIC):
        yield Plain(bz2.BZ2File(peeked))
    else:
        yield Plain(peeked)


class _Raw(io.RawIOBase):
    """Anything with `read` as what a buffered reader wants."""

    def __init__(self, source: _Reader) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Gunzip:
    """gzip's members one after the other, as pigz and eStargz write them. Python's own tarfile ends with the first, its gzip reads 8 KiB
    at a time."""

    def __init__(self, source: _Reader) -> None:
        self._source = source
        self._member = zlib.decompressobj(31)
        self._left = b""
        self._began = False

    def read(self, size: int) -> bytes:
        out: list[bytes] = []
        while size > 0:
            data = self._left or self._source.read(_CHUNK)
            if not data:
                if self._began:
                    raise EOFError("it ends in the middle of a gzip member")
                break
            if not self._began and not data.strip(b"\0"):  # padding behind the last member
                self._left = b""
                continue
            self._began = True
            piece = self._member.decompress(data, size)
            self._left = self._member.unconsumed_tail
            if self._member.eof:
                self._left = self._member.unused_data
                self._member = zlib.decompressobj(31)
                self._began = False
            out.append(piece)
            size -= len(piece)
        return b"".join(out)


@contextlib.contextmanager
def _zstd(source: _Reader) -> Iterator[_Reader]:
    program = shutil.which("zstd")
    if program is None:
        raise Unsupported("the archive is compressed with zstd", field="path", reason="no zstd", fix="apt-get install zstd")
    failed: list[OSError] = []
    with subprocess.Popen([program, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        feed, stdin = source.read, process.stdin

        def pump() -> None:
            try:
                with stdin:
                    while data := feed(_CHUNK):
                        stdin.write(data)
            except (BrokenPipeError, ValueError):  # nobody reads any more
                return
            except OSError as error:  # told by the reader, in its own thread
                failed.append(error)

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        try:
            yield process.stdout
            while process.stdout.read(_CHUNK):  # padding behind the archive's end
                pass
        except BaseException:
            process.kill()
            raise
        finally:
            thread.join()
    if failed:
        raise failed[0]
    if process.returncode != 0:
        raise InvalidRequest("zstd says the archive is damaged", field="path", fix="check the file")
