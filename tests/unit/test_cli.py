"""The command line without a cluster: it parses, it is light, and it says what is wrong in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from dsec import cli
from dsec.commands import common, files, layer, outcome, run
from dsec.errors import Busy, InvalidRequest, NotFound, SandboxGone, Unavailable
from dsec.layers import bootstrap
from dsec.model import Captured
from libdsec import ExecResult, Output

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


def test_bases_are_called_by_what_they_are(tmp_path: Path) -> None:
    """busybox makes busybox, a Debian is named after its release, and what is Debian's is refused for the other."""
    assert [bootstrap.debian_name(suite) for suite in ("bookworm", "trixie", "sid")] == ["debian-12", "debian-13", "debian-sid"]
    done = dsec("layer", "bootstrap", "ubuntu", "--store", str(tmp_path))
    assert done.returncode == 2
    assert b"'debian', 'busybox'" in done.stderr
    done = dsec("layer", "bootstrap", "busybox", "--suite", "trixie", "--store", str(tmp_path))
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert b"Debian's" in done.stderr


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
        (["ps"], 2, "did you mean ls?"),
        (["pull", "x"], 2, "did you mean layer pull?"),
        (["run"], 2, "IMAGE"),
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


@pytest.mark.parametrize("arguments", [("--json", "nonsense"), ("ls", "--json", "--nonsense"), ("stop", "--json"), ("run", "--json")])
def test_json_usage_errors_are_json_too(arguments: tuple[str, ...]) -> None:
    """A wrong option or a missing argument is told in the same form as any other error."""
    done = dsec(*arguments)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["retryable"]) == (2, "invalid", False)
    assert "--help" in error["fix"]


@pytest.mark.parametrize("arguments", [(), ("layer",), ("node",), ("bus",)])
def test_a_group_without_a_command_shows_its_help(arguments: tuple[str, ...]) -> None:
    """`dsec` alone prints the help as it is laid out, on standard error, as wrong usage."""
    done = dsec(*arguments)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (2, b"")
    assert lines[0].startswith("Usage: dsec ")
    assert len(lines) > 8


def test_a_file_that_is_not_there_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be decoded is said to be neither a file nor digits; an event kind that nobody knows is told."""
    done = dsec("decode", "/nonexistent")
    assert (done.returncode, b"neither a file nor" in done.stderr) == (2, True)
    assert outcome.report(FileNotFoundError(2, "No such file or directory", "x"), []) == 3
    assert f"x: No such file or directory (it is looked for on this machine, from {os.getcwd()})" in capsys.readouterr().err
    assert b"no such kind of event" in dsec("--url", "nats://127.0.0.1:1", "events", "--kind", "start").stderr


def test_a_local_repository_takes_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIR@REV is a revision where the directory is there, relative or not; an @ in a name that exists is the name's."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "odd@name").mkdir()
    monkeypatch.chdir(tmp_path)
    assert layer.split_revision("repo@v1") == ("repo", "v1")
    assert layer.split_revision("odd@name") == ("odd@name", "HEAD")
    assert layer.split_revision("git@host:path") == ("git@host:path", "HEAD")


def test_a_layers_record_is_told_in_words() -> None:
    """Sizes and times are read by people; what a layer sets is named; what is empty is left out."""
    from dsec.layers.store import LayerConfig, LayerInfo

    config = LayerConfig(env={"A": "1"}, user="agent")
    info = LayerInfo(
        digest="sha256:" + "0" * 64, stored="erofs", size=2048, created_ts=time.time(), source="dir x", config=config, names=("n", "m")
    )
    lines = layer.lines_of(info)
    assert {"env": "A=1", "user": "agent", "size": "2.0 KiB", "names": "n, m"}.items() <= dict(lines).items()
    assert not [name for name, value in lines if not value or "LayerConfig" in value]


def test_a_burst_counts_what_failed_alike_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The sandbox's id does not make two of one mistake."""
    errors = [NotFound("cannot run the command", field="argv", value="nosuch", sandbox=f"n1-{at}") for at in range(3)]
    run.show_burst(settings_of(), [{"exit_code": None, "error": error} for error in errors], [], 1.0)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()][1] == ["3", "error"]


def test_the_disk_mode_that_a_note_advises_is_an_option(tmp_path: Path) -> None:
    """`degraded` advises disk_mode="loop": the command line has it too."""
    apart = {"DSEC_EDGE__STATE_DIR": str(tmp_path)}  # whatever clusters run on this machine
    done = dsec("inspect", "--plan", "x", "--backend", "fake", "--disk-mode", "dir", env=apart)
    assert json.loads(done.stdout)["disk_mode"] == "dir", done.stderr
    assert dsec("create", "x", "--disk-mode", "floppy").returncode == 2


def test_a_plan_is_made_of_the_store_that_is_named(tmp_path: Path) -> None:
    """`dsec inspect --plan --store` looks there, as `dsec layer --store` does: a cluster's own state directory is looked into."""
    from dsec.layers.store import LayerStore

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "f").write_text("x")
    made = dsec("layer", "import", str(tmp_path / "src"), "--name", "mine", "--store", str(tmp_path / "layers"))
    if made.returncode and os.geteuid() != 0:
        pytest.skip("layers are made by root")
    assert made.returncode == 0, made.stderr
    assert LayerStore(tmp_path / "layers").lookup("mine")
    done = dsec("inspect", "--plan", "mine", "--store", str(tmp_path / "layers"))
    assert json.loads(done.stdout)["lowers"][0]["name"] == "mine", done.stderr
    assert dsec("inspect", "--plan", "mine", "--store", str(tmp_path / "none")).returncode == 3


async def test_json_changes_the_form_and_not_the_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """`dsec run --json` has no limit unless one is given, as without --json."""
    limits: list[object] = []

    class Box:
        id = "n1-x"

        async def exec(self, cmd: list[str], **options: object) -> ExecResult:
            limits.append(options["timeout"])
            return ExecResult(exit_code=0, stdout=Output.of(Captured()), stderr=Output.of(Captured()), duration=0.0, op="o")

    settings = common.Settings({"as_json": True})
    for timeout in (None, 3.0):
        assert await run.follow(settings, Box(), ("true",), timeout=timeout, feed=False) == 0  # type: ignore[arg-type]
    assert limits == [0, 3.0]
    assert json.loads(capsys.readouterr().out.splitlines()[0])["exit_code"] == 0


def settings_of() -> common.Settings:
    return common.Settings({})


def test_decode_reads_bytes_and_hex() -> None:
    """`dsec decode` shows msgpack from a pipe, from hexadecimal text and JSON as it is."""
    data = msgspec.msgpack.encode({"a": [1, b"x"], "b": None})
    for given, argument in ((data, "-"), (data.hex().encode(), "-"), (b"", data.hex())):
        done = dsec("decode", argument, data=given)
        assert json.loads(done.stdout) == {"a": [1, "eA=="], "b": None}, done.stderr
    assert dsec("decode", data=b"\xc1").returncode == 2


def test_version_and_completion() -> None:
    """Versions as JSON and as one line; completion scripts for three shells."""
    assert json.loads(dsec("version", "--json").stdout)["dsec"] == dsec("--version").stdout.decode().split()[1]
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


def test_what_a_create_waits_for_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, with the reason, and again only when the reason has changed."""
    from dsec.commands.common import WaitNotes
    from dsec.errors import Busy

    notes = WaitNotes()
    for count, text in ((1, "no room on n1"), (1, "no room on n1"), (3, "no node is up")):
        notes(count, Busy(text))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "dsec: 1 sandbox waits for room: no room on n1\ndsec: 3 sandboxes wait for room: no node is up\n"
