"""The command line against a running cluster with the fake backend: what users type, what they get, and how it exits."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any

import pytest

Cli = Callable[..., subprocess.CompletedProcess[bytes]]
FAKE = ("--backend", "fake", "--memory", "32MiB", "--disk", "1MiB", "--pids", "16", "--cpus", "0.01")


@pytest.fixture
def environ(fake_cluster: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
    return clean | {"DSEC_URL": fake_cluster, "DSEC_PROJECT": f"cli/{os.urandom(4).hex()}"}


@pytest.fixture
def dsec(environ: dict[str, str]) -> Cli:
    def call(*arguments: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if data is None else {"input": data}
        command = [sys.executable, "-m", "dsec.cli", *arguments]
        return subprocess.run(command, capture_output=True, timeout=60, env=environ, check=False, **given)

    return call


def test_run_is_like_docker_run(dsec: Cli) -> None:
    """Output and exit code are the command's, options stand before or after the image, and nothing stays."""
    done = dsec("run", *FAKE, "img", "echo", "a", "-e", "b")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a -e b\n", b"")
    done = dsec("run", "img", *FAKE, "-e", "X=1", "--", "/bin/sh", "-c", "echo $X; nonsense; exit 3")
    assert (done.returncode, done.stdout) == (3, b"1\n")
    assert b"not found" in done.stderr
    assert dsec("run", *FAKE, "img", "cat", data=b"piped in").stdout == b"piped in"
    assert dsec("run", *FAKE, "--timeout", "0.2", "img", "sleep", "30").returncode == 137
    assert dsec("run", *FAKE, "img", "no-such-program").returncode == 127
    assert dsec("run", *FAKE, "missing", "true").returncode == 125
    wrong = {("--memry", "1g", "--", "true"): b"--memry", ("-m",): b"-m", ("-m", "1GiB", "true"): b"before IMAGE or ID"}
    assert b"before IMAGE or ID" in dsec("burst", *FAKE, "img", "-n", "3", "true").stderr
    for words, told in wrong.items():  # no program's name begins with a dash
        done = dsec("run", *FAKE, "img", *words)
        assert done.returncode == 2
        assert told in done.stderr
    result = json.loads(dsec("run", *FAKE, "--json", "img", "--", "/bin/sh", "-c", "echo x; exit 4").stdout)
    assert (result["exit_code"], result["stdout"]) == (4, "x\n")
    assert dsec("ls", "-q").stdout == b""


