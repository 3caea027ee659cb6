"""cgroup v2 and an older kernel, shown in a Debian guest under QEMU: the container tests run in there."""

from __future__ import annotations

import re

import pytest

from tests.guest import machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def _guest_can_boot() -> None:
    if reason := machine.missing():
        pytest.skip(reason)


def test_limits_oom_and_freeze_hold_on_cgroup_v2(capsys: pytest.CaptureFixture[str]) -> None:
    """On Debian's 6.12 kernel with the whole of cgroup v2, limits, OOM reports and freezing hold, and overlays are made by paths."""
    tests = "tests/contract/test_backend.py tests/system tests/unit/test_doctor.py"
    with capsys.disabled():
        code, output = machine.run(
            f"python3 -m dsec.doctor --json; python3 -m pytest -p no:cacheprovider -o timeout=900 -ra {tests} -m 'guest and not slow'",
            timeout=3000,
        )
    assert code == 0, output[-4000:]
    assert re.search(r"\d+ passed", output)
    assert '"cgroup2","status":"ok"' in output
    assert '"overlay_fd","status":"fallback"' in output


DISKS = """
disk() { umount -l /tmp; "mkfs.$1" -q $3 /scratch/$1; mount $2 "$(losetup --direct-io=on -f --show /scratch/$1)" /tmp; chmod 1777 /tmp; }
suite="tests/contract/test_disks.py tests/contract/test_pack.py"
try() { python3 -m pytest -p no:cacheprovider -o timeout=900 -ra -q -m "not slow" $suite "$@"; }
truncate -s 2G /scratch/ext4 /scratch/xfs /scratch/btrfs
disk ext4 "-o prjquota" "-O quota,project -E quotatype=prjquota"
DSEC_EDGE__STATE_DIR=/tmp python3 -m dsec.doctor --json && try || exit 1
disk xfs "-o prjquota" && try -k quota || exit 1
disk btrfs && btrfs quota enable /tmp && try -k btrfs || exit 1
"""


def test_the_nodes_own_quotas_bound_a_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    """Writable layers keep their limits on ext4 and xfs with project quotas and on btrfs with qgroups; the doctor says which is used."""
    with capsys.disabled():
        code, output = machine.run(DISKS, timeout=3000)
    assert code == 0, output[-4000:]
    assert "disk=quota" not in output  # nothing of it was skipped
    assert output.count(" passed") == 3
    assert '"disk_limit","status":"ok","found":"quota' in output


def test_a_real_step_of_the_clock_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The guest's clock is set an hour forwards and then two back: no lease, idle time, life or command's time-out goes by it."""
    with capsys.disabled():
        code, output = machine.run("python3 -m tests.guest.clock_step", timeout=1500)
    assert code == 0, output[-4000:]
    assert output.count("nothing ended by it") == 2
