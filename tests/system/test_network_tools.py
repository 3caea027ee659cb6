"""What agents do first with a network: `pip install` and `apt-get`, inside an open sandbox, from servers outside that the test makes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.config import Config, EdgeConfig, LayersConfig, NetworkConfig
from dsec.layers.bootstrap import bootstrap_debian
from dsec.layers.store import LayerStore
from dsec.model import MIB, NetworkPolicy, Resources
from tests.fixtures_backend import Yard, sh
from tests.system.net_world import World, world  # noqa: F401 - a fixture
from tests.system.outside import FAR4, NODE4, NODE6, OUTSIDE4

pytestmark = [pytest.mark.needs("root", "oci", "cgroup", "nft", "mmdebstrap"), pytest.mark.timeout(300)]
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "layers"
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


@pytest.fixture(scope="module")
def debian() -> tuple[LayerStore, str]:
    """The Debian base of the demo: made once on a machine."""
    store = LayerStore(CACHE)
    return store, asyncio.run(bootstrap_debian(store)).digest


def make_wheel(folder: Path) -> None:
    """An index in the way of PEP 503 with one wheel of one module."""
    files = {
        "tinyone.py": b"answer = 42\n",
        "tinyone-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tinyone\nVersion: 1.0\n",
        "tinyone-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files["tinyone-1.0.dist-info/RECORD"] = (record + "tinyone-1.0.dist-info/RECORD,,\n").encode()
    place = folder / "simple" / "tinyone"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / "tinyone-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    # The base has no pip: it comes from outside too.
    pip = Path(pytest.importorskip("pip").__file__).parent
    with zipfile.ZipFile(folder / "pip.zip", "w") as archive:
        for path in pip.rglob("*"):
            if path.suffix != ".pyc":
                archive.write(path, path.relative_to(pip.parent))
    (place / "index.html").write_text('<a href="tinyone-1.0-py3-none-any.whl">tinyone-1.0-py3-none-any.whl</a>\n')


def make_repository(folder: Path, scratch: Path) -> None:
    """A flat apt repository with one package that has one file."""
    control = "Package: tinyone\nVersion: 1.0\nArchitecture: all\nMaintainer: A Test <test@example.org>\nDescription: one file\n"
    (scratch / "deb" / "DEBIAN").mkdir(parents=True)
    (scratch / "deb" / "DEBIAN" / "control").write_text(control)
    (scratch / "deb" / "usr" / "share" / "tinyone").mkdir(parents=True)
    (scratch / "deb" / "usr" / "share" / "tinyone" / "file").write_text("from apt\n")
    place = folder / "debian"
    place.mkdir()
    built = place / "tinyone_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", str(scratch / "deb"), str(built)], check=True, capture_output=True)
    digest, size = hashlib.sha256(built.read_bytes()).hexdigest(), built.stat().st_size
    packages = f"{control}Filename: ./{built.name}\nSize: {size}\nSHA256: {digest}\n"
    (place / "Packages").write_text(packages)
    listed = f" {hashlib.sha256(packages.encode()).hexdigest()} {len(packages)} Packages\n"
    (place / "Release").write_text(f"Origin: test\nSuite: stable\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n{listed}")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_c51_pip_and_apt_work_in_an_open_sandbox(
    debian: tuple[LayerStore, str],
    world: World,  # noqa: F811
    edge_name: str,
    state_dir: Path,
    tmp_path: Path,
) -> None:
    """c51: `pip install` from an index and `apt-get update` and `install` from a repository, both outside and found by name."""
    make_wheel(world.served)
    make_repository(world.served, tmp_path)
    store, digest = debian
    yard = Yard("container", edge_name, state_dir, await store.mount_plan(digest))
    try:
        backend = await yard.backend(network=NetworkConfig(upstreams=(OUTSIDE4,)))
        plan = yard.plan(
            backend.node,
            network=NetworkPolicy(mode="open"),
            resources=Resources(memory=400 * MIB, disk=200 * MIB, inodes=50_000, pids=128),
        )
        box = await backend.launch(plan)
        quiet = "--disable-pip-version-check --no-cache-dir --break-system-packages --root-user-action=ignore"
        index = "--index-url http://www.outside.test/simple --trusted-host www.outside.test"
        code, _, err = await sh(box, f'python3 -c \'import urllib.request as u; u.urlretrieve("http://{FAR4}/pip.zip", "/tmp/pip.zip")\'')
        assert code == 0, err
        code, out, err = await sh(box, f"PYTHONPATH=/tmp/pip.zip python3 -m pip install {quiet} {index} tinyone 2>&1", timeout=60)
        assert code == 0, out + err
        _, out, err = await sh(box, "python3 -c 'import tinyone; print(tinyone.answer)'")
        assert out == "42\n", err
        source = "deb [trusted=yes] http://www.outside.test/debian ./"
        await sh(box, f"rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*; echo '{source}' >/etc/apt/sources.list")
        code, out, err = await sh(box, "apt-get update 2>&1", timeout=60)
        assert (code, "Err:" in out, "W:" in out) == (0, False, False), out
        code, out, err = await sh(box, "apt-get install -y --no-install-recommends tinyone 2>&1", timeout=60)
        assert code == 0, out
        assert (await sh(box, "cat /usr/share/tinyone/file"))[1] == "from apt\n"
    finally:
        await yard.close()


@pytest.fixture
def cluster_dir(state_dir: Path) -> Iterator[Path]:
    yield state_dir
    for pid in _holders(state_dir):
        os.kill(pid, signal.SIGKILL)


def _holders(place: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if str(place).encode() in command and b"dsec." in command and int(entry) != os.getpid():
                found.append(int(entry))
    return found


async def test_open_sandbox_of_a_cluster_outlives_a_killed_edge(
    debian: tuple[LayerStore, str],
    world: World,  # noqa: F811
    edge_name: str,
    cluster_dir: Path,
) -> None:
    """Through libdsec: an open sandbox has its addresses in its info, does not reach the bus, keeps its network over the Edge's death by
    SIGKILL, and nothing of it is left when the next Edge has stopped it."""
    store, _ = debian
    layers = LayersConfig(store_dir=str(store.root))
    config = Config(network=NetworkConfig(upstreams=(OUTSIDE4,)), edge=EdgeConfig(memory=2048 * MIB), layers=layers)
    cluster = Cluster(cluster_dir, backends=("container",), edges=(edge_name,), config=config)
    async with cluster, libdsec.connect(cluster.url) as dsec:
        options: Any = {"memory": "128MiB", "disk": "32MiB", "cpus": 0.5}
        with pytest.raises(libdsec.DsecError, match="rules are not enforced yet"):
            async with dsec.sandbox("debian-12", network=["index.example.org:443"], **options):
                pass
        async with dsec.sandbox("debian-12", network="open", on_client_loss="keep", **options) as sb:
            info = await sb.info()
            assert len(info.addresses) == 2
            whoami = "http://www.outside.test/whoami"
            fetch = ["python3", "-c", f"import urllib.request as u; print(u.urlopen('{whoami}', timeout=5).read().decode())"]
            assert (await sb.exec(fetch)).stdout.text.strip() in (NODE4, NODE6)
            port = int(cluster.url.rsplit(":", 1)[1])
            for host in (NODE4, NODE6, "127.0.0.1", "10.208.0.1"):
                assert not (await sb.exec(["bash", "-c", f"timeout 3 bash -c '</dev/tcp/{host}/{port}'"])).ok
            assert (await sb.exec(["bash", "-c", f"</dev/tcp/{FAR4}/80"])).ok
            edge = cluster.edges[edge_name]
            assert edge.process is not None
            edge.process.kill()
            await edge.process.wait()
            await edge.start()
            until = time.monotonic() + 20
            while True:
                try:
                    result = await sb.exec(fetch, timeout=10)
                    break
                except libdsec.DsecError:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.1)
            assert result.stdout.text.strip() in (NODE4, NODE6)
        until = time.monotonic() + 5
        while any(name.startswith("ds") for _, name in socket.if_nameindex()):
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        listed = json.loads(output("nft", "-j", "list", "ruleset"))["nftables"]
        sets = {entry["set"]["name"]: entry["set"].get("elem", []) for entry in listed if "set" in entry}
        assert sets["sources4"] == sets["sources6"] == sets["answers"] == []
    assert output("nft", "list", "tables") == ""
    assert "proto 213" not in output("ip", "route", "show", "table", "all")
