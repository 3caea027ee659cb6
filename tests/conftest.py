"""Fixtures that every room's tests may use; what only one room needs lives beside its tests."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.trees import clear
from tests.census import Census

pytest_plugins = ["tests.fixtures_bus", "tests.fixtures_backend", "tests.fixtures_client", "tests.fixtures_docker"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """``@pytest.mark.needs("crun", "userns")``: skips with the doctor's own sentence where a feature is missing."""
    for mark in item.iter_markers("needs"):
        from dsec import doctor

        for name in mark.args:
            if sentence := doctor.reason(name):
                pytest.skip(sentence)


@pytest.fixture
def edge_name() -> str:
    """A node name of this test's own: all kernel names derive from it."""
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A short private path (Unix sockets take 107 bytes at most), removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    yield path
    clear(path)


@pytest.fixture
def leftovers(edge_name: str, state_dir: Path, request: pytest.FixtureRequest) -> Iterator[Census]:
    """Fails the test when processes, mounts, cgroups, namespaces, interfaces, loop devices or files outlive it.

    Ask for it before the fixtures that make things. Counted is what is named after `edge_name` or lies under `state_dir`; the state
    directory's own files may stay. ``leftovers.watch(token)`` adds a name.
    """
    parameters = getattr(request.node, "callspec", None)
    if parameters is not None and "docker" in parameters.params.values():
        request.getfixturevalue("dockerd")  # it outlives the test
    census = Census(roots=[state_dir], tokens=[edge_name], keep=[state_dir])
    before = census.snapshot()
    yield census
    left = census.left_since(before, seconds=5.0)
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's DSEC_ settings do not reach the tests; DSEC_DISABLE does, for it makes this kernel an older one."""
    for name in list(os.environ):
        if name.startswith("DSEC_") and name not in {"DSEC_DISABLE", "DSEC_TEST_BASE"}:
            monkeypatch.delenv(name)
