"""What the kernel is asked for beside files and mounts."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import threading

from dsec import syscalls

LOOK = "from tests.unit.test_syscalls import own_slice; print(own_slice())"


def own_slice() -> int:
    """Of the calling thread: ``sched_runtime`` of sched_getattr(2), nanoseconds."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    words = (ctypes.c_uint64 * 7)()
    assert ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(words), ctypes.sizeof(words), 0) == 0
    return words[3]


def test_a_thread_asks_for_a_slice_of_its_own() -> None:
    """The wish is heard where the kernel knows it, in the calling thread only, and not by what that thread starts."""
    before = own_slice()
    seen: list[object] = []

    def ask() -> None:
        seen.append(syscalls.run_slice(0.0123))
        seen.append(own_slice())
        seen.append(int(subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True).stdout))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    known = tuple(int(each) for each in platform.release().split(".")[:2] if each.isdecimal()) >= (6, 12)
    assert seen == [True, 12_300_000 if known else before, before]
    assert own_slice() == before
