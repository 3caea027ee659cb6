"""The example whose controller runs in a worker: its client is killed, then the controller itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.needs("root", "oci", "nats_server", "mmdebstrap")
@pytest.mark.timeout(240)
def test_a_group_of_rollouts_outlives_its_client_and_its_controller() -> None:
    """Killed with -9 one after the other: the result of three rounds is fetched by another client, and no command ran twice."""
    command = [sys.executable, "-m", "examples.rollout_worker", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("\nround ") == 3
    assert "the controller was started 2 times, commands that ran twice: 0" in done.stdout