def test_a_sandbox_from_create_to_stop(dsec: Cli, tmp_path: Any) -> None:
    """create, ls, info, exec, cp, logs, pause, stop, and how it reads afterwards."""
    name = dsec("create", "img", *FAKE, "--label", "job=a").stdout.decode().strip()
    assert dsec("ls", "-q", "--label", "job=a").stdout.decode().split() == [name]
    assert [row["id"] for row in json.loads(dsec("ls", "--json").stdout)] == [name]
    assert json.loads(dsec("info", name, "--json").stdout)["labels"] == {"job": "a"}
    assert f"id:           {name}" in dsec("info", name).stdout.decode()
    assert dsec("exec", name, "--", "echo", "hi").stdout == b"hi\n"
    assert dsec("exec", name, "--", "/bin/sh", "-c", "exit 9").returncode == 9
    (tmp_path / "f").write_bytes(b"content")
    assert dsec("cp", str(tmp_path / "f"), f"{name}:/tmp/").returncode == 0
    assert dsec("exec", name, "cat", "/tmp/f").stdout == b"content"
    assert dsec("cp", f"{name}:/tmp/f", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == b"content"
    assert dsec("cp", f"{name}:/missing", str(tmp_path)).returncode == 3
    assert b"running" in dsec("logs", name).stdout
    assert dsec("pause", name).returncode == 0
    assert b"paused" in dsec("ls").stdout
    assert dsec("resume", "--label", "job=a").stdout.decode().strip() == name
    assert json.loads(dsec("stop", name, "--json").stdout) == [{"id": name, "error": None}]
    assert dsec("stop", name).returncode == 0
    gone = dsec("exec", name, "true")
    assert gone.returncode == 125
    assert b"requested" in gone.stderr
    assert dsec("pause", name).returncode == 3
    assert name.encode() in dsec("ls", "-a").stdout
    kinds = [json.loads(line)["kind"] for line in dsec("events", "--json", "--label", "job=a").stdout.splitlines()]
    assert kinds[0] in ("created", "running")
    assert kinds[-1] == "stopped"


def test_steps_the_log_and_what_a_pause_gave(dsec: Cli) -> None:
    """exec --step keeps a result and runs once; log names all commands by number; pause --json says of each what it gave back."""
    name = dsec("create", "img", *FAKE).stdout.decode().strip()
    for _ in range(2):
        done = dsec("exec", "--step", "one", name, "--", "/bin/sh", "-c", "echo x >> /f; echo out; exit 3")
        assert (done.returncode, done.stdout) == (3, b"out\n")
    assert dsec("exec", name, "cat", "/f").stdout == b"x\n"
    assert dsec("exec", "--step", "one", name, "--", "echo", "other").returncode == 125
    assert dsec("exec", "-d", "--step", "two", name, "--", "true").returncode == 2
    log = json.loads(dsec("log", name, "--json").stdout)
    assert (log[0]["seq"], log[0]["step"], log[0]["argv"][-1]) == (1, "one", "echo x >> /f; echo out; exit 3")
    assert b"one" in dsec("log", name).stdout
    assert [item["seq"] for item in json.loads(dsec("log", name, "--after", "1", "--json").stdout)] == [2]
    results = json.loads(dsec("pause", name, "--json").stdout)
    assert [(item["id"], item["error"], "note" in item["paused"]) for item in results] == [(name, None, True)]
    assert b"paused:" in dsec("info", name).stdout
    assert dsec("stop", name).returncode == 0


def test_cp_as_docker_cp(dsec: Cli, tmp_path: Any) -> None:
    """Directories and what is in them, several sources, globs, a tar on standard input and output; wrong words are told."""
    name = dsec("create", "img", *FAKE).stdout.decode().strip()
    (tmp_path / "src/sub").mkdir(parents=True)
    (tmp_path / "src/a.xml").write_bytes(b"A")
    (tmp_path / "src/sub/b.xml").write_bytes(b"B")
    src = str(tmp_path / "src")
    assert dsec("cp", src, f"{name}:/new").returncode == 0  # absent: its own name
    assert dsec("exec", name, "cat", "/new/a.xml", "/new/sub/b.xml").stdout == b"AB"
    assert dsec("cp", src, f"{name}:/new").returncode == 0  # there: into it
    assert dsec("cp", f"{src}/.", f"{name}:/tmp/").returncode == 0
    assert dsec("cp", f"{src}/a.xml", f"{src}/sub/b.xml", f"{name}:/many/").returncode == 0
    words = ("/new/src/a.xml", "/tmp/sub/b.xml", "/many/a.xml", "/many/b.xml")
    assert dsec("exec", name, "cat", *words).stdout == b"ABAB"
    (tmp_path / "out").mkdir()
    done = dsec("cp", "--json", f"{name}:/many/*.xml", str(tmp_path / "out"))
    assert json.loads(done.stdout)["bytes"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.xml", "b.xml"]
    assert dsec("cp", f"{name}:/new", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/src/sub/b.xml").read_bytes() == b"B"
    tar = dsec("cp", f"{name}:/new/sub", f"{name}:/many/a.xml", "-").stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert sorted(archive.getnames()) == ["a.xml", "sub", "sub/b.xml"]
    assert dsec("cp", "-", f"{name}:/from", data=tar).returncode == 0
    assert dsec("exec", name, "cat", "/from/sub/b.xml").stdout == b"B"
    assert dsec("cp", f"{name}:/many/*.none", str(tmp_path)).returncode == 3
    for wrong in (["a", "b"], [f"{name}:/a", f"{name}:/b"], ["-", src, f"{name}:/x"], [f"{name}:/many/*", str(tmp_path / "no-directory")]):
        assert dsec("cp", *wrong).returncode == 2, wrong
    assert dsec("cp", str(tmp_path / "absent"), f"{name}:/x").returncode == 3
    assert dsec("stop", name).returncode == 0


def test_port_forward(dsec: Cli, environ: dict[str, str]) -> None:
    """It says where it listens, carries bytes, and ends with Ctrl+C or with the sandbox."""
    name = dsec("create", "img", *FAKE).stdout.decode().strip()
    for words in (["0:x"], ["70000"], ["1:2:3"], ["relative"]):
        assert dsec("port-forward", name, *words).returncode == 2, words
    command = [sys.executable, "-m", "dsec.cli", "port-forward", "--json", name, ":7"]
    for end in ("interrupt", "stop"):
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert told["remote"] == 7
            with socket.create_connection((told["host"], told["port"]), timeout=10) as connection:
                connection.sendall(b"echo")
                connection.shutdown(socket.SHUT_WR)
                assert connection.makefile("rb").read() == b"echo"
            if end == "interrupt":
                process.send_signal(signal.SIGINT)
            else:
                assert dsec("stop", name).returncode == 0
            assert process.wait(20) == (130 if end == "interrupt" else 3)


def test_burst_counts_outcomes(dsec: Cli) -> None:
    """Each sandbox runs the command; the exit code says whether all went well."""
    done = dsec("burst", "img", *FAKE, "-n", "12", "--", "echo", "same")
    assert done.returncode == 0, done.stderr
    assert b"12      0      same" in done.stdout
    result = json.loads(dsec("burst", "img", *FAKE, "-n", "3", "--json", "--", "false").stdout)
    assert [row["exit_code"] for row in result["results"]] == [1, 1, 1]
    failed = dsec("burst", "missing", *FAKE, "-n", "3")
    assert failed.returncode == 1
    assert failed.stderr.count(b"\n") == 1
    assert dsec("ls", "-q").stdout == b""


def test_nodes_and_the_bus(dsec: Cli) -> None:
    """node ls, and raw requests in JSON."""
    assert b"up" in dsec("node", "ls").stdout
    assert json.loads(dsec("node", "ls", "--json").stdout)["nodes"]
    answer = json.loads(dsec("bus", "req", "dsec.v1.main.all.list.local.nobody", "{}").stdout)
    assert answer["edge"]
    seen = json.loads(dsec("bus", "sub", "dsec.v1.main.hb.*", "-n", "1").stdout)
    assert seen["payload"]["edge"] == answer["edge"]
    assert dsec("bus", "req", "nobody.there", "{}").returncode == 4
    every = dsec("bus", "req", "$SRV.PING", "--replies", "0", "--timeout", "0.5")
    assert every.returncode == 0
    assert {"dsec-scheduler", "dsec-watcher", "dsec-edge"} <= {json.loads(line)["name"] for line in every.stdout.splitlines()}
    assert dsec("bus", "req", "dsec.v1.*.x", "{}").returncode == 2


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_leaves_nothing(dsec: Cli, environ: dict[str, str], signum: int, code: int) -> None:
    """Ctrl+C and SIGTERM end the command and its sandbox, without a traceback."""
    command = [sys.executable, "-m", "dsec.cli", "run", *FAKE, "img", "--", "/bin/sh", "-c", "echo up; sleep 60"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    began = time.monotonic()
    process.send_signal(signum)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert time.monotonic() - began < 5
    assert b"Traceback" not in errors
    assert dsec("ls", "-q").stdout == b""


def test_a_reader_that_leaves(environ: dict[str, str], dsec: Cli) -> None:
    """`dsec run … | head` ends quietly, and the sandbox with it."""
    line = f"{sys.executable} -m dsec.cli run {' '.join(FAKE)} img -- yes | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, timeout=30, stdin=subprocess.DEVNULL, check=False)
    assert done.stdout == b"y\n"
    assert done.returncode == 141
    assert done.stderr == b""
    assert dsec("ls", "-q").stdout == b""
