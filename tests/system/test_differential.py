"""What a process inside sees does not depend on what started it, but for differences that have a reason."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from dsec.layers.mounts import LayerMount
from tests.fixtures_backend import build_small_base
from tests.system import differential
from tests.system.views import differences

pytestmark = [pytest.mark.needs("root", "cgroup", "native", "crun"), pytest.mark.usefixtures("leftovers")]


async def test_each_difference_between_the_drivers_has_a_reason(leftovers: object, small_base: LayerMount) -> None:
    """Native launcher and crun give the same namespaces, capabilities, limits, devices, mounts and seccomp verdicts, but for what is
    explained; the weak points of a difference are not among them."""
    views = {driver: await differential.container(driver, small_base) for driver in ("native", "crun")}
    assert differential.unexplained(views, differential.DRIVERS) == {}
    found = {section for section, _ in differences(views)}
    assert not found & {"status", "limits", "proc", "seccomp"}, "these are the same to the letter"
    assert len(views["native"].get("seccomp", views["native"]["status"])) > 10


@pytest.mark.slow
async def test_each_difference_from_docker_has_a_reason(dockerd: Any, tmp_path: Path, small_base: LayerMount) -> None:
    """Docker's defaults are weaker or stronger only where it is said why."""
    await asyncio.to_thread(build_small_base, tmp_path / "tree")
    views = {"native": await differential.container("native", small_base), "docker": differential.docker(dockerd, tmp_path / "tree")}
    assert differential.unexplained(views, differential.DOCKER) == {}


def test_the_document_has_every_reason() -> None:
    """docs/isolation-differences.md is the report of these reasons and of no others."""
    text = differential.DOC.read_text()
    written = set(re.findall(r"^\d+\. (.+)$", text, re.MULTILINE))
    assert written <= {*differential.DRIVERS.values(), *differential.DOCKER.values()}
    assert {why for why in differential.DRIVERS.values() if why in written}
