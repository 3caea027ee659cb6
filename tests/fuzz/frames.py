"""Fuzzes the guest's frame parser; with ``--what unpack`` its tar reader (which needs root: it makes files of any owner), with
``--what launch`` the native launcher's.

``python -m tests.fuzz.frames --seconds 600 [--seed N] [--what unpack|launch]``. Exit code 0: nothing was found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsec.backends.guest import build

HERE = Path(__file__).resolve().parent


def compile_target(folder: Path, plain: bool, what: str = "frames") -> Path:
    """The parser with undefined behaviour made a crash (unless ``plain``), and the mutator around it."""
    out = folder / what
    launcher = build.GUEST.parent / "launcher"
    sources = {
        "frames": [build.GUEST / "src/frame.c", HERE / "frames.c"],
        "unpack": [HERE / "tar.c"],
        "launch": [launcher / "frame.c", HERE / "launch.c"],
    }[what]
    flags = build.FLAGS if plain else (*build.FLAGS, "-fsanitize=undefined", "-fsanitize-trap=undefined")
    build.compile_files(build.native_arch(), out, sources, (*flags, f"-I{launcher if what == 'launch' else build.GUEST / 'src'}"))
    return out


def launch_frames(folder: Path) -> list[str]:
    """Frames as the node renders them: with and without ids, filter, groups and further mounts."""
    from dsec.backends import frame
    from dsec.backends.plan import Node, make_plan
    from dsec.model import LayerRef, SandboxId, SandboxSpec
    from dsec.qos.cgroup import Order
    from dsec.security import seccomp

    paths = []
    for number, userns in enumerate((True, False)):
        node = Node(edge="fuzz", state_dir="/tmp/fuzz", userns=userns, disk_modes=("tmpfs", "loop"))
        spec = SandboxSpec(image="small", disk_mode="tmpfs" if userns else "loop", best_effort=True, env={"A": "b"})
        refs = [LayerRef(name="small", digest="sha256:" + "5" * 64)]
        plan = make_plan(spec, id=SandboxId("fuzz", "01m8n1f6sg2hywsskv5e4d586k"), slot=1, refs=refs, node=node)
        filters = b"" if userns else seccomp.compiled(seccomp.profile("default"))[: 8 * 64]
        places = ("/sys/fs/cgroup/pids/a", "/sys/fs/cgroup/memory/a")
        groups = Order(places, ((f"{places[0]}/pids.max", "9"),), tuple(f"{place}/tasks" for place in places))
        args, group2 = frame.arguments(plan, 3, 4), "" if userns else "/sys/fs/cgroup/a"
        data = frame.render(plan, lowers=2, socket="/run/a", args=args, groups=groups, group2=group2, seccomp=filters)
        path = folder / f"frame-{number}"
        path.write_bytes(data)
        paths.append(str(path))
    return paths


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fuzz the frame parser of the guest")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_007)
    parser.add_argument("--plain", action="store_true", help="without the sanitizer, which takes long to build the first time")
    parser.add_argument("--what", choices=("frames", "unpack", "launch"), default="frames")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dsec-fuzz-") as folder:
        target = compile_target(Path(folder), args.plain, args.what)
        place = Path(folder) / "place"
        (place / "target").mkdir(parents=True)
        (place / "keep").write_text("keep")
        words = [str(target), str(args.seconds), str(args.seed), *([str(place)] if args.what == "unpack" else [])]
        words += launch_frames(Path(folder)) if args.what == "launch" else []
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if sorted(path.name for path in place.iterdir()) != ["keep", "target"] or (place / "keep").read_text() != "keep":
            print(f"seed {args.seed}: something was written outside of the target")
            return 1
    print(f"seed {args.seed}: {done.stdout.strip() or f'ended with {done.returncode}'}")
    return 0 if done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
