"""How long an overlay of several layers takes: the mount alone, by descriptors, as a launch makes it."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from benchmarks import harness
from dsec import syscalls
from dsec.layers import mounts
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore

ABOUT = "an overlay of a base, a workspace and a toolkit"
KEYS = ("mounts", "p50_us")
DEFAULTS = {"layers": 3, "mounts": 500}


async def run(options: Namespace) -> dict[str, object]:
    store = LayerStore(Path(options.cache) / "layers")
    names = [await harness.make_base(store, options.base)]
    with tempfile.TemporaryDirectory(prefix="dsec-compose-") as folder:
        scratch = LayerStore(Path(folder) / "store")
        plans = [await store.mount_plan((await store.resolve(names[0])).digest)]
        for number in range(1, options.layers):
            tree = Path(folder) / f"tree{number}"
            tree.mkdir()
            (tree / f"layer{number}").write_text(str(number))
            ref = await import_dir(scratch, tree, f"layer-{number}")
            plans.insert(0, await scratch.mount_plan(ref.digest))
        times, upper_times = [], []
        with ExitStack() as stack:
            lowers = [_keep(stack, mounts.open_layer(plan)) for plan in plans]
            for number in range(-20, options.mounts):
                whole = time.perf_counter()
                upper = syscalls.new_mount("tmpfs", [("size", "16m"), ("nr_inodes", "4096"), ("mode", "0755")])
                for name in ("upper", "work"):
                    os.mkdir(name, 0o755, dir_fd=upper)
                with ExitStack() as once:
                    parts = [_keep(once, os.open(name, os.O_PATH | os.O_DIRECTORY, dir_fd=upper)) for name in ("upper", "work")]
                    started = time.perf_counter()
                    given: list[tuple[str, str | int | None]] = [("lowerdir+", lower) for lower in lowers]
                    overlay = syscalls.new_mount("overlay", [*given, ("upperdir", parts[0]), ("workdir", parts[1])])
                    ended = time.perf_counter()
                top = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=overlay)
                found = os.listdir(top)
                os.close(top)
                os.close(overlay)
                os.close(upper)
                if not {f"layer{n}" for n in range(1, options.layers)} <= set(found):
                    raise harness.WrongAnswer(f"the overlay shows {sorted(found)}")
                if number >= 0:
                    times.append((ended - started) * 1e6)
                    upper_times.append((ended - whole) * 1e6)
    return {
        "mounts": len(times),
        "p50_us": harness.rounded(harness.percentile(times, 50), 1),
        "p99_us": harness.rounded(harness.percentile(times, 99), 1),
        "with_upper_p50_us": harness.rounded(harness.percentile(upper_times, 50), 1),
        "layers": options.layers,
        "features": {"by": "descriptors", "upper": "tmpfs with a limit"},
        "driver": "mount API from Python, one detached overlay at a time",
    }


def _keep(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd
