"""The main job from end to end, as `make demo` runs it, with fewer sandboxes; and one benchmark in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec import doctor

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts and cgroups are made")


def _last_line(module: str, *arguments: str, timeout: float = 300) -> tuple[dict[str, object], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL)
    assert done.stdout.strip(), done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done


@pytest.mark.needs("root", "oci", "nats_server", "mmdebstrap")
def test_demo_does_all_that_it_says() -> None:
    """Thirty-two sandboxes, one of each misbehaving kind among them, all end as expected and leave nothing."""
    summary, done = _last_line("examples.demo", "--n", "32", "--json")
    assert summary["problems"] == []
    assert done.returncode == 0, done.stderr[-3000:]
    assert (summary["sandboxes"], summary["as_expected"]) == (32, 32)
    assert summary["left_over"] == {"processes": 0, "mounts": 0, "cgroups": 0, "files": 0}
    groups = summary["groups"]
    assert isinstance(groups, list)
    assert {row["group"]: row["count"] for row in groups} == {"agent": 28, "fork bomb": 1, "yes": 1, "endless loop": 1, "memory hog": 1}


@pytest.mark.needs("root", "oci", "nats_server", "mmdebstrap", "mkfs_erofs")
def test_demo_on_a_node_that_has_no_layer(tmp_path: Path) -> None:
    """Base, workspace and toolkit are read from a shared store while the agents work; where the kernel can, most of them never comes."""
    summary, done = _last_line("examples.demo", "--n", "4", "--json", "--store", str(tmp_path / "store"))
    assert summary["problems"] == []
    assert done.returncode == 0, done.stderr[-3000:]
    assert summary["as_expected"] == 4
    layers, fetched = float(str(summary["layers_mb"])), float(str(summary["fetched_mb"]))
    assert layers > 50
    if not doctor.reason("fanotify") and not doctor.reason("erofs_file"):
        assert 0 < fetched < layers / 2
    assert summary["left_over"] == {"processes": 0, "mounts": 0, "cgroups": 0, "files": 0}


@pytest.mark.needs("root", "oci", "nats_server", "mmdebstrap")
def test_benchmark_in_small() -> None:
    """The create benchmark with three rounds reports every promised key, and its features were read inside a sandbox."""
    result, done = _last_line("benchmarks", "create", "--n", "3", "--no-peers", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(str(result["create_exec_ms_p50"])) > 0
    assert result["docker_ratio"] is None
    features = result["features"]
    assert isinstance(features, dict)
    assert features["seccomp"] is True
    assert features["netns"] is True
