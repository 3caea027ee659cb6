"""The output of one command, read to its end through NATS."""

from __future__ import annotations

import secrets
import time
from argparse import Namespace

from benchmarks import harness

ABOUT = "output of one command, read as a stream"
KEYS = ("mib_s",)
DEFAULTS = {"mib": 1024}


async def run(options: Namespace) -> dict[str, object]:
    async with harness.session(options) as session, session.client.sandbox(session.image) as sandbox:
        word = secrets.token_hex(8)
        wanted = options.mib * harness.MIB
        count = zeros = 0
        last = b""
        started = time.perf_counter()
        async with sandbox.start(f"head -c {wanted} /dev/zero; echo {word}") as process:
            async for chunk in process:
                count += len(chunk.data)
                zeros += chunk.data.count(0)
                last = (last + chunk.data)[-64:]
            result = await process.wait()
        seconds = time.perf_counter() - started
        if zeros != wanted or count != wanted + len(word) + 1 or not last.endswith(f"{word}\n".encode()) or result.exit_code != 0:
            raise harness.WrongAnswer(f"{count} bytes with {zeros} zeros, expected {wanted}; the end is {last[-32:]!r}")
        return {
            "mib_s": harness.rounded(options.mib / seconds, 1),
            "mib": options.mib,
            "seconds": harness.rounded(seconds, 3),
            "features": await harness.features(session, sandbox),
            "driver": session.driver,
        }
