"""The static programs: what a build makes and when it is made again."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.backends.guest import build

MACHINES = {"x86_64": 62, "aarch64": 183}


def describe(path: Path) -> tuple[int, set[int]]:
    """(e_machine, types of the program headers) of an ELF file."""
    raw = path.read_bytes()
    assert raw[:6] == b"\x7fELF\x02\x01"
    machine = struct.unpack_from("<H", raw, 18)[0]
    offset, size, count = struct.unpack_from("<Q", raw, 32)[0], *struct.unpack_from("<HH", raw, 54)
    return machine, {struct.unpack_from("<I", raw, offset + i * size)[0] for i in range(count)}


@pytest.mark.parametrize("program", build.available())
def test_programs_are_static_and_small(program: str) -> None:
    """No interpreter and no dynamic section: they run in any image. (A library has the latter.)"""
    path = build.ensure(program=program)
    machine, headers = describe(path)
    assert machine == MACHINES[build.native_arch()]
    assert not headers & ({3} if program in build.LIBRARIES else {2, 3})
    assert path.stat().st_size < 128 << 10


@pytest.mark.slow
@pytest.mark.parametrize("program", build.available())
def test_programs_are_built_for_the_other_architecture(program: str) -> None:
    """The wheel carries both."""
    for arch in build.ARCHES:
        machine, headers = describe(build.ensure(arch, program))
        assert machine == MACHINES[arch]
        assert not headers & ({3} if program in build.LIBRARIES else {2, 3})


def test_a_changed_source_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an unchanged one is not; a source that does not compile says why and leaves nothing."""
    (tmp_path / "src").mkdir()
    source = tmp_path / "src/main.c"
    source.write_text("int main(void) { return 3; }\n")
    monkeypatch.setattr(build, "PROGRAMS", {"tiny": str(tmp_path / "src")})
    monkeypatch.setattr(build, "BIN", tmp_path / "bin")
    path = build.ensure(program="tiny")
    assert subprocess.run([path], check=False).returncode == 3
    made = path.stat().st_ino
    assert build.ensure(program="tiny").stat().st_ino == made
    source.write_text("int main(void) { return 4; }\n")
    assert subprocess.run([build.ensure(program="tiny")], check=False).returncode == 4
    source.write_text("int main(void) { return x; }\n")
    with pytest.raises(build.BuildError, match="undeclared"):
        build.ensure(program="tiny")
    assert sorted(item.name for item in (tmp_path / "bin").iterdir() if not item.name.startswith(".")) == [path.name, f"{path.name}.sha256"]


def test_bad_arguments_are_refused_by_the_agent() -> None:
    """No listener, an unknown option, a descriptor that is no listening socket: usage and exit code 2."""
    agent = str(build.ensure())
    for arguments in ((), ("--fd",), ("--fd", "0"), ("--nonsense",), ("--fd", "99")):
        done = subprocess.run([agent, *arguments], capture_output=True, check=False, stdin=subprocess.DEVNULL)
        assert (done.returncode, done.stderr[:6]) == (2, b"usage:")


def test_the_command_line_names_what_it_made() -> None:
    """``python -m dsec.backends.guest.build`` is what the set-up runs."""
    done = subprocess.run(
        [sys.executable, "-m", "dsec.backends.guest.build", "--program", "aether"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(build.__file__).parents[3],
        env=dict(os.environ),
    )
    assert f"aether-{build.native_arch()}" in done.stdout
