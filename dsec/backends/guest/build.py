"""Builds the project's small static C programs, and is hatch's build hook for them.

Each program is a row of `PROGRAMS`. A binary is kept in ``dsec/backends/guest/bin/<program>-<arch>`` beside a stamp with the hash of
what made it; it is built again when a source changes. The compiler is ``ziglang`` (musl, any target on any host); where it is
not installed a system gcc or clang serves for the machine's own architecture.

    python -m dsec.backends.guest.build [--arch x86_64|aarch64|all] [--program NAME]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

GUEST = Path(__file__).resolve().parent
BIN = GUEST / "bin"
ARCHES = ("x86_64", "aarch64")

# program -> folder of its sources, relative to this file's; every *.c there is compiled, every *.h counts for the hash.
PROGRAMS: dict[str, str] = {
    "aether": "src",
    "launcher": "../launcher",
    "oci": "../wrapper",
    "shim": "../shim",
    "hand": "../../layers/native",
}
FLAGS = (
    *("-std=gnu11", "-Os", "-static", "-s"),
    *("-Wall", "-Wextra", "-Werror"),
    *("-fno-asynchronous-unwind-tables", "-ffunction-sections", "-Wl,--gc-sections"),
)
# What is loaded into a program of another C library, and so stands on none.
_LIBRARY = (*("-std=gnu11", "-Os", "-shared", "-fPIC", "-nostdlib", "-s"), *("-Wall", "-Wextra", "-Werror"))
LIBRARIES = dict.fromkeys(("shim", "hand"), _LIBRARY)


class BuildError(RuntimeError):
    """No compiler, or the compiler refused; the message holds its words."""


def native_arch() -> str:
    """``x86_64`` or ``aarch64``: what this machine runs."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _sources(program: str) -> tuple[list[Path], list[Path]]:
    folder = (GUEST / PROGRAMS[program]).resolve()
    return sorted(folder.glob("*.c")), sorted(folder.glob("*.h"))


def available() -> tuple[str, ...]:
    """The programs whose sources are here."""
    return tuple(program for program in PROGRAMS if _sources(program)[0])


def _compiler(arch: str) -> tuple[str, ...]:
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-musl")
    if arch == native_arch():
        for name in ("musl-gcc", "gcc", "clang", "cc"):
            path = shutil.which(name)
            if path:
                return (path,)
    raise BuildError(f"no C compiler for {arch}: pip install ziglang" + (", or install gcc" if arch == native_arch() else ""))


def _hash(program: str, arch: str, extra: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join((program, arch, *LIBRARIES.get(program, FLAGS), *extra)).encode())
    for group in _sources(program):
        for path in group:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cache_env() -> dict[str, str]:
    env = dict(os.environ)
    root = GUEST.parents[2]
    cache = root / ".cache" if os.access(root, os.W_OK) else Path(tempfile.gettempdir()) / f"dsec-zig-{os.getuid()}"
    env.setdefault("ZIG_GLOBAL_CACHE_DIR", str(cache / "zig"))
    env.setdefault("ZIG_LOCAL_CACHE_DIR", env["ZIG_GLOBAL_CACHE_DIR"])
    return env


def build(arch: str, out: Path, program: str = "aether", extra: tuple[str, ...] = ()) -> Path:
    """Compile ``program`` for ``arch`` into ``out`` (replaced atomically). Raises `BuildError`."""
    sources, _ = _sources(program)
    if not sources:
        raise BuildError(f"{program}: no C sources in {GUEST / PROGRAMS[program]}")
    return compile_files(arch, out, sources, (*LIBRARIES.get(program, FLAGS), *extra))


def compile_files(arch: str, out: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compile and link ``sources`` for ``arch`` into ``out``, replaced atomically. Raises `BuildError` with the compiler's words."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    command = [*_compiler(arch), *flags, "-o", str(part), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, env=_cache_env(), check=False)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"{out.name} for {arch} did not compile:\n{done.stderr.strip()}")
    part.chmod(0o755)
    part.replace(out)
    return out


def ensure(arch: str | None = None, program: str = "aether", *, extra: tuple[str, ...] = (), tag: str = "") -> Path:
    """The binary of ``program`` for ``arch`` (default: this machine's), built first if it is absent or its sources changed.

    In an installed wheel the binaries are there and no sources need to be compiled. Raises `BuildError`.
    """
    arch = arch or native_arch()
    out = BIN / f"{program}{tag}-{arch}"
    stamp = out.with_suffix(".sha256")
    want = _hash(program, arch, extra)
    if _fresh(out, stamp, want):
        return out
    BIN.mkdir(parents=True, exist_ok=True)
    with open(BIN / f".{out.name}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # many test processes may ask at once
        if not _fresh(out, stamp, want):
            build(arch, out, program, extra)
            stamp.write_text(want + "\n", encoding="ascii")
    return out


def _fresh(out: Path, stamp: Path, want: str) -> bool:
    return out.exists() and stamp.exists() and stamp.read_text(encoding="ascii").strip() == want


def build_all() -> list[Path]:
    """Every program for every architecture: what a wheel carries."""
    return [ensure(arch, program) for program in available() for arch in ARCHES]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsec.backends.guest.build", description="build the static guest programs")
    parser.add_argument("--arch", choices=(*ARCHES, "all"), default=native_arch())
    parser.add_argument("--program", choices=sorted(PROGRAMS), default=None)
    args = parser.parse_args(argv)
    arches = ARCHES if args.arch == "all" else (args.arch,)
    for program in [args.program] if args.program else available():
        for arch in arches:
            path = ensure(arch, program)
            sys.stdout.write(f"{path} {path.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
