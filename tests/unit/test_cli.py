"""The command line without a cluster: it parses, it is light, and it says what is wrong in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import msgspec
import pytest

from dsec import cli
from dsec.commands import common, files, layer, outcome, run
from dsec.errors import Busy, InvalidRequest, NotFound, SandboxGone, Unavailable

NODE_ONLY = ("uvloop", "aiofiles", "pyroute2", "aiodocker", "ziglang", "nats_server")


def dsec(*arguments: str, data: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    program = [sys.executable, "-m", "dsec.cli", *arguments]
    return subprocess.run(program, input=data, capture_output=True, timeout=60, env=os.environ | (env or {}), check=False)


def test_every_command_has_help() -> None:
    """Each command of the list exists, under its own name, and explains itself."""
    for name, (module, line) in cli.COMMANDS.items():
        command = cli.dsec.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None, (name, module)
        assert command.name == name
        assert line.endswith(".")
        assert name == "completion" or command.help


def test_help_is_quick_and_light() -> None:
    """`dsec --help` neither imports NATS nor takes long."""
    code = "import sys; from dsec.cli import invoke; invoke(['--help']); print([m for m in ('nats','rich','msgspec') if m in sys.modules])"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 1.5  # 0.1 s on an idle machine
    assert done.stdout.rstrip().endswith("[]")


def test_the_light_client_works_without_the_node() -> None:
    """libdsec and every command import where no package of the node extra is installed."""
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {NODE_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
import libdsec, libdsec.blocking, dsec.cli
for name in dsec.cli.COMMANDS:
    dsec.cli.dsec.get_command(None, name)
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "no such command"),
        (["exce", "x"], 2, "did you mean exec"),
        (["run", "debian-12"], 2, "which command"),
        (["exec", "no-id", "--", "true"], 125, "not a sandbox id"),
        (["info", "no-id"], 2, "ids look like"),
        (["run", "debian-12", "--memory", "lots", "--", "true"], 125, "memory='lots'"),
        (["create", "../etc"], 2, "image='../etc'"),
        (["create", "debian-12", "--label", "a"], 2, "KEY=VALUE"),
        (["stop"], 2, "--label"),
        (["cp", "a", "b"], 2, "ID:PATH"),
        (["--url", "nats://127.0.0.1:1", "ls"], 4, "no nats-server answers"),
        (["--project", "a..b", "ls"], 2, "project"),
        (["layer", "info", "--store", "/proc/none", "x"], None, "dsec:"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int | None, words: str) -> None:
    """A mistake costs one line on standard error, nothing on standard output, and a code that says whose it is."""
    done = dsec(*arguments)
    text = done.stderr.decode()
    assert code is None or done.returncode == code, text
    assert done.returncode not in (0, None)
    assert words in text
    assert text.count("\n") == 1
    assert "Traceback" not in text
    assert done.stdout == b""


def test_json_errors_are_json() -> None:
    """With --json the error stands on standard output as an object."""
    done = dsec("info", "no-id", "--json")
    assert json.loads(done.stdout)["error"]["code"] == "invalid"


def test_decode_reads_bytes_and_hex() -> None:
    """`dsec decode` shows msgpack from a pipe, from hexadecimal text and JSON as it is."""
    data = msgspec.msgpack.encode({"a": [1, b"x"], "b": None})
    for given, argument in ((data, "-"), (data.hex().encode(), "-"), (b"", data.hex())):
        done = dsec("decode", argument, data=given)
        assert json.loads(done.stdout) == {"a": [1, "eA=="], "b": None}, done.stderr
    assert dsec("decode", data=b"\xc1").returncode == 2


def test_version_and_completion() -> None:
    """Versions as JSON; completion scripts for three shells."""
    assert json.loads(dsec("version", "--json").stdout)["dsec"]
    for shell in ("bash", "zsh", "fish"):
        assert b"_DSEC_COMPLETE" in dsec("completion", shell).stdout
    done = dsec(env={"_DSEC_COMPLETE": "bash_complete", "COMP_WORDS": "dsec la", "COMP_CWORD": "1"})
    assert b"layer" in done.stdout


def test_exit_codes_by_fault() -> None:
    """The exit code tells the caller's fault from an absent thing and from a busy cluster."""
    assert outcome.code_of(InvalidRequest("x")) == 2
    assert outcome.code_of(NotFound("x")) == outcome.code_of(SandboxGone("x")) == 3
    assert outcome.code_of(Busy("x")) == outcome.code_of(Unavailable("x")) == 4
    assert run.failure(NotFound("no such program", field="argv")) == 127
    assert run.failure(NotFound("no such layer", field="image")) == 125


def test_copy_words() -> None:
    """ID:PATH is told from local paths that hold a colon."""
    ulid = "01k" + "0" * 23
    assert files.split(f"n-1-{ulid}:/a:b") == (f"n-1-{ulid}", "/a:b")
    assert files.split("./a:b") == ("", "./a:b")
    assert files.split(f"n1-{ulid}:") == (f"n1-{ulid}", "/")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("https://host/a/b.git@v1", ("https://host/a/b.git", "v1")),
        ("https://user@host/a/b.git", ("https://user@host/a/b.git", "HEAD")),
        ("https://user@host/a/b@main", ("https://user@host/a/b", "main")),
        ("git@host:a/b.git", ("git@host:a/b.git", "HEAD")),
        ("git@host:a/b.git@v2", ("git@host:a/b.git", "v2")),
        ("/srv/repo@abc", ("/srv/repo", "abc")),
    ],
)
def test_git_revisions(source: str, expected: tuple[str, str]) -> None:
    """A revision stands after the last @ of the path, not after a user name."""
    assert layer.split_revision(source) == expected


def test_texts_for_people() -> None:
    """Sizes and ages are short."""
    assert common.size_text(512) == "512 B"
    assert common.size_text(1536) == "1.5 KiB"
    assert common.size_text(3 << 30) == "3.0 GiB"
    assert common.age(0) == ""
    assert common.age(1000, now=1042) == "42s"
    assert common.age(1000, now=1000 + 7200) == "2h"
    assert common.pairs(["A=1", "B"], "-e", lookup={"B": "2"}) == {"A": "1", "B": "2"}
