"""Connections into a sandbox whose network is closed: through a local port, over the bus, to an echo inside."""

from __future__ import annotations

import asyncio
import os
import time
from argparse import Namespace

from benchmarks import harness

ABOUT = "through `sb.expose`: round trip of one byte, a connection, a stream in each direction"
KEYS = ("rtt_ms_p50", "rtt_ms_p99", "connect_ms_p50", "mib_s_up", "mib_s_down")
DEFAULTS = {"trips": 1000, "mib": 256}
ECHO, SINK, SOURCE = 7000, 7001, 7002


async def listening(address: tuple[str, int]) -> None:
    """Until something inside takes connections."""
    for _ in range(100):
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(b"x")
            if await reader.read(1):
                return
        except OSError:
            await asyncio.sleep(0.05)
        finally:
            writer.close()
    raise RuntimeError("nothing listens inside")


async def round_trips(address: tuple[str, int], count: int) -> list[float]:
    reader, writer = await asyncio.open_connection(*address)
    times = []
    for _ in range(count + 20):
        started = time.perf_counter()
        writer.write(b"x")
        await reader.readexactly(1)
        times.append((time.perf_counter() - started) * 1000)
    writer.close()
    return times[20:]


async def connections(address: tuple[str, int], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x")
        await reader.readexactly(1)
        times.append((time.perf_counter() - started) * 1000)
        writer.close()
    return times


async def up(address: tuple[str, int], mib: int) -> float:
    """MiB/s; the far end closes when it has read all."""
    block = os.urandom(harness.MIB)
    reader, writer = await asyncio.open_connection(*address)
    started = time.perf_counter()
    for _ in range(mib):
        writer.write(block)
        await writer.drain()
    writer.write_eof()
    await reader.read()
    writer.close()
    return mib / (time.perf_counter() - started)


async def down(address: tuple[str, int], mib: int) -> float:
    reader, writer = await asyncio.open_connection(*address)
    started = time.perf_counter()
    got = 0
    while data := await reader.read(harness.MIB):
        got += len(data)
    writer.close()
    if got != mib * harness.MIB:
        raise harness.WrongAnswer(f"{got} bytes came instead of {mib * harness.MIB}")
    return mib / (time.perf_counter() - started)


async def run(options: Namespace) -> dict[str, object]:
    source = f"nc -ll -p {SOURCE} -e head -c {options.mib * harness.MIB} /dev/zero"
    servers = f"nc -ll -p {ECHO} -e cat & nc -ll -p {SINK} -e wc -c & {source}"
    async with harness.session(options) as session, session.client.sandbox(session.image, memory=256 * harness.MIB) as sandbox:
        async with (
            sandbox.start(servers),
            sandbox.expose(ECHO) as echo,
            sandbox.expose(SINK) as sink,
            sandbox.expose(SOURCE) as zeros,
        ):
            await listening(echo)
            trips = await round_trips(echo, options.trips)
            opened = await connections(echo, 50)
            rates = await up(sink, options.mib), await down(zeros, options.mib)
            return {
                "rtt_ms_p50": harness.rounded(harness.percentile(trips, 50)),
                "rtt_ms_p99": harness.rounded(harness.percentile(trips, 99)),
                "connect_ms_p50": harness.rounded(harness.percentile(opened, 50)),
                "mib_s_up": harness.rounded(rates[0], 1),
                "mib_s_down": harness.rounded(rates[1], 1),
                "features": await harness.features(session, sandbox),
                "driver": session.driver,
            }
