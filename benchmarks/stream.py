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
        count = 0
        rest = bytearray()  # what is not zeros: the nonce, if all is well
        zeros = bytes(harness.MIB)  # bytes compare by memcmp, a memoryview element by element
        started = time.perf_counter()
        async with sandbox.start(f"head -c {wanted} /dev/zero; echo {word}") as process:
            async for chunk in process:
                count += len(chunk.data)
                if chunk.data != zeros[: len(chunk.data)]:
                    rest += chunk.data.lstrip(b"\0")
            result = await process.wait()
        seconds = time.perf_counter() - started
        if count != wanted + len(word) + 1 or rest != f"{word}\n".encode() or result.exit_code != 0:
            raise harness.WrongAnswer(f"{count} bytes, expected {wanted} zeros and {word}; what is not zeros: {bytes(rest[:64])!r}")
        return {
            "mib_s": harness.rounded(options.mib / seconds, 1),
            "mib": options.mib,
            "seconds": harness.rounded(seconds, 3),
            "features": await harness.features(session, sandbox),
            "driver": session.driver,
        }
