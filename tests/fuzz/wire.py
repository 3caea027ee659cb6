"""Fuzzes our reading of what a guest sends: no bytes of a sandbox may do more than raise `WireError`.

``python -m tests.fuzz.wire --seconds 600 [--seed N]``. Exit code 0: nothing was found.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
from collections import Counter

from dsec.backends.guest import wire

KINDS = tuple(wire.Type)
EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def seeds(rng: random.Random) -> list[bytes]:
    """Bodies of every length that a reader tells apart, so that mutations get past the first check."""
    return [b"", *(rng.randbytes(length) for length in (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 128, 256, 1024))]


def mutate(rng: random.Random, body: bytes) -> bytes:
    """One to four edits: an edge value as a length, a flipped bit, a cut, a doubled piece."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 4] = struct.pack("<I", rng.choice(EDGES) if rng.random() < 0.5 else rng.randrange(64))
            case 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case _:
                data[at:at] = data[at : at + rng.randrange(32)]
    return bytes(data[: wire.MAX_FRAME])


def run(seconds: float, seed: int) -> Counter[str]:
    """Counts of bodies that were read and refused. What escapes `WireError` is raised."""
    rng = random.Random(seed)
    pool = seeds(rng)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(500):
            body = mutate(rng, rng.choice(pool))
            kind = rng.choice(KINDS)
            try:
                wire.header(body[:12].ljust(12, b"\0"))
            except wire.WireError:
                counts["bad header"] += 1
            try:
                wire.decode(kind, body)
            except wire.WireError:
                counts["refused"] += 1
            else:
                counts["read"] += 1
                if rng.random() < 0.02:  # what was read is a good place to begin from
                    pool[rng.randrange(1, len(pool))] = body
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fuzz the node's reading of guest frames")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_007)
    args = parser.parse_args(argv)
    print(f"seed {args.seed}", flush=True)
    counts = run(args.seconds, args.seed)
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
