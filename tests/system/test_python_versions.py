"""The unit tests pass on every supported Python that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def interpreter(version: str) -> str | None:
    """A `python3.X` that runs, from PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for candidate in [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]:
        if candidate and subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_unit_tests_pass(version: str, tmp_path: Path) -> None:
    """A fresh environment from requirements.lock passes tests/unit (lint and types are the project's own Python's)."""
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        pytest.skip("these tests run on it already")
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    own = str(tmp_path / "venv" / "bin" / "python")
    pip = [own, "-m", "pip", "install", "-qq", "--require-hashes", "--prefer-binary", "-r", str(ROOT / "requirements.lock")]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit", "--ignore=tests/unit/test_project.py", "-m", "not slow"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
