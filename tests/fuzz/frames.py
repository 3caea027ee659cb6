"""Fuzzes the guest's frame parser or, with ``--what unpack``, its tar reader (which needs root: it makes files of any owner).

``python -m tests.fuzz.frames --seconds 600 [--seed N] [--what unpack]``. Exit code 0: nothing was found.
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
    sources = [build.GUEST / "src/frame.c", HERE / "frames.c"] if what == "frames" else [HERE / "tar.c"]
    flags = build.FLAGS if plain else (*build.FLAGS, "-fsanitize=undefined", "-fsanitize-trap=undefined")
    build.compile_files(build.native_arch(), out, sources, (*flags, f"-I{build.GUEST / 'src'}"))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fuzz the frame parser of the guest")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_007)
    parser.add_argument("--plain", action="store_true", help="without the sanitizer, which takes long to build the first time")
    parser.add_argument("--what", choices=("frames", "unpack"), default="frames")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dsec-fuzz-") as folder:
        target = compile_target(Path(folder), args.plain, args.what)
        place = Path(folder) / "place"
        (place / "target").mkdir(parents=True)
        (place / "keep").write_text("keep")
        words = [str(target), str(args.seconds), str(args.seed), *([str(place)] if args.what == "unpack" else [])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if sorted(path.name for path in place.iterdir()) != ["keep", "target"] or (place / "keep").read_text() != "keep":
            print(f"seed {args.seed}: something was written outside of the target")
            return 1
    print(f"seed {args.seed}: {done.stdout.strip() or f'ended with {done.returncode}'}")
    return 0 if done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
