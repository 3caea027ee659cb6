"""`dsec doctor`: what this node can do, what it falls back to, and the command that would give it more.

One check for each feature. A check says **ok**, **fallback** (the feature is not there, DSec uses something else and names it) or
**missing** (what stands on it is refused). Checks that could be answered by trying are tried (dsec/doctor_probes.py), and nothing that
was tried stays. ``DSEC_DISABLE=erofs_file,userns,…`` makes a feature count as missing, as everywhere.

``python -m dsec.doctor [--json]`` prints the report; `reason` is what tests and refusals say.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable

from dsec import doctor_layers, doctor_node, doctor_runtimes, doctor_security, syscalls
from dsec.doctor_report import Check, Report
from dsec.doctor_rules import Answer

_RULES = doctor_node.rules | doctor_layers.rules | doctor_runtimes.rules | doctor_security.rules | doctor_node.tables


def names() -> list[str]:
    """All features that the doctor knows."""
    return list(_RULES)


def check(name: str) -> Check:
    """Looks at one feature, now. Raises `KeyError` for a name that the doctor does not know."""
    probe, consequence, fix = _RULES[name]
    status, found = _disabled() if syscalls.disabled(name) else _ask(probe)
    if status == "ok":
        consequence, fix = "", ""
    return Check(name=name, status=status, found=found, consequence=consequence, fix=fix)


def _disabled() -> Answer:
    return "missing", "disabled by DSEC_DISABLE"


def _ask(probe: Callable[[], Answer]) -> Answer:
    try:
        return probe()
    except OSError as error:  # a file of /proc or /sys that this kernel does not have
        return "missing", str(error)


def diagnose() -> Report:
    """Looks at everything; takes about a quarter of a second and blocks: call it in a thread."""
    return Report(node=platform.node(), kernel=platform.release(), checks=tuple(check(name) for name in _RULES))


def reason(name: str) -> str | None:
    """Why a feature cannot be used here, in one sentence, or None where it is there. Asked once a process and DSEC_DISABLE."""
    looked = _remembered(name, os.environ.get("DSEC_DISABLE", ""))
    if looked.status == "ok":
        return None
    return f"{name}: {looked.found}" + (f" ({looked.consequence})" if looked.consequence else "")


@functools.lru_cache
def _remembered(name: str, _disable: str) -> Check:
    return check(name)


def main(arguments: list[str]) -> int:
    """Prints the report; 0 where a node can run here, 1 where it cannot."""
    report = diagnose()
    print(report.json() if "--json" in arguments else report.table())
    return 0 if all(report.get(name).status != "missing" for name in ("root", "cgroup", "oci", "seccomp")) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
