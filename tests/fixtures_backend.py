"""A small base layer made of this machine's own programs, and backends on private state directories."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec import trees
from dsec.backends.base import LaunchPlan
from dsec.backends.plan import Node, make_plan
from dsec.layers.mounts import LayerMount
from dsec.model import MIB, LayerRef, Resources, SandboxId, SandboxSpec, new_ulid

PROGRAMS = (
    *(
        "sh",
        "bash",
        "cat",
        "ls",
        "echo",
        "sleep",
        "head",
        "tail",
        "dd",
        "true",
        "false",
        "env",
        "id",
        "mkdir",
        "rm",
        "ln",
        "mv",
        "cp",
        "chmod",
        "chown",
    ),
    *(
        "mount",
        "umount",
        "mknod",
        "ps",
        "stat",
        "sync",
        "touch",
        "wc",
        "yes",
        "seq",
        "setsid",
        "nohup",
        "grep",
        "sed",
        "python3",
        "stty",
        "tr",
    ),
)
SMALL = Resources(memory=96 * MIB, disk=32 * MIB, inodes=4096, pids=64)
BASE = LayerRef(name="small", digest="sha256:" + "5" * 64)


def libraries_of(binary: str) -> set[str]:
    """Paths of the shared libraries that a program or an extension of Python needs."""
    out = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+\.so\S*)", out))


def build_small_base(root: Path) -> None:
    """A directory with a shell, the core tools and Python, copied from this machine with the libraries that they need."""
    for name in ("bin", "proc", "dev", "sys", "tmp", "root", "etc", "home/user", "usr/lib"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    needed: set[str] = set()
    for program in PROGRAMS:
        source = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if source is None:
            continue
        shutil.copy2(os.path.realpath(source), root / "bin" / program)
        needed |= libraries_of(source)
    version = os.path.basename(os.path.realpath("/usr/bin/python3"))
    library = root / "usr" / "lib" / version
    skip = shutil.ignore_patterns("test", "idlelib", "tkinter", "ensurepip", "lib2to3", "config-*", "*.pyc", "dist-packages")
    shutil.copytree(f"/usr/lib/{version}", library, ignore=skip, symlinks=True, ignore_dangling_symlinks=True)
    (root / "usr" / "bin").symlink_to("../bin")
    for extension in library.glob("lib-dynload/*.so"):
        needed |= libraries_of(str(extension))
    for path in needed:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(path), target)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    os.chown(root / "home/user", 1000, 1000)


@pytest.fixture(scope="session")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayerMount]:
    """The base as an EROFS image where it can be mounted from its file, else as a directory."""
    place = tmp_path_factory.mktemp("base")
    build_small_base(place / "tree")
    image = place / "base.erofs"
    command = ["mkfs.erofs", "-Enoinline_data", str(image), str(place / "tree")]
    made = subprocess.run(command, capture_output=True, check=False) if shutil.which("mkfs.erofs") else None
    disabled = os.environ.get("DSEC_DISABLE", "")
    if made and made.returncode == 0 and "erofs_file" not in disabled:
        trees.remove(place / "tree")
        yield LayerMount(kind="erofs_file", source=str(image))
    else:
        yield LayerMount(kind="dir", source=str(place / "tree"))
    trees.clear(place)


class OneLayer:
    """A layer store that has one layer."""

    def __init__(self, mount: LayerMount) -> None:
        self.mount = mount

    async def mount_plan(self, digest: str) -> LayerMount:
        if digest != BASE.digest:
            from dsec.errors import NotFound

            raise NotFound("no such layer", field="layer", value=digest)
        return self.mount


class Yard:
    """One node for one test: makes backends on it, plans for it, and frees everything at the end."""

    def __init__(self, kind: str, edge: str, state: Path, mount: LayerMount | None) -> None:
        self.kind, self.edge, self.state, self.mount = kind, edge, state, mount
        self.backends: list[Any] = []
        self.generations = itertools.count(1)
        self.slots = itertools.count()
        self.world: Any = None
        self.docker: Any = None  # where its daemon is
        self.driver = "native"
        self.layers: Any = OneLayer(mount) if mount is not None else None

    async def backend(self, **options: Any) -> Any:
        """The next Edge's backend on this node."""
        made: Any
        if self.kind == "fake":
            from dsec.backends.fake import FakeBackend, FakeNode

            self.world = self.world or FakeNode()
            made = FakeBackend(node=self.world, edge=self.edge, generation=next(self.generations))
        else:
            from dsec.backends.container import ContainerBackend, Options

            assert self.mount is not None
            options = {"holder_linger": 1.0, "cgroup_root": f"dsec-{self.edge}", "driver": self.driver, **options}
            setup = Options(edge=self.edge, state_dir=str(self.state), generation=next(self.generations), **options)
            if self.kind == "docker":
                from dsec.backends.docker import DockerBackend

                made = DockerBackend(setup, self.layers, self.docker)
            else:
                made = ContainerBackend(setup, self.layers)
        await made.open()
        self.backends.append(made)
        return made

    def plan(self, node: Node, *, base: LayerRef = BASE, **fields: Any) -> LaunchPlan:
        spec = SandboxSpec(image="small", backend=self.kind, **{"resources": SMALL, **fields})
        return make_plan(spec, id=SandboxId(self.edge, new_ulid()), slot=next(self.slots), refs=[base], node=node)

    async def close(self) -> None:
        """Free everything, also what a test left whose backends are all closed: then by one more."""
        if self.kind != "fake" and self.state.exists() and all(backend._closed for backend in self.backends):
            await self.backend()
        for backend in self.backends:
            if not getattr(backend, "_closed", False):
                await backend.reap(frozenset())
                for instance in list(getattr(backend, "_instances", {}).values()):
                    await instance.stop()
                await backend.shutdown()


