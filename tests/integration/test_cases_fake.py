"""The reported cases that say something about the chain from client to Edge, on the fake backend: fast, and without root."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import libdsec
from libdsec import Client, NotFound, SandboxError, SandboxGone

FAKE: Any = {"backend": "fake", "memory": "32MiB", "cpus": 0.01, "disk": "1MiB", "pids": 16}


@pytest_asyncio.fixture
async def dsec(fake_cluster: str) -> AsyncIterator[Client]:
    async with libdsec.connect(fake_cluster, project=f"c/{os.urandom(4).hex()}", lease_ttl=2) as client:
        yield client
        await client.stop(everything=True)


async def test_c08_a_background_child_does_not_hold_exec(dsec: Client) -> None:
    """exec of `sleep 60 &` returns in less than a second."""
    async with dsec.sandbox("img", **FAKE) as sb:
        began = time.monotonic()
        assert (await sb.exec("sleep 60 & echo done")).stdout == b"done\n"
        assert time.monotonic() - began < 1


async def test_c09_c11_a_timeout_is_kept(dsec: Client) -> None:
    """exec returns by its deadline, and nothing of it runs then."""
    async with dsec.sandbox("img", **FAKE) as sb:
        began = time.monotonic()
        assert (await sb.exec("sleep 60", timeout=0.3)).timed_out
        assert time.monotonic() - began < 2
        assert not [op for op in await sb.ops() if op.running]


async def test_c12_c13_the_default_timeout_is_execs_own(dsec: Client) -> None:
    """exec has the sandbox's default, `start` has none, and an exit code of 124 is no time-out."""
    async with dsec.sandbox("img", exec_timeout=0.3, **FAKE) as sb:
        assert (await sb.exec("sleep 60")).timed_out
        assert not (await sb.exec("exit 124")).timed_out
        async with sb.start("sleep 0.6; echo through") as process:
            assert [line async for line in process.lines()] == ["through"]


async def test_c14_c25_a_dead_sandbox_says_why(dsec: Client) -> None:
    """Each end has its own reason, told by every later request."""
    made = {
        "requested": await dsec.create("img", **FAKE),
        "deadline": await dsec.create("img", ttl=0.3, **FAKE),
        "idle": await dsec.create("img", idle_timeout=0.3, on_idle="stop", **FAKE),
    }
    await made["requested"].stop()
    for reason, sb in made.items():
        assert (await sb.wait(10)).reason == reason
        with pytest.raises(SandboxGone) as caught:
            await sb.exec("true")
        assert caught.value.reason == reason
    assert {info.exit.reason for info in await dsec.list(stopped=True) if info.exit} == set(made)
    assert len(await dsec.prune()) == 3
    assert await dsec.list(stopped=True) == []
    with pytest.raises(NotFound):
        await dsec.attach(made["idle"].id)


async def test_c15_bytes_always_and_text_in_pieces(dsec: Client) -> None:
    """Binary output is bytes; text is decoded with replacement and no character is cut."""
    async with dsec.sandbox("img", **FAKE) as sb:
        async with sb.start("cat") as process:
            texts = process.texts()
            await process.write(b"\xc3")
            await process.write(b"\xa4\xff")
            await process.close_stdin()
            assert "".join([piece async for piece in texts]) == "\xe4\ufffd"


async def test_c16_c17_a_flood_is_bounded_per_stream(dsec: Client) -> None:
    """`yes` is kept at both ends only, `truncated` says so of that stream, and the operation is known."""
    async with dsec.sandbox("img", **FAKE) as sb:
        result = await sb.exec("yes", timeout=0.5)
        assert (result.timed_out, result.stdout.truncated, result.stderr.truncated) == (True, True, False)
        assert len(result.stdout) <= 320 * 1024
        assert result.op in [op.op for op in await sb.ops()]


async def test_c19_output_is_replayed_from_a_cursor(dsec: Client) -> None:
    """A second reader begins where it likes; both get the rest."""
    async with dsec.sandbox("img", **FAKE) as sb, sb.start("cat") as process:
        await process.write("0123456789")
        assert (await anext(aiter(process))).data == b"0123456789"
        async with sb.process(process.op, stdout=4, view=True).detach() as other:
            assert (await anext(aiter(other))).data == b"456789"
            await process.write("ab")
            assert (await anext(aiter(other))).offset == 10
        assert (await anext(aiter(process))).data == b"ab"


async def test_sessions_on_the_fake(dsec: Client) -> None:
    """Runs are operations of their own; another client takes the session up; `exit` ends it."""
    async with dsec.sandbox("img", **FAKE) as sb:
        async with sb.session(shell="sh", env={"A": "1"}) as shell:
            assert (await shell.run("echo $A")).stdout == b"1\n"
            running = asyncio.ensure_future(shell.run("sleep 60"))
            await asyncio.sleep(0.1)
            await shell.interrupt()
            assert (await running).exit_code == 130
            assert (await shell.run("sleep 60", timeout=0.2)).timed_out
            assert [op.op for op in await sb.sessions()] == [shell.id]
            async with sb.attach_session(shell.id) as again:
                assert (await again.run("exit 7")).exit_code == 7
                with pytest.raises(SandboxError, match="has ended"):
                    await again.run("true")


async def test_labels_change_and_last(dsec: Client) -> None:
    """Labels are set and taken away; listing by label sees it."""
    async with dsec.sandbox("img", labels={"a": "1", "b": "2"}, **FAKE) as sb:
        assert await sb.set_labels({"c": "3"}, remove=["a"]) == {"b": "2", "c": "3"}
        assert [info.id for info in await dsec.list({"c": "3"})] == [sb.id]
        assert await dsec.list({"a": "1"}) == []
