"""Whether this node could keep processes in a checkpoint: CRIU 4 or newer. What uses it is not built yet, and nothing here pretends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Literal

from dsec import syscalls

NEEDED = (4, 0)


def look() -> tuple[Literal["fallback", "missing"], str]:
    """For doctor and for refusals: "missing" without a CRIU that would do. Blocks for one start of the program."""
    if syscalls.disabled("criu"):
        return "missing", "criu is disabled by DSEC_DISABLE"
    path = shutil.which("criu", path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        return "missing", "criu is not installed"
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return "missing", f"{path} cannot be asked: {error}"
    found = re.search(r"(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < NEEDED:
        return "missing", f"criu at {path} is {found[0] if found else 'of an unknown version'}, 4.0 is needed"
    return "fallback", f"criu {found[0]} is at {path}, and nothing uses it yet"
