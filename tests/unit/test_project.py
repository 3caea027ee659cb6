"""The project's own promises: lint, types, import arrows, pinned dependencies, what README shows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BIN = Path(sys.executable).parent


def run(*command: str | Path, timeout: float = 110) -> str:
    """Runs a tool at the project's root; its output is the failure's message."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows (in a checkout), else all that are there."""
    done = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).exists()]
    return [path for pattern in patterns for path in ROOT.glob(f"**/{pattern}") if ".venv" not in path.parts]


def test_ruff_finds_nothing() -> None:
    """Every rule that pyproject.toml selects holds."""
    run(BIN / "ruff", "check", "--no-fix", ".")


def test_code_is_formatted() -> None:
    """Nobody argues about white space."""
    run(BIN / "ruff", "format", "--check", ".")


@pytest.mark.timeout(240)
def test_types_are_strict() -> None:
    """Both packages pass mypy --strict."""
    run(sys.executable, "-m", "mypy", timeout=230)


def test_import_arrows_point_down() -> None:
    """A room imports only from lower floors; NATS and Docker have one door each."""
    run(BIN / "lint-imports", "--no-cache")


@pytest.mark.parametrize("module", ["dsec/syscalls.py", "dsec/backends/guest/wire.py"])
def test_lowest_modules_stand_on_the_standard_library(module: str) -> None:
    """The files that the launch path and the holder load import nothing but the standard library."""
    path = ROOT / module
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names, f"{module}:{node.lineno}: {name}"


def test_files_stay_short() -> None:
    """No file of code is longer than 600 lines."""
    long = {str(path.relative_to(ROOT)): lines for path in tracked("*.py", "*.c", "*.h") if (lines := path.read_text().count("\n")) > 600}
    assert not long


def test_every_dependency_is_locked() -> None:
    """requirements.lock holds every dependency and extra of pyproject.toml with its hashes, and says nothing of where it came from."""
    lock = (ROOT / "requirements.lock").read_text()
    locked = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE)}
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line)[0]).lower() for line in wanted}
    assert not names - locked, "run `make lock`"
    assert "://" not in lock
    assert lock.count("--hash=sha256:") >= len(locked)


def test_the_client_needs_none_of_the_node() -> None:
    """`import libdsec` loads neither the actors nor kernel code nor a package of the node extra."""
    code = (
        "import sys, libdsec\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in {'aiodocker', 'pyroute2', 'uvloop', 'aiofiles', 'ziglang'}"
        " or m.startswith(('dsec.actors', 'dsec.backends', 'dsec.layers', 'dsec.qos', 'dsec.security', 'dsec.syscalls'))]\n"
        "sys.exit(' '.join(bad) or 0)"
    )
    run(sys.executable, "-c", code)


def test_packages_say_that_they_are_typed() -> None:
    """Users' type checkers read our annotations."""
    assert (ROOT / "dsec/py.typed").exists()
    assert (ROOT / "libdsec/py.typed").exists()


def test_no_file_names_this_machine() -> None:
    """Nothing that is checked in holds an absolute path of a developer's machine or a registry's host."""
    pattern = re.compile(r"/work/(?:main|shared)|/root/\.|pypi\.org|files\.pythonhosted|deb\.debian\.org|registry\.npmjs")
    found = []
    for path in tracked():
        if path == Path(__file__).resolve() or path.suffix in {".gz", ".png", ".whl", ".zip", ".xz"}:
            continue
        text = path.read_bytes().decode(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match.group(0)}" for match in pattern.finditer(text)]
    assert not found
