"""FUSE files, without a kernel that serves them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dsec.layers import fuse


def test_a_file_that_is_opened_too_late_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited has given up: the descriptor that comes then does not stay open."""
    go_on, opened = threading.Event(), []

    def late(path: str, _size: int) -> int:
        go_on.wait(30)
        opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return opened[0]

    monkeypatch.setattr(fuse, "_open_twice", late)
    monkeypatch.setattr(fuse, "_OPEN_S", 0.01)
    read, write = os.pipe()
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(TimeoutError):
            fuse._open(read, root, 4096)
        go_on.set()
        (worker,) = [thread for thread in threading.enumerate() if thread.name == "dsec-fuse-open"] or [threading.current_thread()]
        if worker is not threading.current_thread():
            worker.join(30)
        end = time.monotonic() + 30
        while not opened and time.monotonic() < end:
            time.sleep(0.001)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(opened[0])
    finally:
        for fd in (read, write, root):
            os.close(fd)
