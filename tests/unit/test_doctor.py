"""What the doctor says, and that DSEC_DISABLE reaches it."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from dsec import doctor, doctor_probes
from dsec.actors import noted
from dsec.backends.guest import build
from dsec.commands import running
from dsec.config import dump, parse
from dsec.doctor_report import Running

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.diagnose()


def test_every_feature_has_one_answer(report: doctor.Report) -> None:
    """The report names each feature once, and whatever is not ok says what follows from it."""
    names = [check.name for check in report.checks]
    assert sorted(names) == sorted(set(names)) == sorted(doctor.names())
    for check in report.checks:
        assert check.found, check
        assert check.status == "ok" or check.consequence, check


def test_report_is_json_and_a_table(report: doctor.Report) -> None:
    """Programs read it as JSON, people as lines; both hold every feature."""
    data = json.loads(report.json())
    assert msgspec.json.decode(report.json(), type=doctor.Report) == report
    table = report.table()
    for check in data["checks"]:
        assert check["name"] in table


def test_edges_that_serve_are_told_with_their_pools() -> None:
    """How many launches found parts made ahead, or why nothing is known."""
    pools = {"container": (9, 12), "container groups": (0, 12)}
    serving = Running(edge="n1", url="nats://h:1", sandboxes=3, pools=pools)
    silent = Running(edge="n2", url="nats://h:2", trouble="no server")
    told = doctor.Report(node="h", kernel="6", checks=(doctor.check("root"),), running=(serving, silent))
    assert msgspec.json.decode(told.json(), type=doctor.Report) == told
    lines = told.table().splitlines()
    assert lines[-3:-1] == [
        "running   n1    nats://h:1: 3 sandboxes; launches with parts made ahead: container 9 of 12, container groups 0 of 12",
        "running   n2    nats://h:2: no server",
    ]


async def test_an_edge_whose_bus_is_away_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor says so and goes on."""
    file = tmp_path / "n1.toml"
    file.write_text(dump(parse({"edge": {"name": "n1"}})))
    monkeypatch.setattr(noted, "folder", lambda: tmp_path / "notes")
    monkeypatch.setattr(running, "PATIENCE", 0.2)
    monkeypatch.delenv("DSEC_CONFIG", raising=False)
    with noted.noted(noted.Note(os.getpid(), "nats://127.0.0.1:1", str(file)), tmp_path / "notes"):
        (found,) = await running.here()
    assert (found.edge, found.url) == ("n1", "nats://127.0.0.1:1")
    assert found.trouble


def test_disabled_feature_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSEC_DISABLE makes a feature missing, and the reason says so."""
    monkeypatch.setenv("DSEC_DISABLE", "erofs_file, userns")
    assert doctor.check("erofs_file").status == "missing"
    assert "DSEC_DISABLE" in (doctor.reason("userns") or "")
    monkeypatch.delenv("DSEC_DISABLE")
    assert "DSEC_DISABLE" not in (doctor.reason("userns") or "")


def test_an_agent_that_is_not_compiled_is_told_with_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a fresh clone nothing is wrong: the answer says what compiles it, by hand and by itself."""
    monkeypatch.setattr(build, "BIN", tmp_path)
    told = doctor.check("guest")
    assert told.status == "missing"
    assert "the first Edge here compiles it" in told.consequence
    assert "make setup" in told.fix
    assert f"{sys.executable} -m dsec.backends.guest.build" in told.fix
    (tmp_path / f"aether-{build.native_arch()}").touch()
    assert doctor.check("guest").status == "ok"


def test_the_disk_that_is_used_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which kind of writable layer a node takes, why no better one, and what the configuration asks for that is not there."""
    monkeypatch.setenv("DSEC_EDGE__STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DSEC_DISABLE", "quota,btrfs")
    told = doctor.check("disk_limit")
    assert told.status == "fallback"
    assert told.found.startswith(f"tmpfs at {tmp_path}")
    assert "disk=quota: disabled" in told.found
    monkeypatch.setenv("DSEC_CONTAINER__DISK", "btrfs")
    assert doctor.check("disk_limit").status == "missing"
    monkeypatch.setenv("DSEC_CONTAINER__DISK", "floppy")
    assert "container.disk" in doctor.check("disk_limit").found
    assert not list(tmp_path.iterdir())


def test_unknown_feature_is_an_error() -> None:
    """A test that needs a feature nobody checks would never run: it is told."""
    with pytest.raises(KeyError):
        doctor.reason("no-such-feature")


def test_looking_leaves_no_descriptor() -> None:
    """A diagnosis opens mounts, namespaces and programs, and closes all of them."""
    doctor.diagnose()
    gc.collect()  # what other tests have left to it
    before = len(os.listdir("/proc/self/fd"))
    mounts = len(open("/proc/self/mountinfo").readlines())  # noqa: SIM115
    doctor.diagnose()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(open("/proc/self/mountinfo").readlines()) == mounts  # noqa: SIM115


@pytest.mark.parametrize(
    ("version", "wanted", "answer"),
    [("2.15.1", (2, 12), True), ("2.9.10", (2, 12), False), ("1.8", (1, 8), True), ("", (1,), False), ("6.18.44", (6, 18, 44), True)],
)
def test_versions_compare_by_number(version: str, wanted: tuple[int, ...], answer: bool) -> None:
    """2.9 is older than 2.12."""
    assert doctor_probes.at_least(version, *wanted) is answer


@pytest.mark.parametrize("name", doctor.names())
def test_each_check_stands_alone(name: str) -> None:
    """Every check answers by itself and quickly, whatever the machine lacks."""
    assert doctor.check(name).status in {"ok", "fallback", "missing"}
