"""The packages that the design names do the work that it names them for: each is used in its room, by actors as they run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACTORS = "dsec/actors"

# Import name -> the files that must use it. aiodocker is not here: it comes with the Docker backend (dsec/backends/docker.py).
USED = {
    "nats": ["dsec/bus/nats_client.py"],
    "msgpack": ["dsec/bus/codec.py"],
    "uvloop": ["dsec/bus/bus.py", "dsec/security/resolver.py"],
    "aiofiles": [
        "dsec/actors/up.py",
        "dsec/backends/oci.py",
        "dsec/backends/holder_client.py",
        "dsec/bus/server.py",
        "dsec/bus/spool.py",
        "dsec/layers/tools.py",
        "dsec/security/resolver.py",
    ],
    "pyroute2": ["dsec/security/rtnl.py"],
    "structlog": [
        "dsec/actors/edge.py",
        "dsec/actors/run.py",
        "dsec/actors/sandbox.py",
        "dsec/actors/scheduler.py",
        "dsec/actors/up.py",
        "dsec/actors/watcher.py",
        "dsec/backends/container.py",
        "dsec/backends/network.py",
        "dsec/bus/transport.py",
    ],
}
# Helper processes beside an actor, and the compiler: no loop, or nothing but the standard library.
NO_LOOP = {
    *("dsec/backends/holder.py", "dsec/backends/holder_heir.py", "dsec/backends/ondemand.py", "dsec/backends/zygotes.py"),
    *("dsec/layers/loader.py", "dsec/layers/lazy.py", "dsec/backends/guest/build.py"),
}
# Protocol and command line, no logs: {"ready": …} on standard output, usage before there is a configuration.
SAYS = {
    ("dsec/actors/run.py", "_say"),
    ("dsec/actors/run.py", "main"),
    ("dsec/actors/up.py", "up"),
    ("dsec/actors/simulate.py", "simulate"),
    ("dsec/security/resolver.py", "run"),
}
# Opened once for a download of many pieces, each of which is hashed and written by one thread.
OPENS = {("dsec/layers/registry.py", "fetch")}
BLOCKING = re.compile(r"^open$|^os\.(read|write|fsync)$|\.(read_text|write_text|read_bytes|write_bytes)$")


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def imported(path: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def files(*rooms: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize(("package", "path"), [(package, path) for package, paths in USED.items() for path in paths])
def test_a_package_of_the_design_is_used_in_its_room(package: str, path: str) -> None:
    """The file imports the package."""
    assert package in imported(path)


def test_the_packages_of_the_design_are_dependencies() -> None:
    """pyproject.toml asks for each: the client for what it needs, the node for the rest, tests for pytest-asyncio."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in lines}

    assert {"nats-py", "msgpack", "structlog"} <= names(project["dependencies"])
    assert {"aiodocker", "aiofiles", "pyroute2", "uvloop"} <= names(project["optional-dependencies"]["node"])
    assert "pytest-asyncio" in names(project["optional-dependencies"]["dev"])


def test_what_costs_memory_is_imported_late(tmp_path: Path) -> None:
    """An Edge that never has an open sandbox does not pay for pyroute2: neither what it imports nor its choice of addresses needs it."""
    code = f"""import asyncio, sys, dsec.actors.run, dsec.backends.container
from dsec.backends.network import OpenNetwork
from dsec.config import NetworkConfig
network = OpenNetwork(NetworkConfig(), "n1", {str(tmp_path)!r}, {str(tmp_path)!r}, ())
asyncio.run(network.look())
assert network.offer or network.missing
sys.exit("pyroute2" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def test_coroutines_open_files_with_aiofiles() -> None:
    """No coroutine of an actor opens, reads or writes a file by a call that blocks its loop."""
    found = []
    for path in files(ACTORS, "dsec/backends", "dsec/bus", "dsec/layers", "dsec/qos", "dsec/security"):
        if path in NO_LOOP:
            continue
        waiting: list[ast.AST] = [
            node for node in ast.walk(tree(path)) if isinstance(node, ast.AsyncFunctionDef) and (path, node.name) not in OPENS
        ]
        while waiting:
            for child in ast.iter_child_nodes(waiting.pop()):
                if isinstance(child, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef):
                    continue  # runs in a thread, or is looked at by itself
                waiting.append(child)
                if isinstance(child, ast.Call) and BLOCKING.search(called(child)):
                    found.append(f"{path}:{child.lineno}: {called(child)}")
    assert not found


def test_files_are_not_read_by_borrowed_threads() -> None:
    """`asyncio.to_thread(path.read_text)` is what aiofiles is for."""
    wrapped = re.compile(r"(to_thread|in_thread|run_in_executor)\([^)]*\b(read_text|write_text|read_bytes|write_bytes)\b")
    rooms = files(ACTORS, "dsec/backends", "dsec/bus", "dsec/layers", "dsec/qos", "dsec/security")
    assert not [path for path in rooms if wrapped.search((ROOT / path).read_text())]


def test_actors_log_with_structlog_only() -> None:
    """No `print`, no `logging.getLogger`, no bare line on standard error."""
    found = []
    for path in files(ACTORS, "dsec/backends", "dsec/bus", "dsec/security"):
        if path in NO_LOOP:
            continue
        for function in (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if not isinstance(node, ast.Call) or (path, function.name) in SAYS:
                    continue
                if called(node) in {"print", "logging.getLogger", "sys.stderr.write", "sys.stdout.write", "warnings.warn"}:
                    found.append(f"{path}:{node.lineno}: {called(node)}")
    assert not found
