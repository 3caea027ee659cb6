"""pack_diff: what a sandbox wrote becomes a layer that a second sandbox reads, against tar and gzip inside the sandbox."""

from __future__ import annotations

import time
from argparse import Namespace

from benchmarks import harness

ABOUT = "a sandbox's changes packed into a layer, against tar.gz of the same files"
KEYS = ("files", "mb", "seconds", "frozen_s", "tar_s", "speedup", "layer_mb")
DEFAULTS = {"files": 5000, "mb": 200, "rounds": 3}
PLACE = "/srv/work"
# Random content: neither side gains from what compresses well.
FILL = """
mkdir -p {place} && cd {place} && n=0 && while [ $n -lt {files} ]; do
  d=$((n / 100)); [ -d $d ] || mkdir $d; head -c {size} /dev/urandom >$d/$n; n=$((n + 1))
done && echo done
"""
SUM = f"cd {PLACE} && find . -type f | sort | xargs cat | sha256sum"


async def run(options: Namespace) -> dict[str, object]:
    size = options.mb * 1_000_000 // options.files
    space = options.mb * 1_000_000 * 3 + 256 * harness.MIB
    async with (
        harness.session(options) as session,
        session.client.sandbox(
            session.image, cpus=2, memory=512 * harness.MIB, disk=space, inodes=4 * options.files + 10_000, pids=64
        ) as sandbox,
    ):
        await sandbox.exec(FILL.format(place=PLACE, files=options.files, size=size), timeout=600, check=True)
        want = (await sandbox.exec(SUM, timeout=600)).stdout.text
        times, frozen = [], []
        for number in range(options.rounds):
            # Something changes in between, or the store would find the layer there already.
            await sandbox.exec(f"echo {number} >{PLACE}/round", check=True)
            started = time.perf_counter()
            layer = await sandbox.pack_diff(f"bench/packdiff-{number}")
            times.append(time.perf_counter() - started)
            frozen.append(layer.frozen_ms / 1e3)
        await sandbox.exec(f"rm {PLACE}/round", check=True)
        layer = await sandbox.pack_diff("bench/packdiff")
        async with session.client.sandbox(session.image, workspace=layer, memory=512 * harness.MIB) as other:
            if (await other.exec(SUM, timeout=600)).stdout.text != want:
                raise harness.WrongAnswer("the second sandbox reads something else than the first one wrote")
        started = time.perf_counter()
        await sandbox.exec(f"tar -cf - {PLACE} | gzip >/tmp/work.tar.gz", timeout=1800, check=True)
        tar = time.perf_counter() - started
        for name in ("bench/packdiff", *(f"bench/packdiff-{number}" for number in range(options.rounds))):
            await session.store.untag(name)
        seconds = harness.percentile(times, 50)
        return {
            "files": options.files,
            "mb": options.mb,
            "seconds": harness.rounded(seconds, 3),
            "frozen_s": harness.rounded(harness.percentile(frozen, 50), 3),
            "tar_s": harness.rounded(tar, 2),
            "speedup": harness.rounded(tar / seconds, 1),
            "layer_mb": harness.rounded(layer.size / 1e6, 1),
            "features": await harness.features(session, sandbox),
            "driver": session.driver,
        }
