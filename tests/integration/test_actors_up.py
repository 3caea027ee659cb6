"""All of DSec in one process tree: it starts, says where, and ends with nothing left, however it is ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import libdsec
from dsec import config as configs
from dsec.actors.up import Cluster
from dsec.actors.up import up as run_up
from dsec.commands import running
from dsec.config import BusConfig, Config, EdgeConfig
from dsec.doctor_report import Running
from dsec.errors import Conflict, InvalidRequest, NodeError
from tests.integration.actors_box import SPEC

_UP = """import sys
from dsec import config
from dsec.actors.run import setup_log
from dsec.actors.up import up
from dsec.bus.bus import run
made = config.load()
setup_log(made)
sys.exit(run(up(made)))
"""


class Up:
    """A running `dsec up` of its own."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self.process = process
        self.said = said
        self.children = _children(process.pid)


async def _start(state_dir: Path, **edge: Any) -> Up:
    made = configs.parse({"edge": {"state_dir": str(state_dir), "backends": ["fake"], "name": "n1"} | edge, "up": {"nats_port": 0}})
    path = state_dir / "up.toml"
    path.write_text(configs.dump(made))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _UP,
        env=os.environ | {"DSEC_CONFIG": str(path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return Up(process, json.loads(line))


def _children(pid: int) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


async def _gone(pids: dict[int, str], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_all_of_it_in_order(state_dir: Path, signum: int) -> None:
    """SIGTERM and Ctrl+C: exit code 0, sandboxes stopped, no process left, no traceback."""
    up = await _start(state_dir)
    assert up.said["edges"] == ["n1"]
    assert len(up.children) == 4  # nats-server, Watcher, Scheduler, Edge
    async with libdsec.connect(up.said["url"]) as dsec:
        sb = await dsec.create(SPEC)
        assert (await sb.exec("echo up")).stdout == b"up\n"
    up.process.send_signal(signum)
    _, errors = await asyncio.wait_for(up.process.communicate(), 20)
    assert up.process.returncode == 0
    assert errors == b""
    await _gone(up.children)


async def test_the_doctor_tells_of_it(state_dir: Path) -> None:
    """Of each `dsec up` on this machine the doctor says what its Edge's heartbeat tells."""
    up = await _start(state_dir)
    async with libdsec.connect(up.said["url"]) as dsec, dsec.sandbox(SPEC), asyncio.timeout(20):
        while True:
            (found,) = [each for each in await running.here() if each.url == up.said["url"]]
            if found.sandboxes:
                break
    assert found == Running(edge="n1", url=up.said["url"], sandboxes=1)
    up.process.terminate()
    assert await asyncio.wait_for(up.process.wait(), 20) == 0
    await _gone(up.children)


async def test_one_server_has_no_replicas(state_dir: Path) -> None:
    """Replicas are for a cluster of nats-servers: `dsec up`, which runs one, says so at once."""
    with pytest.raises(InvalidRequest) as caught:
        await run_up(Config(bus=BusConfig(events_replicas=3)))
    assert caught.value.field == "bus.events_replicas"
    assert not list(state_dir.iterdir())


async def test_a_state_directory_is_one_cluster_s(state_dir: Path) -> None:
    """A second `dsec up` there starts nothing and says what to do; the first one's servers and files stay as they are."""
    first = await _start(state_dir)
    written = (state_dir / "nats" / "nats.conf").stat().st_mtime_ns
    with pytest.raises(Conflict, match="another `dsec up` runs in this state directory") as caught:
        await run_up(Config(edge=EdgeConfig(state_dir=str(state_dir), backends=("fake",), name="other")))
    assert (caught.value.field, caught.value.value) == ("edge.state_dir", str(state_dir))
    assert caught.value.fix
    assert (state_dir / "nats" / "nats.conf").stat().st_mtime_ns == written
    first.process.terminate()
    assert await asyncio.wait_for(first.process.wait(), 20) == 0
    await _gone(first.children)


async def test_kill_9_takes_the_tree_along(state_dir: Path) -> None:
    """No actor outlives its parent."""
    up = await _start(state_dir)
    up.process.kill()
    await up.process.wait()
    await _gone(up.children)


async def test_a_child_that_dies_is_told_and_never_restarted(state_dir: Path) -> None:
    """Exit code 1, the child's name and the end of its log."""
    up = await _start(state_dir)
    edge = next(pid for pid, command in up.children.items() if command.rstrip().endswith("edge"))
    os.kill(edge, signal.SIGKILL)
    _, errors = await asyncio.wait_for(up.process.communicate(), 20)
    assert up.process.returncode == 1
    assert b"up.ended_by_itself" in errors
    assert b"kind=edge" in errors
    assert b"name=n1" in errors
    await _gone(up.children)


async def test_every_actor_runs_on_uvloop(state_dir: Path) -> None:
    """`dsec up`, Watcher, Scheduler, Edge and simulated Edges say which loop runs them when they serve."""
    up = await _start(state_dir)
    assert up.said["loop"] == "uvloop"
    simulated = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec.actors.simulate", "--url", up.said["url"], "--edges", "1", stdout=asyncio.subprocess.PIPE
    )
    assert simulated.stdout is not None
    assert json.loads(await asyncio.wait_for(simulated.stdout.readline(), 30))["loop"] == "uvloop"
    simulated.terminate()
    up.process.terminate()
    await asyncio.gather(simulated.wait(), up.process.communicate())
    async with Cluster(state_dir / "second", backends=("fake",)) as cluster:
        assert {child.kind: child.ready["loop"] for child in cluster.children} == dict.fromkeys(("watcher", "scheduler", "edge"), "uvloop")


async def test_several_edges_and_schedulers(state_dir: Path) -> None:
    """Two Schedulers share the work, two Edges the sandboxes; records of both are below one directory."""
    async with Cluster(state_dir, backends=("fake",), edges=("a", "b"), schedulers=2) as cluster, libdsec.connect(cluster.url) as dsec:
        handles = await dsec.create_many(SPEC, 30)
        assert len({sb.id for sb in handles}) == 30
        async with asyncio.timeout(5):  # the Watcher may have begun after their first heartbeats
            while {node.edge for node in (await dsec.nodes()).nodes} != {"a", "b"}:  # noqa: ASYNC110 - asks anew
                await asyncio.sleep(0.1)
        pids = {child.pid: child.kind for child in cluster.children}
    await _gone(pids)
    assert {path.name for path in (state_dir / "edges").iterdir()} == {"a", "b"}


async def test_what_cannot_start_says_why(state_dir: Path) -> None:
    """An unknown backend: the Edge's own words, and nothing left running."""
    cluster = Cluster(state_dir, backends=("quantum",))
    (state_dir / "log").mkdir()
    (state_dir / "log" / "n1.log").write_text("of an earlier life\n")
    with pytest.raises(NodeError, match="no such backend") as caught:
        await cluster.start()
    assert "earlier life" not in str(caught.value)
    assert not any(child.alive for child in cluster.children)
    assert cluster.nats.process is None
