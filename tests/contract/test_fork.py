"""What a fork stands on, over the fake backend and every kind of writable layer: a whole capture from which a second sandbox begins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.backends import quota
from dsec.backends.base import PackOrder
from dsec.layers.store import LayerStore
from dsec.model import MIB, LayerRef
from tests.contract.test_pack import ROOMY, Shelves
from tests.fixtures_backend import MakeYard, Yard, sh

KINDS = ["tmpfs", "loop", "btrfs", "quota", "dir", "tmpfs crun", pytest.param("tmpfs docker", marks=pytest.mark.slow)]
REAL = [pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest")]
FLAVOURS = [
    "fake",
    *(
        pytest.param(*each.values, marks=[*REAL, *each.marks]) if hasattr(each, "values") else pytest.param(each, marks=REAL)
        for each in KINDS
    ),
]


@pytest.fixture(params=FLAVOURS)
def kind(request: pytest.FixtureRequest, state_dir: Path) -> str:
    mode, _, driver = request.param.partition(" ")
    if driver == "docker":
        request.getfixturevalue("dockerd")
    if mode == "quota" and (why := quota.trouble(str(state_dir))):
        pytest.skip(f"disk=quota: {why}")
    return str(mode)


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> str:
    return "crun" if "crun" in request.node.callspec.id else "native"


@pytest.fixture
def yard(kind: str, leftovers: object, make_yard: MakeYard, request: pytest.FixtureRequest) -> Yard:
    return make_yard("fake" if kind == "fake" else "docker" if "docker" in request.node.callspec.id else "container")


@pytest_asyncio.fixture
async def backend(yard: Yard, kind: str, state_dir: Path) -> AsyncIterator[Any]:
    if kind != "fake":
        yard.layers = Shelves(yard.mount, LayerStore(state_dir / "layers"))  # type: ignore[arg-type] - containers have one
    backend = await yard.backend(**({} if kind == "fake" else {"disk_store_bytes": 512 * MIB}))
    if kind != "fake" and kind not in backend.node.disk_modes:
        pytest.skip(f"disk={kind}: {backend.capabilities.missing[f'disk={kind}']}")
    yield backend


async def test_a_second_sandbox_begins_where_the_first_one_is(yard: Yard, backend: Any, kind: str) -> None:
    """All files are there, those in /tmp too; afterwards each goes its own way, and a third generation has what both before it had."""
    assert backend.capabilities.fork
    fields = {} if kind == "fake" else {"disk_mode": kind, "resources": ROOMY}
    base = yard.plan(backend.node, **fields)
    box = await backend.launch(base)
    lowers = base.lowers
    said = ""
    for generation in range(3):
        assert (await sh(box, f"echo {generation} > /root/g{generation}; echo {generation} > /tmp/last"))[0] == 0
        said += f"{generation}\n"
        layer = await box.pack_diff(PackOrder(name=f"checkpoint/t/{generation}", whole=True), False, lambda: None)
        assert layer.parents == tuple(each.digest for each in lowers)
        lowers = (LayerRef(name=layer.name, digest=layer.digest), *lowers)
        child = await backend.launch(msgspec.structs.replace(yard.plan(backend.node, **fields), lowers=lowers))
        assert (await sh(box, "echo own > /root/g0"))[0] == 0
        files = " ".join(f"/root/g{each}" for each in range(generation + 1))
        assert (await sh(child, f"cat {files}; cat /tmp/last"))[1] == f"{said}{generation}\n"
        assert (await sh(box, "cat /root/g0"))[1] == "own\n"
        await box.stop()
        box = child
    await box.stop()
