"""A trainer in a process of its own, to be killed: ``python -m tests.chaos.job URL SANDBOX STEPS``.

It knows nothing but the sandbox's id, and begins at the beginning each time it is started. It says ``asks KEY`` before each step and
``got KEY RESULT`` after it, so that whoever killed it knows what it knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import libdsec
from dsec.errors import DsecError, SandboxGone
from tests.chaos.load import command


async def main(url: str, sandbox_id: str, steps: int) -> None:
    async with libdsec.connect(url, connect_timeout=60.0) as client:
        sandbox = None
        number = 0
        while number < steps:
            with contextlib.suppress(DsecError):
                try:
                    sandbox = sandbox or await client.attach(sandbox_id)
                    print(f"asks j{number}", flush=True)
                    result = await sandbox.exec(command(f"j{number}"), step=f"j{number}", timeout=30.0)
                except SandboxGone:
                    return
                print(f"got j{number} {result.stdout.text.strip()}", flush=True)
                number += 1
                continue
            await asyncio.sleep(0.1)
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
