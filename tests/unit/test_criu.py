"""What is told to CRIU and read from it, without CRIU."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dsec import doctor
from dsec.backends import criu
from dsec.errors import Unsupported

MOUNTS = """\
157 166 0:56 / / rw,nodev - overlay none rw
158 157 0:6 /null /dev/null ro - devtmpfs devtmpfs rw
164 167 0:52 / /proc/acpi ro - tmpfs none rw,size=4k
167 157 0:60 / /proc rw - proc proc rw
169 157 0:61 / /dev/pts rw - devpts devpts rw
170 167 0:6 /null /proc/keys ro - devtmpfs devtmpfs rw
176 167 0:60 /sys /proc/sys ro - proc proc rw
"""


def test_mounts_from_outside_are_all_that_criu_cannot_make() -> None:
    """Not the root, procfs with its read-only parts, and devpts."""
    assert list(criu.outside_mounts(MOUNTS)) == [("/dev/null", "/null"), ("/proc/acpi", "/"), ("/proc/keys", "/null")]


def test_a_restore_names_each_mount_and_both_descriptors() -> None:
    """By the place that it had; covers come from /dev/null and an empty directory."""
    outside = {"/dev/null": criu.NODE, "/proc/keys": criu.NOTHING, "/proc/acpi": criu.EMPTY}
    image = criu.Image(listener=7, upper="file[1:2]", outside=outside, version="4.1.1")
    argv = criu.restore_command("/criu", image, "/images", "/box", "/root", "/empty", "/hook")
    given = {argv[at + 1] for at, word in enumerate(argv) if word == "--external"}
    assert given == {"mnt[/dev/null]:/dev/null", "mnt[/proc/keys]:/dev/null", "mnt[/proc/acpi]:/empty"}
    assert {argv[at + 1] for at, word in enumerate(argv) if word == "--inherit-fd"} == {"fd[3]:socket:[7]", "fd[4]:file[1:2]"}


def test_connections_that_leave() -> None:
    """Not those on loopback, whatever their family, and not what only listens or is closing."""
    head = "  sl  local_address rem_address   st\n"
    loop = "   0: 0100007F:1F90 0100007F:9C40 01\n   1: 0100007F:1F90 00000000:0000 0A\n   2: 0200000A:1F90 0300000A:0050 06\n"
    assert criu.far_connections(head + loop) == []
    assert criu.far_connections(head + loop + "   3: 0200000A:1F90 0300000A:0050 01\n") == ["0300000A:0050"]
    six = "   0: {0}:1F90 {0}:9C40 01\n"
    for near in ("0" * 24 + "01000000", "0" * 16 + "0000FFFF" + "0100007F"):
        assert criu.far_connections(head + six.format(near)) == []
    assert criu.far_connections(head + six.format("0" * 16 + "0000FFFF" + "0300000A"))
    assert criu.far_connections(head + six.format("20010DB8" + "0" * 24))


def test_another_range_of_ids() -> None:
    """The image keeps its two magic numbers, and has one extent for users and one for groups."""
    magic = b"\x19\x43\x56\x54\x67\x40\x47\x55"
    made = criu.with_ids(magic + struct.pack("<I", 3) + b"old", 165_536, 65_536)
    assert made[:8] == magic
    assert struct.unpack("<I", made[8:12]) == (len(made) - 12,)
    extent = b"\x08\x00\x10\xa0\x8d\x0a\x18\x80\x80\x04"
    assert made[12:] == b"\x0a" + bytes([len(extent)]) + extent + b"\x12" + bytes([len(extent)]) + extent


@pytest.mark.parametrize(
    ("log", "meaning"),
    [
        ("(00.1) Error (criu/fsnotify.c:284): fsnotify: \tCan't dump that handle\n(00.2) Error (criu/cr-dump.c:1): x\n", "inotify"),
        ("(00.1) Warn  (criu/a.c:1): nothing\n", "did not say why"),
        ("", "did not say why"),
    ],
)
def test_its_words_are_explained(log: str, meaning: str) -> None:
    """Only errors count; what is not known is quoted."""
    assert meaning in criu.explain(log)[0]


def test_doctor_says_what_refusals_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Switched off, not there, too old."""
    monkeypatch.setenv("DSEC_DISABLE", "criu")
    assert "disabled" in (doctor.reason("criu") or "")
    monkeypatch.delenv("DSEC_DISABLE")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "bin").mkdir()
    old = tmp_path / "bin/criu"
    old.write_text("#!/bin/sh\necho 'Version: 3.17.1'\n")
    old.chmod(0o755)
    with pytest.raises(Unsupported, match=r"3\.17\.1, 4\.0 is needed"):
        criu.find()
    assert criu.look()[0] == "missing"


def test_what_cannot_be_traced_while_it_stands_still() -> None:
    """One that is traced already, and one that is stopped; whatever a process calls itself, and not one that has ended."""
    status = "Name:\tState:\\tT (stopped)\nState:\t{}\nPid:\t7\nTracerPid:\t{}\n"
    assert criu.untraceable(status.format("S (sleeping)", 0), "0") is None
    assert criu.untraceable(status.format("D (disk sleep)", 0), "0") is None
    assert criu.untraceable(status.format("Z (zombie)", 0), "0") is None
    assert criu.untraceable("", "") is None
    for bad, word in ((("t (tracing stop)", 12), "traced"), (("S (sleeping)", 12), "traced"), (("T (stopped)", 0), "stopped")):
        why, fix = criu.untraceable(status.format(*bad), "0") or ("", "")
        assert word in why
        assert fix
    assert criu.untraceable(status.format("D (disk sleep)", 0), "do_signal_stop") is not None
