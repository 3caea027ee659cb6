"""The Docker backend on a daemon of the tests' own: what Docker shows, what it may not do, and what becomes of sandboxes around it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.backends.docker import Engine, container_name, wrapper
from dsec.config import DockerConfig
from dsec.errors import NodeError, Unsupported
from dsec.model import ExitReason
from tests.fixtures_backend import SMALL, MakeYard, Yard, sh
from tests.fixtures_docker import Dockerd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def yard(dockerd: Dockerd, leftovers: object, make_yard: MakeYard) -> Yard:
    return make_yard("docker")


@pytest.fixture
def mortal(dockerd: Dockerd, leftovers: object) -> Iterator[Dockerd]:
    """A daemon for one test, which may kill it."""
    daemon = Dockerd(Path(tempfile.mkdtemp(prefix="dsec-d-", dir="/tmp")), "mortal")
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.clean()


def names(dockerd: Dockerd) -> list[str]:
    return dockerd.docker("ps", "-a", "--format", "{{.Names}}").split()


async def test_docker_shows_the_sandbox_and_forgets_it(dockerd: Dockerd, yard: Yard) -> None:
    """`docker ps` and `docker inspect` name the sandbox, its limits and its Edge's directory; after the stop there is nothing."""
    backend = await yard.backend()
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    assert container_name(plan.ulid) in names(dockerd)
    [shown] = json.loads(dockerd.docker("inspect", container_name(plan.ulid)))
    assert shown["State"]["Pid"] == box.pid
    assert shown["Config"]["Labels"]["dsec.id"] == plan.id
    assert shown["Config"]["Labels"]["dsec.state"] == str(yard.state)
    assert shown["HostConfig"]["Memory"] == SMALL.memory + SMALL.disk
    assert shown["HostConfig"]["PidsLimit"] == SMALL.pids
    await box.stop()
    assert container_name(plan.ulid) not in names(dockerd)


async def test_the_sandbox_is_the_one_that_the_container_backend_makes(yard: Yard) -> None:
    """Its own id map, capabilities, seccomp, no new privileges, only loopback, our overlay, our limits."""
    backend = await yard.backend()
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    status = (await sh(box, "cat /proc/self/status"))[1]
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["Seccomp"], fields["NoNewPrivs"]) == ("2", "1")
    assert int(fields["CapEff"], 16) & (1 << 21 | 1 << 19 | 1 << 27) == 0  # SYS_ADMIN, SYS_PTRACE, MKNOD
    assert (await sh(box, "cat /proc/self/uid_map"))[1].split() == ["0", str(plan.idmap.base), "65536"]
    assert (await sh(box, "cat /proc/net/dev"))[1].count("\n") == 3  # two lines of heading, and lo
    assert " / / " in (await sh(box, "grep overlay /proc/self/mountinfo"))[1]
    code, _, err = await sh(box, "head -c 64000000 /dev/zero > /tmp/big")
    assert code != 0
    assert "space" in err.lower()
    code, out, _ = await sh(box, "for i in $(seq 200); do sleep 30 & done 2>/dev/null; ls -d /proc/[0-9]* | wc -l")
    assert int((out or "0").split()[-1]) <= SMALL.pids


async def test_what_docker_may_not_do_is_refused(dockerd: Dockerd, yard: Yard) -> None:
    """`docker exec`, `update` and `pause` would go past the Edge: they fail with a sentence, and the sandbox lives on."""
    backend = await yard.backend()
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    for words in (("exec", container_name(plan.ulid), "/bin/true"), ("pause", container_name(plan.ulid))):
        said = await asyncio.to_thread(dockerd.docker, *words)
        assert "error" in said.lower(), said
        assert "dsec" in said.lower(), said
    assert "error" in (
        await asyncio.to_thread(dockerd.docker, "update", "--memory", "1g", "--memory-swap", "1g", container_name(plan.ulid))
    )
    assert (await sh(box, "echo alive"))[1] == "alive\n"


