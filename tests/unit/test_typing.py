"""The public API of libdsec, pinned by a type checker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_public_api_has_these_types(tmp_path: Path) -> None:
    """mypy --strict accepts tests/typing/api.py: calls, results and what must be refused."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "--follow-imports=silent", "tests/typing/api.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
