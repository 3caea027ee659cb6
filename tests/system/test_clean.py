"""The census sees what is left behind; the doctor leaves nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsec import doctor, doctor_probes
from tests.census import Census

pytestmark = pytest.mark.guest


def test_census_sees_a_process(tmp_path: Path) -> None:
    """A child of the tests counts until it has been waited for."""
    census = Census(roots=[tmp_path])
    before = census.snapshot()
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert any("sleep 60" in line for line in Census.diff(before, census.snapshot())["processes"])
        finally:
            child.kill()
    assert census.left_since(before, seconds=2) == {}


def test_census_sees_files_and_keeps_what_may_stay(tmp_path: Path) -> None:
    """A new file counts, one below a kept path does not."""
    (tmp_path / "cache").mkdir()
    census = Census(roots=[tmp_path], keep=[tmp_path / "cache"])
    before = census.snapshot()
    (tmp_path / "cache" / "layer").touch()
    assert Census.diff(before, census.snapshot()) == {}
    (tmp_path / "left").touch()
    assert Census.diff(before, census.snapshot()) == {"files": [str(tmp_path / "left")]}


@pytest.mark.needs("root")
def test_census_sees_a_mount_and_a_namespace(tmp_path: Path) -> None:
    """A tmpfs and a bound network namespace below a root count until they are gone."""
    census = Census(roots=[tmp_path])
    target, namespace = tmp_path / "mnt", tmp_path / "ns"
    target.mkdir()
    namespace.touch()
    before = census.snapshot()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(target)], check=True)
    try:
        # Not `ip netns add`: the first one on a machine leaves /run/netns as a mount.
        subprocess.run(["unshare", f"--net={namespace}", "true"], check=True)
        try:
            points = " ".join(Census.diff(before, census.snapshot())["mounts"])
            assert str(target) in points
            assert str(namespace) in points
        finally:
            subprocess.run(["umount", str(namespace)], check=True)
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert census.left_since(before, seconds=2) == {}


@pytest.mark.needs("root", "cgroup")
def test_census_sees_a_cgroup(edge_name: str) -> None:
    """A cgroup with a derived name counts until it is removed."""
    census = Census(tokens=[edge_name])
    before = census.snapshot()
    mounts = doctor_probes.cgroup_mounts()
    group = Path(mounts.get("pids", mounts.get("2", "")), f"dsec-{edge_name}")
    group.mkdir()
    try:
        assert Census.diff(before, census.snapshot())["cgroups"] == [str(group)]
    finally:
        group.rmdir()
    assert Census.diff(before, census.snapshot()) == {}


def test_doctor_leaves_nothing(tmp_path: Path) -> None:
    """Looking at a node makes no process, mount, cgroup, namespace or loop device that stays."""
    census = Census(roots=[tmp_path, "dsec-doctor-"])
    before = census.snapshot()
    temporary = set(os.listdir("/tmp"))
    doctor.diagnose()
    assert census.left_since(before, seconds=2) == {}
    assert not [name for name in set(os.listdir("/tmp")) - temporary if name.startswith("dsec-doctor-")]