async def test_docker_rm_ends_a_sandbox_as_a_kill_does(dockerd: Dockerd, yard: Yard) -> None:
    """Whoever removes the container ends the sandbox: its waiters hear of it, and a stop frees what is left."""
    backend = await yard.backend()
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    await asyncio.to_thread(dockerd.docker, "rm", "-f", container_name(plan.ulid))
    ending = await asyncio.wait_for(box.wait(), 20)
    assert ending.reason in (ExitReason.EXITED, ExitReason.BROKEN)
    await box.stop()
    assert await backend.reap(frozenset()) == ()


async def test_a_container_whose_record_is_lost_is_reaped(dockerd: Dockerd, yard: Yard) -> None:
    """A container of this Edge that was created and never started is removed by the next one."""
    backend = await yard.backend()
    ulid = yard.plan(backend.node).ulid
    await backend.engine.ensure_image()
    request = {"Image": "dsec-empty:1", "Cmd": ["x"], "Labels": {"dsec.ulid": ulid, "dsec.state": str(yard.state)}}
    await backend.engine.client.containers.create(request, name=container_name(ulid))
    assert await backend.reap(frozenset()) == (ulid,)
    assert container_name(ulid) not in names(dockerd)


async def test_the_daemon_dies_and_comes_back(mortal: Dockerd, make_yard: MakeYard) -> None:
    """While the daemon is gone, creates fail as the node's fault, a stop is tried again until it is back, and nothing is left then."""
    yard = make_yard("docker")
    yard.docker = mortal.config
    backend = await yard.backend()
    plan = yard.plan(backend.node)
    box = await backend.launch(plan)
    await asyncio.to_thread(mortal.stop, kill=True)
    try:
        with pytest.raises(NodeError) as caught:
            await backend.launch(yard.plan(backend.node))
        assert caught.value.reason == "docker"
        with pytest.raises(NodeError):
            await box.stop()
    finally:
        await asyncio.to_thread(mortal.start)
    await box.stop()
    assert await backend.reap(frozenset()) != (plan.ulid,)
    assert await backend.reap(frozenset()) == ()
    assert container_name(plan.ulid) not in names(mortal)


async def test_an_absent_daemon_is_named() -> None:
    """No daemon, a remote one, and one that does not know the runtime: each refusal says the field and the fix."""
    with pytest.raises(Unsupported) as caught:
        await Engine(DockerConfig(host="unix:///nonexistent/docker.sock")).look()
    assert caught.value.field == "docker.host"
    with pytest.raises(Unsupported):
        Engine(DockerConfig(host="tcp://10.0.0.1:2375"))


async def test_an_unknown_runtime_is_named(dockerd: Dockerd) -> None:
    """The refusal tells the very option that dockerd needs; a runtime of that name that is not ours is refused as well."""
    engine = Engine(msgspec.structs.replace(dockerd.config, runtime="nobody"))
    try:
        with pytest.raises(Unsupported) as caught:
            await engine.look()
        assert caught.value.field == "docker.runtime"
        assert f"--add-runtime nobody={wrapper()}" in caught.value.fix
    finally:
        await engine.close()
    engine = Engine(msgspec.structs.replace(dockerd.config, runtime="runc"))
    try:
        with pytest.raises(Unsupported):
            await engine.look()
    finally:
        await engine.close()


def test_the_wrapper_starts_nothing_else(tmp_path: Any) -> None:
    """A bundle that names no sandbox, or a launch file that others may write, is refused."""
    import subprocess

    def create(env: list[str]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "config.json").write_text(json.dumps({"process": {"env": env}}))
        words = ["--root", str(tmp_path / "root"), "create", "--bundle", str(tmp_path), "--pid-file", str(tmp_path / "pid"), "x"]
        return subprocess.run([wrapper(), *words], capture_output=True, text=True, check=False)

    assert "DSEC_BOX" in create(["PATH=/bin"]).stderr
    launch = tmp_path / "docker.launch"
    launch.write_text("1 1 3 -1 0 0\n")
    os.chmod(launch, 0o666)
    refused = create([f"DSEC_BOX={tmp_path}"])
    assert refused.returncode == 1
    assert "somebody else" in refused.stderr
    for text in ("", "nonsense", "1 1", "1 1 3 -1 0 9999\n", "-1 -1 3 -1 0 1\n"):
        launch.write_text(text)
        os.chmod(launch, 0o600)
        assert create([f"DSEC_BOX={tmp_path}"]).returncode == 1
