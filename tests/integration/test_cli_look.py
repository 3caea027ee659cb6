"""The command line's looks into what runs: operations, output by offset, use, ends; on the fake backend."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import libdsec
from tests.integration.test_cli_cluster import FAKE, Cli, dsec, environ  # noqa: F401


async def started(environ: dict[str, str], dsec: Cli, name: str) -> str:  # noqa: F811
    """An operation that has written, is looked at, and goes on when it is told to; its id."""
    async with libdsec.connect(environ["DSEC_URL"], project=environ["DSEC_PROJECT"]) as client:
        sandbox = await client.attach(name)
        async with sandbox.start("echo early; cat") as process:
            await process.expect("early\n")
            running = await asyncio.to_thread(dsec, "ops", name)
            assert f"{process.op}   command   running" in running.stdout.decode()
            assert (await asyncio.to_thread(dsec, "logs", name, process.op)).stdout == b"early\n"
            follows = asyncio.ensure_future(asyncio.to_thread(dsec, "logs", name, process.op, "-f"))
            await process.write("late\n")
            await process.close_stdin()
            assert (await follows).stdout == b"early\nlate\n"
            await process.wait()
            return process.op


def test_what_runs_and_what_it_wrote(dsec: Cli, environ: dict[str, str]) -> None:  # noqa: F811
    """exec -d, ops, logs of an operation by offset and followed, top, label, wait, prune, completion of ids."""
    name = dsec("create", "img", *FAKE).stdout.decode().strip()
    op = asyncio.run(started(environ, dsec, name))
    assert dsec("logs", name, op, "--stdout", "6").stdout == b"late\n"
    alone = dsec("exec", "-d", name, "--", "echo", "alone").stdout.decode().strip()
    assert dsec("logs", name, alone, "-f").stdout == b"alone\n"
    assert json.loads(dsec("logs", name, op, "--json").stdout.splitlines()[0])["offset"] == 0
    assert "exit 0" in dsec("ops", name).stdout.decode()
    assert dsec("logs", name, "0" * 32).returncode == 3
    for once in ((), ("--once",)):  # what is no terminal gets one table
        assert name.encode() in dsec("top", *once).stdout
    assert dsec("label", name, "job=b", "old=x").stdout == b"job=b,old=x\n"
    assert dsec("label", name, "old-").stdout == b"job=b\n"
    assert dsec("wait", "--timeout", "0.1", name).returncode == 4
    words = {"COMP_WORDS": f"dsec info {name[:4]}", "COMP_CWORD": "2", "_DSEC_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'dsec'; from dsec.cli import dsec; dsec(prog_name='dsec')"]
    done = subprocess.run(command, env=environ | words, capture_output=True, timeout=30, check=False)
    assert done.stdout.decode().split() == [f"plain,{name}"]
    watching = [sys.executable, "-m", "dsec.cli", "top", "--watch", "-n", "0.1"]
    with subprocess.Popen(watching, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        tables = [process.stdout.readline() for _ in range(4)]  # a head and a line of each
        process.terminate()
    assert [line.startswith(b"ID") for line in tables] == [True, False, True, False]
    dsec("stop", name)
    assert dsec("wait", name).stdout.decode() == f"{name} requested\n"
    assert "requested" in dsec("info", name).stdout.decode()
    assert dsec("prune", "--label", "job=b").stdout.decode().split() == [name]
    assert dsec("info", name).returncode == 3
