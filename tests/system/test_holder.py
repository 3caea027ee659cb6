"""The holder keeps what must outlive an Edge, and neither its death nor the Edge's leaks anything."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsec.model import ExecSpec, ExitReason
from tests.fixtures_backend import BASE, Yard, sh

ROOT = Path(__file__).resolve().parents[2]

EDGE = """
import asyncio, json, os, sys, msgspec
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from dsec.layers.mounts import LayerMount
from tests.fixtures_backend import Yard
async def main():
    yard = Yard("container", sys.argv[1], Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=LayerMount))
    backend = await yard.backend(holder_linger=5.0)
    plans = [yard.plan(backend.node) for _ in range(6)]
    async def one(plan):
        await backend.launch(plan)
        print(msgspec.json.encode(plan).decode(), flush=True)
    work = [asyncio.create_task(one(plan)) for plan in plans]
    await asyncio.gather(*work)
    print("all", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def holder_pid(backend: Any) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(backend._holder.path)
        sock.send(json.dumps({"id": 1, "op": "hello"}).encode())
        return int(json.loads(sock.recv(65536))["ok"]["pid"])


async def start_edge(yard: Yard) -> asyncio.subprocess.Process:
    import msgspec

    argv = [sys.executable, "-c", EDGE, yard.edge, str(yard.state), msgspec.json.encode(yard.mount).decode(), str(ROOT)]
    return await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, cwd=ROOT)


async def test_c03_edge_killed_while_its_sandboxes_live(leftovers: object, yard: Yard) -> None:
    """kill -9 of the Edge's process leaves its sandboxes running; the next Edge adopts them all and then frees them all."""
    from msgspec import json as codec

    from dsec.backends.base import LaunchPlan

    edge = await start_edge(yard)
    assert edge.stdout is not None
    plans = []
    while (line := (await edge.stdout.readline()).decode().strip()) != "all":
        plans.append(codec.decode(line, type=LaunchPlan))
    edge.kill()
    await edge.wait()
    assert len(plans) == 6
    next(yard.generations)
    backend = await yard.backend()
    boxes = [await backend.adopt(plan) for plan in plans]
    for box in boxes:
        assert box is not None
        assert (await sh(box, "echo adopted"))[1] == "adopted\n"
    os.kill(boxes[0].pid, 9)
    assert (await asyncio.wait_for(boxes[0].wait(), 5)).signal == 9  # the holder saw the status
    await asyncio.gather(*(box.stop() for box in boxes))
    assert await backend.reap(frozenset()) == ()


async def test_edge_killed_in_the_middle_of_its_launches(leftovers: object, yard: Yard) -> None:
    """kill -9 of the Edge while it launches: what no record names is reaped, whole or half-made."""
    for delay in (0.45, 0.5, 0.55, 0.6):
        edge = await start_edge(yard)
        await asyncio.sleep(delay)
        edge.kill()
        await edge.wait()
    next(yard.generations)
    backend = await yard.backend()
    await backend.reap(frozenset())
    assert await backend.reap(frozenset()) == ()


async def test_holder_killed_while_sandboxes_live(leftovers: object, yard: Yard) -> None:
    """kill -9 of the holder: another one is started, exec goes on, deaths are still seen, new sandboxes start, stop frees all."""
    backend = await yard.backend()
    box, doomed = [await backend.launch(yard.plan(backend.node)) for _ in range(2)]
    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", "sleep 0.5; echo survived")))
    os.kill(holder_pid(backend), signal.SIGKILL)
    assert (await box.link.wait(op, 5)).stdout.data() == b"survived\n"
    following = await backend.launch(yard.plan(backend.node))
    assert (await sh(following, "true"))[0] == 0
    os.kill(doomed.pid, 9)
    assert (await asyncio.wait_for(doomed.wait(), 5)).reason is ExitReason.BROKEN  # nobody was there to wait for it
    for one in (box, doomed, following):
        await one.stop()
    assert await backend.reap(frozenset()) == ()


async def test_holder_killed_while_a_sandbox_dies(leftovers: object, yard: Yard) -> None:
    """A sandbox that dies while no holder watches is told as broken, and freed."""
    backend = await yard.backend()
    box = await backend.launch(yard.plan(backend.node))
    pid = holder_pid(backend)
    os.kill(pid, signal.SIGSTOP)
    os.kill(box.pid, 9)
    os.kill(pid, signal.SIGKILL)
    assert (await asyncio.wait_for(box.wait(), 10)).reason in (ExitReason.BROKEN, ExitReason.EXITED)
    await box.stop()


async def test_both_killed(leftovers: object, yard: Yard) -> None:
    """Edge and holder killed together: the next Edge finds the living sandboxes in their cgroups."""
    first = await yard.backend()
    plan = yard.plan(first.node)
    await first.launch(plan)
    pid = holder_pid(first)
    await first.close()
    os.kill(pid, signal.SIGKILL)
    second = await yard.backend()
    box = await second.adopt(plan)
    assert box is not None
    assert (await sh(box, "echo here"))[1] == "here\n"
    await box.stop()


async def test_holder_refuses_strangers_and_nonsense(leftovers: object, yard: Yard) -> None:
    """Its socket is in a private directory; an unknown operation is refused; garbage closes only that connection."""
    backend = await yard.backend()
    path = backend._holder.path
    assert os.stat(path).st_mode & 0o77 == 0
    assert os.stat(os.path.dirname(path)).st_mode & 0o77 == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        sock.connect(path)
        sock.send(b'{"id": 1, "op": "mount_everything"}')
        assert "no operation" in json.loads(sock.recv(65536))["error"]
        sock.send(b'{"id": 2, "op": "kill"}')
        assert "error" in json.loads(sock.recv(65536))
        sock.send(b"\xff not json")
        assert sock.recv(65536) == b""
    box = await backend.launch(yard.plan(backend.node))
    assert (await sh(box, "true"))[0] == 0


