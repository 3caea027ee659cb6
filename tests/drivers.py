"""Programs that drive sandboxes and are killed or interrupted in the middle of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_PROGRAM = """
import asyncio, json, signal, sys, libdsec
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell has it ignored
url, count, image, command, client_options, options = json.loads(sys.argv[1])
async def main():
    async with libdsec.connect(url, **client_options) as client:
        async def one():
            async with client.sandbox(image, **options) as sb:
                print(sb.id, flush=True)
                await sb.exec(command)
        await asyncio.gather(*(one() for _ in range(count)))
asyncio.run(main())
"""


def drive(
    url: str, count: int, image: str, options: Mapping[str, Any], command: str | Sequence[str], **client: Any
) -> subprocess.Popen[bytes]:
    """A driver with ``count`` sandboxes, each in the middle of ``command``. ``client``: options of its `libdsec.connect`."""
    asked = json.dumps([url, count, image, command, client, dict(options)])
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline(), process.communicate()[1].decode()
    return process


def interrupted_once(text: str) -> None:
    """What a driver has said after Ctrl+C: one KeyboardInterrupt with the two tracebacks of asyncio.run, and no cascade of the loop's."""
    assert text.rstrip().endswith("KeyboardInterrupt"), text
    assert text.count("Traceback") <= 2
    for word in ("loop is closed", "never retrieved", "was destroyed", "unhandled", "cannot schedule"):
        assert word not in text
