"""`python -m benchmarks NAME --json`: runs one benchmark; the last line of stdout is its result as one JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from types import ModuleType

from benchmarks import NAMES, harness


def module(name: str) -> ModuleType:
    """The module of one benchmark; it has ABOUT, KEYS, DEFAULTS and ``run(options)``."""
    return importlib.import_module(f"benchmarks.{name}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    top.add_argument("--list", action="store_true", help="name every benchmark with its keys")
    commands = top.add_subparsers(dest="name", metavar="NAME")
    for name in NAMES:
        found = module(name)
        command = commands.add_parser(name, help=found.ABOUT, description=found.ABOUT)
        command.add_argument("--json", action="store_true", help="nothing but the JSON object on stdout")
        command.add_argument("--cache", default=str(harness.CACHE), help="where layers are kept (default .cache in the checkout)")
        command.add_argument("--base", default="busybox", choices=("busybox", "debian-12"), help="base layer (default busybox)")
        command.add_argument("--no-peers", dest="peers", action="store_false", help="leave the other runtimes out; their ratios are null")
        for option, default in found.DEFAULTS.items():
            command.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default, help=f"default {default}")
    return top


def main(arguments: list[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    if options.list:
        for name in NAMES:
            print(f"{name:10s} {{{', '.join(module(name).KEYS)}}}  {module(name).ABOUT}")
        return 0
    if options.name is None:
        command.error("name a benchmark, or use --list")
    if os.geteuid() != 0:
        print("benchmarks start an Edge, which needs root", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it runs in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # what was made is undone then too
    found = module(options.name)
    result = harness.run(found.run(options))
    missing = [key for key in (*found.KEYS, "features", "driver") if key not in result]
    if missing:
        raise RuntimeError(f"{options.name} did not report {', '.join(missing)}")
    result = {"benchmark": options.name, **result, "environment": harness.environment()}
    if not options.json:
        for key in found.KEYS:
            print(f"{key:24s} {result[key]}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
