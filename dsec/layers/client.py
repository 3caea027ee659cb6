"""A layer with the client, for workers: `import libdsec` works in a sandbox whose Python is of this interpreter's version.

It is made of what is installed here: the client's own modules and the distributions that it stands on, below ``/opt/dsec/lib``, which a
``.pth`` file names to Debian's Python as to any other under ``/usr/local``. Nothing is fetched.
"""

from __future__ import annotations

import compileall
import hashlib
import importlib.metadata
import json
import os
import platform
import py_compile
import shutil
import sys
from pathlib import Path

import dsec
from dsec.errors import NodeError
from dsec.layers import importer, tools
from dsec.layers.bootstrap import cached
from dsec.layers.store import LayerInfo, LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef

WHERE = "opt/dsec/lib"
DISTRIBUTIONS = ("msgpack", "msgspec", "nats-py", "structlog")
MODULES = ("dsec/__init__.py", "dsec/errors.py", "dsec/model.py", "dsec/config.py", "dsec/tar.py", "dsec/bus", "libdsec")
_LEFT_OUT = ("__pycache__", "*.pyc", "*.pyi")


async def bootstrap_client(store: LayerStore, name: str = "libdsec", *, refresh: bool = False, progress: Progress = silent) -> LayerRef:
    """The layer; a second with nothing to do where it is up to date. Raises `NodeError` where a distribution is not installed."""
    files = await tools.in_thread(_files)
    recipe = await tools.in_thread(_recipe, files)
    if not refresh and (ready := await cached(store, name, recipe)):
        progress(f"{name} is up to date")
        return ready
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    source = f"libdsec {dsec.__version__} for Python {version} on {platform.machine()}"
    meta = LayerInfo(digest="", stored="erofs", size=0, source=source, recipe=recipe, at="/")
    async with store.staging() as stage:
        await tools.in_thread(_lay_out, stage / "tree", files, version)
        return await importer.pack(store, stage, name, meta, progress=progress)


def _files() -> dict[str, Path]:
    """Where each file comes from, by its path below the library."""
    root = Path(dsec.__file__).resolve().parent.parent
    found: dict[str, Path] = {}
    for module in MODULES:
        path = root / module
        for each in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found[str(each.relative_to(root))] = each
    for name in DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise NodeError(f"{name} is not installed here", fix=f"pip install {name}", retryable=False) from error
        for entry in distribution.files or ():
            if ".." not in entry.parts and not any(entry.match(pattern) or pattern in entry.parts for pattern in _LEFT_OUT):
                found[str(entry)] = Path(str(distribution.locate_file(entry)))
    return found


def _recipe(files: dict[str, Path]) -> str:
    digest = hashlib.sha256(json.dumps([1, platform.machine(), sys.implementation.cache_tag]).encode())
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _lay_out(tree: Path, files: dict[str, Path], version: str) -> None:
    """Blocking."""
    library = tree / WHERE
    for name, path in files.items():
        target = library / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        os.utime(target, (0, 0))
    # By content and never looked at again: times of a layer's files say nothing, and nobody inside could write the caches anew.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(library, quiet=2, stripdir=str(tree), prependdir="/", invalidation_mode=mode)
    for where in ("dist-packages", "site-packages"):
        folder = tree / f"usr/local/lib/python{version}/{where}"
        folder.mkdir(parents=True)
        (folder / "dsec.pth").write_text(f"/{WHERE}\n")
    for parent, folders, names in os.walk(tree):
        for each in (*folders, *names):
            os.chmod(os.path.join(parent, each), 0o755 if each in folders else 0o644)
