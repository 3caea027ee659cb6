"""Extract a tar that nobody vouches for into a private directory, as root, so that nothing lands outside it: `dsec.tar` with links resolved
inside the target by openat2, archives in files, and zstd. Blocking: run it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from dsec import syscalls, tar
from dsec.errors import InvalidRequest, NodeError, Unsupported
from dsec.tar import Done, Limits, Stop

__all__ = ["Done", "Limits", "Stop", "extract"]

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20


def extract(source: str | BinaryIO, target: Path, limits: Limits, stop: Stop, keep_owners: bool = True, devices: str = "refuse") -> Done:
    """Extract a tar file (path) or stream into an existing directory. ``stop``, once set, ends it with `NodeError`.
    ``keep_owners``: as the archive says, where the caller may (root); else everything belongs to the caller. ``devices``: "refuse" or
    "skip" device nodes.

    Raises `InvalidRequest` for the archive's faults (damaged, truncated, hostile; the value names the member), `Unsupported` for zstd
    without its program, `NodeError` for the disk's. What was extracted before an error stays: the caller removes the directory.
    """
    root = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    rules = tar.Rules(owners=keep_owners and os.geteuid() == 0, devices=devices)
    try:
        with _open(source) as stream:
            return tar.unpack(stream, root, opener=syscalls.openat2, rules=rules, limits=limits, stop=stop)
    except OSError as error:
        raise NodeError(f"cannot extract: {error}", retryable=error.errno == errno.ENOSPC) from error
    finally:
        os.close(root)


@contextlib.contextmanager
def _open(source: str | BinaryIO) -> Iterator[IO[bytes]]:
    if not isinstance(source, str):
        yield source
        return
    with open(source, "rb") as file:
        if file.read(4) != _ZSTD_MAGIC:
            file.seek(0)
            yield file
            return
    program = shutil.which("zstd")
    if program is None:
        raise Unsupported("the archive is compressed with zstd", field="path", value=source, reason="no zstd", fix="apt-get install zstd")
    with subprocess.Popen([program, "-dcq", "--", source], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
            while process.stdout.read(_CHUNK):  # padding after the archive's end
                pass
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise InvalidRequest("zstd says the archive is damaged", field="path", value=source, fix="check the file")
