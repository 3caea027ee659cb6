"""The public API as a type checker sees it. Not run: tests/unit/test_typing.py has mypy read it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import assert_type

import libdsec
import libdsec.blocking
from dsec.bus.messages import ClusterView, Event
from dsec.model import OpStatus


async def client_api() -> None:
    spec = libdsec.spec("debian-12", memory="2GiB", cpus=0.5, labels={"job": "j"}, toolkits=["a"], workspace="w@1", network=["pypi"])
    assert_type(spec, libdsec.SandboxSpec)
    async with libdsec.connect("nats://127.0.0.1:4222", project="acme/rl", principal="me", lease="job-1", lease_ttl=30) as client:
        assert_type(client, libdsec.Client)
        assert_type(client.lease, str)
        async with client.sandbox("debian-12", qos="ls", idle_timeout=None, on_idle="stop", on_client_loss="pause", ttl=60.0) as sandbox:
            assert_type(sandbox, libdsec.Sandbox)
        async with client.sandbox(spec, timeout=5) as sandbox:
            await sandbox_api(sandbox)
        assert_type(await client.create("debian-12"), libdsec.Sandbox)
        limits = libdsec.Worker(project="acme/rl/below", networks=("none", "open"), on_end="keep")
        assert_type(await client.create("debian-12", worker=limits, toolkits=["libdsec"]), libdsec.Sandbox)
        assert_type(await client.create("debian-12", worker=True, ends_with="n1-0"), libdsec.Sandbox)
        assert_type(await client.create_many(spec, 4, min_ready=2), list[libdsec.Sandbox])
        assert_type(await client.attach("n1-0"), libdsec.Sandbox)
        async with client.burst(spec, 64, min_ready=60, deadline=30, keep_partial=True) as burst:
            async for each in burst:
                assert_type(each, libdsec.Sandbox)
                assert_type(burst.index(each), int)
            assert_type(burst.failed, list[tuple[int, libdsec.DsecError]])
            assert_type(await burst.wait(), list[libdsec.Sandbox])
        client.burst([spec, spec])
        client.burst("debian-12", 8)
        assert_type(await client.list({"job": "j"}, stopped=True), list[libdsec.SandboxInfo])
        for outcomes in (await client.stop(labels={"job": "j"}), await client.pause(ids=["n1-0"]), await client.resume(everything=True)):
            assert_type(outcomes, list[libdsec.ItemOutcome])
            assert_type(outcomes[0].error, libdsec.DsecError | None)
        restored = await client.restore("n1-0", 4, labels={"a": "b"}, min_ready=0, on_client_loss="keep", timeout=9)
        assert_type(restored, libdsec.Restored)
        assert_type(restored.sandboxes, list[libdsec.Sandbox])
        assert_type(restored.results, list[libdsec.Sandbox | libdsec.DsecError])
        assert_type(await client.checkpoints(["n1-0"]), list[libdsec.Checkpoint])
        assert_type(await client.drop_checkpoints([restored.checkpoint.id]), list[libdsec.ItemOutcome])
        assert_type(client.events({"job": "j"}, since="-10m"), AsyncGenerator[Event, None])
        assert_type(await client.nodes(), ClusterView)
    later = await libdsec.connect()
    await later.close()


async def sandbox_api(sandbox: libdsec.Sandbox) -> None:
    assert_type(sandbox.id, str)
    assert_type(await sandbox.checkpoint("name", kind="disk", max_bytes="1GiB"), libdsec.Checkpoint)
    async with await sandbox.fork(4, min_ready=2) as children:
        for child in children:
            assert_type(child, libdsec.Sandbox)
    assert_type(sandbox.labels, dict[str, str])
    result = await sandbox.exec("pytest -q", timeout=600, cwd="/w", env={"A": "1"}, user="agent", stdin=b"x", check=True)
    assert_type(result, libdsec.ExecResult)
    assert_type(result.exit_code, int)
    assert_type(result.stdout, libdsec.Output)
    assert_type(result.stdout.text, str)
    assert_type(result.duration, float)
    assert_type((result.truncated, result.timed_out, result.oom_killed, result.ok), tuple[bool, bool, bool, bool])
    assert_type(result.signal, int | None)
    await sandbox.exec(["ls", "-l"], timeout=0)
    async with sandbox.start("server", tty=True) as process:
        assert_type(process, libdsec.Process)
        async for event in process:
            assert_type(event, libdsec.OutputEvent)
            assert_type(event.data, bytes)
        async for line in process.stdout:
            assert_type(line, bytes)
        async for text in process.lines("stderr"):
            assert_type(text, str)
        await process.write("text")
        await process.close_stdin()
        await process.signal("INT")
        await process.resize(24, 80)
        await process.kill()
        assert_type(await process.wait(5), libdsec.ExecResult)
    async with sandbox.session(cwd="/w", shell="sh") as shell:
        assert_type(await shell.run("cd /", timeout=5), libdsec.ExecResult)
        async with shell.start("make") as process:
            assert_type(process, libdsec.Process)
        await shell.interrupt()
        record = await shell.output(offset=5, stream="stderr")
        assert_type(record.data, bytes)
        assert_type(record.next, int)
        assert_type(shell.detach().id, str)
    async with sandbox.attach_session("0" * 32) as shell:
        await shell.close()
    assert_type(await sandbox.sessions(), list[OpStatus])
    assert_type(await sandbox.is_running(), bool)
    async with sandbox.terminal("python3", rows=30) as process:
        assert_type(await process.expect(">>> ", timeout=5), re.Match[bytes])
        async for text in process.texts():
            assert_type(text, str)
    async with sandbox.process("0" * 32, stdout=7, view=True) as process:
        assert_type(await process.wait(), libdsec.ExecResult)
    assert_type(await sandbox.set_labels({"a": "1"}, remove=["b"]), dict[str, str])
    files = sandbox.files
    assert_type(await files.read("/f"), bytes)
    assert_type(await files.read_text("/f"), str)
    await files.write("/f", "text", mode=0o600)
    assert_type(await files.upload(Path("f"), "/f"), int)
    assert_type(await files.download("/f", "f"), int)
    assert_type((await files.list("/"))[0].size, int)
    assert_type(await files.stat("/f", follow=True), libdsec.Stat)
    assert_type(await files.exists("/f"), bool)
    await files.mkdir("/d")
    await files.remove("/d", recursive=True, missing_ok=True)
    await files.rename("/a", "/b")
    assert_type(await files.read("/f", offset=1, length=2), bytes)
    assert_type(await files.upload(Path("d"), "/d", owners=True), int)
    assert_type((await files.upload_tar(files.download_tar("/d", name="."), "/e")).bytes, int)
    async for piece in files.download_tar("/a", "/b"):
        assert_type(piece, bytes)
    async for change in files.watch("/d", recursive=True):
        assert_type(change, libdsec.FileEvent)
    assert_type(await files.glob("/*"), list[str])
    assert_type(await files.readlink("/l"), str)
    async with sandbox.expose(8000) as address:
        assert_type(address, libdsec.Address)
        assert_type(address.url, str)
    async with sandbox.connect("/run/socket") as connection:
        await connection.send(b"x")
        assert_type(await connection.receive(), bytes)
        await connection.send_eof()
    assert_type(await sandbox.ops(), list[OpStatus])
    assert_type(await sandbox.info(), libdsec.SandboxInfo)
    assert_type(await sandbox.wait(5), libdsec.Exit)
    assert_type(await sandbox.log(), list[str])
    assert_type(await sandbox.pause(), libdsec.Paused)
    await sandbox.resume()
    await sandbox.stop(grace=1.5)


def blocking_api() -> None:
    with libdsec.blocking.connect() as client:
        with client.sandbox("debian-12", memory="1GiB") as sandbox:
            assert_type(sandbox.exec("true"), libdsec.ExecResult)
            assert_type(sandbox.files.read("/f"), bytes)
            for blocking_piece in sandbox.files.download_tar("/d"):
                assert_type(blocking_piece, bytes)
            with sandbox.expose(8000) as blocking_address:
                assert_type(blocking_address.port, int)
            with sandbox.start("cat") as process:
                for event in process:
                    assert_type(event, libdsec.OutputEvent)
            with sandbox.session() as shell:
                assert_type(shell.run("true"), libdsec.ExecResult)
        assert_type(client.list(), list[libdsec.SandboxInfo])


def wrong() -> None:
    """What a type checker must refuse: an unused ignore here is an error as well."""
    client = libdsec.connect()
    client.sandbox("debian-12", memroy="1GiB")  # type: ignore[call-arg]
    client.sandbox("debian-12", qos="fast")  # type: ignore[arg-type]
    libdsec.spec("debian-12", labels={"a": 1})  # type: ignore[dict-item]