async def test_holder_ends_when_nobody_needs_it(leftovers: object, yard: Yard) -> None:
    """Without an Edge and without sandboxes the holder goes away by itself."""
    backend = await yard.backend(holder_linger=0.2)
    pid = holder_pid(backend)
    await backend.close()
    for _ in range(80):
        if not os.path.exists(f"/proc/{pid}"):
            break
        await asyncio.sleep(0.1)
    else:
        raise AssertionError("the holder is still there after 8 s")


async def test_layers_are_mounted_once(leftovers: object, yard: Yard) -> None:
    """Twenty launches at one time share one mount of their layer, and the node's own mount table never shows a sandbox."""
    backend = await yard.backend()
    boxes = await asyncio.gather(*(backend.launch(yard.plan(backend.node)) for _ in range(20)))
    assert list(backend.mounts._mounted) == [BASE.digest]
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(yard.state) in line or " dsec " in line]
    await asyncio.gather(*(box.stop() for box in boxes))


async def test_runc_where_crun_is_not(leftovers: object, yard: Yard) -> None:
    """The same plan runs on runc, in the same cgroups, with a filter, and leaves as little."""
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed")
    backend = await yard.backend(driver="runc")
    box = await backend.launch(yard.plan(backend.node))
    status = (await sh(box, "cat /proc/self/status"))[1]
    assert "Seccomp:\t2" in status
    assert box.plan.cgroup in Path(f"/proc/{box.pid}/cgroup").read_text()
    assert (await box.usage()).pids >= 1
    await box.stop()


async def test_a_runtime_that_hangs_is_given_up(leftovers: object, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that never ends costs its launch, with a reason, and leaves nothing."""
    from dsec.backends import oci
    from dsec.errors import NodeError

    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    stuck = yard.state / "crun"
    source = yard.state / "stuck.c"
    source.write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
    await asyncio.to_thread(subprocess.run, [compiler, "-static", "-o", str(stuck), str(source)], check=True)
    monkeypatch.setattr(oci, "LAUNCH_TIMEOUT", 0.5)
    backend = await yard.backend(driver="crun", runtime=str(stuck))
    with pytest.raises(NodeError) as caught:
        await backend.launch(yard.plan(backend.node))
    assert caught.value.reason == "runtime"
    assert await backend.reap(frozenset()) == ()


@pytest.mark.parametrize("first", ["typed", "system"])
async def test_what_a_failed_launch_cannot_free_is_freed_later(
    leftovers: object, yard: Yard, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The launch is told as what it is, and the sandbox's directory goes as soon as it can."""
    from dsec.backends import runtime
    from dsec.errors import NodeError

    monkeypatch.setattr(runtime, "AGAIN", 0.01)
    backend = await yard.backend()
    remove, tries = backend._remove, 0
    errors: list[Exception] = [NodeError("the disk is read-only", reason="disk"), OSError(24, "Too many open files")]
    if first == "system":
        errors.reverse()

    def not_at_first(ulid: str) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise errors[tries - 1]
        remove(ulid)

    async def fails(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(backend, "_remove", not_at_first)
    monkeypatch.setattr(backend.driver, "start", fails)
    with pytest.raises(NodeError, match=r"launch failed: .*Too many open files") as caught:
        await backend.launch(yard.plan(backend.node))
    assert caught.value.reason == "descriptors"
    async with asyncio.timeout(20):
        while tries < 3 or backend._releases:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    assert await backend.reap(frozenset()) == ()


async def test_an_edge_that_cannot_start_leaves_no_group(leftovers: object, yard: Yard) -> None:
    """When the agent's program is missing, `open` fails with the holder's words and removes what it made."""
    from dsec.errors import NodeError

    with pytest.raises(NodeError):
        await yard.backend(guest=str(yard.state / "absent"))


@pytest.mark.needs("overlay_fd")  # layers that are attached are not shared
async def test_two_backends_of_an_edge_share_the_mount_of_a_layer(leftovers: object, yard: Yard, state_dir: Path) -> None:
    """Each has its own holder, but what both read has one super block, and so one place in the page cache; either outlives the other."""
    first = await yard.backend()
    other = Yard(yard.kind, f"{yard.edge}x", state_dir / "other", yard.mount)
    (state_dir / "other").mkdir()
    second = await other.backend(cgroup_root=f"dsec-{yard.edge}")
    try:
        second.mounts.lender = first.mounts
        alone = await first.launch(yard.plan(first.node))
        box = await second.launch(other.plan(second.node))
        lent = [await backend._holder.request("lend_layer", key=BASE.digest) for backend in (first, second)]
        assert lent[0]["pid"] != lent[1]["pid"]
        assert lent[0]["device"] == lent[1]["device"]
        await alone.stop()
        assert await first.drop_layer(BASE.digest)
        again = await second.launch(other.plan(second.node))  # the mount is there as long as one of them has it
        assert (await sh(again, "cat /bin/sh | wc -c"))[0] == 0
        await first.shutdown()
        last = await second.launch(other.plan(second.node))
        assert (await sh(last, "exit 3"))[0] == 3
        for each in (box, again, last):
            await each.stop()
    finally:
        await other.close()
