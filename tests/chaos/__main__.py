"""``python -m tests.chaos --seed N --seconds N``: a campaign, or a part of one again."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

from dsec import doctor
from dsec.trees import clear
from tests.chaos.campaign import Campaign, Report

NEEDS = ("root", "cgroup", "oci", "guest")


def container_missing() -> str:
    """Why no containers can be made here; "" when they can."""
    return next((reason for name in NEEDS if (reason := doctor.reason(name))), "")


def show(report: Report, whole: bool) -> int:
    """Print what was found; the process's exit code."""
    print(f"\n{report.rounds} rounds, {report.deaths} deaths, {report.steps} results of steps")
    print("calls:", ", ".join(f"{what} {count}" for what, count in report.counts.items()))
    print("slowest:", ", ".join(f"{what} {seconds} s" for seconds, what in report.slowest))
    print(f"kill points reached ({len(report.reached)} of {len(report.reached) + len(report.missing)}):")
    for name, count in sorted(report.reached.items()):
        print(f"  {name:20s} {count}")
    if report.missing:
        print("not reached:", ", ".join(sorted(report.missing)))
    if report.wrong:
        print(f"\nWRONG (seed {report.seed}):")
        for wrong in report.wrong[:40]:
            print(f"  {wrong.kind}: {wrong.text}")
        print(f"again: make chaos SEED={report.seed}, or python -m tests.chaos --seed {report.seed} --first {report.rounds}")
    return 1 if report.wrong or (whole and report.missing) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="decides all that is decided here; 0 = one of chance")
    parser.add_argument("--seconds", type=float, default=300.0, help="default 300")
    parser.add_argument("--rounds", type=int, default=0, help="at most so many; 0 = until the time is over")
    parser.add_argument("--first", type=int, default=0, help="begin at this round")
    parser.add_argument("--dense", action="store_true", help="as many deaths as can be, in place of every kill point once")
    parser.add_argument("--backend", choices=("auto", "container", "fake"), default="auto", help="auto: containers where they can be made")
    options = parser.parse_args()
    missing = container_missing()
    container = options.backend == "container" or (options.backend == "auto" and not missing)
    if not container and options.backend == "auto":
        print(f"with the fake backend: {missing}")
    seed = options.seed or random.SystemRandom().randrange(1, 1_000_000)
    print(f"seed {seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="dsec-c-", dir="/tmp"))
    keep = False
    try:
        bounds = {"seconds": options.seconds, "rounds": options.rounds, "first": options.first}
        campaign = Campaign(place, seed, **bounds, container=container, dense=options.dense)
        report = asyncio.run(campaign.run())
        keep = bool(report.wrong)
        if keep:
            print(f"logs are kept in {place}")
        return show(report, whole=not options.rounds and not options.dense and options.seconds >= 120)
    finally:
        if not keep:
            clear(place)


if __name__ == "__main__":
    os.environ.pop("DSEC_CONFIG", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it runs in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # what was made is undone then too
    logging.getLogger().addHandler(logging.NullHandler())  # clients lose their connections all the time, and say so
    sys.exit(main())