MakeYard = Callable[[str], Yard]


DRIVERS = ("native", "crun")


@pytest.fixture
def driver() -> str:
    """What starts containers. Modules whose tests must hold for every driver replace it by `each_driver`."""
    return "native"


@pytest.fixture(params=[*DRIVERS, pytest.param("docker", marks=pytest.mark.slow)])
def each_driver(request: pytest.FixtureRequest) -> str:
    """Also "docker": the sandbox that Docker starts must hold what the others hold."""
    if request.param == "docker":
        request.getfixturevalue("dockerd")
    elif request.param != "native" and shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest_asyncio.fixture
async def make_yard(edge_name: str, state_dir: Path, driver: str, request: pytest.FixtureRequest) -> AsyncIterator[MakeYard]:
    yards: list[Yard] = []

    def make(kind: str) -> Yard:
        mount = request.getfixturevalue("small_base") if kind != "fake" else None
        yards.append(Yard(kind, edge_name, state_dir, mount))
        yards[-1].driver = "native" if driver == "docker" else driver
        if kind == "docker":
            yards[-1].docker = request.getfixturevalue("dockerd").config
        return yards[-1]

    yield make
    for yard in yards:
        await yard.close()


@pytest_asyncio.fixture
async def yard(make_yard: MakeYard, driver: str) -> Yard:
    """A node with real containers."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    return make_yard("docker" if driver == "docker" else "container")


async def sh(instance: Any, text: str, timeout: float = 20.0, **fields: Any) -> tuple[int | None, str, str]:
    """Run a shell command to its end: exit code, stdout, stderr."""
    from dsec.model import ExecSpec

    op = os.urandom(16).hex()
    await instance.link.start(op, ExecSpec(argv=("/bin/sh", "-c", text), **fields))
    status = await instance.link.wait(op, timeout)
    assert not status.running, f"{text!r} still runs after {timeout} s"
    return status.exit_code, status.stdout.data().decode(errors="replace"), status.stderr.data().decode(errors="replace")
