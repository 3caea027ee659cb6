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
