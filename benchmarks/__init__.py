"""Benchmarks: one module each, run as `python -m benchmarks NAME --json`; the promises in SPECIFICATION.md name them.

Every benchmark starts and ends its own cluster, builds its base layer if absent, and takes its peers interleaved in the same run, so
that a busy machine slows both alike.
"""

from __future__ import annotations

NAMES = (
    *("create", "exec", "burst", "stream", "files", "trees", "forward", "placement", "idle", "packdiff", "disks"),
    *("density", "stop", "sustained", "ondemand", "compose", "tar_vs_erofs", "pause", "job_pause", "neighbours", "fork", "recovery"),
)
