"""What the holder does when it is short of descriptors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.holder import Holder
from dsec.backends.holder_parts import Call, Sandbox
from dsec.layers import mounts


class Watched(Holder):
    """Of the holder only what hears of failures."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def _failed(self, box: Sandbox, text: str) -> None:
        self.failures.append(text)


def test_a_launch_whose_process_cannot_be_watched_has_failed() -> None:
    """The zygote says that it runs, and no descriptor of it has come: nobody would hear of its end."""
    holder = Watched()
    holder._launched(Sandbox("x"), 7, "")
    holder._launched(Sandbox("x"), 0, "no memory")
    assert holder.failures == ["its process could not be watched: no descriptor is left", "no memory"]


class Full(Holder):
    """It can open a layer, and then hold no more of them."""

    def __init__(self, opened: int) -> None:
        self.opened = opened
        self.by_paths = True
        self.layers, self.attached = {}, {}

    def guarded(self, mount: Any) -> int:
        return self.opened

    def _hold(self, key: str, fd: int) -> None:
        raise OSError("no room")


def test_a_layer_that_cannot_be_held_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its mount nor its pin stays open."""
    mine, pin = (os.open(tmp_path, os.O_PATH) for _ in range(2))
    monkeypatch.setattr(mounts, "pin_layer", lambda _: pin)
    call = Call({"key": "k", "mount": {"kind": "dir", "source": str(tmp_path)}}, [], None)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no room"):
        Full(mine).op_layer(call)
    for fd in (mine, pin):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
