"""The benchmarks' registry, their keys and the arithmetic behind their figures."""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import subprocess
from types import ModuleType

import pytest

from benchmarks import NAMES, harness, machine
from benchmarks.__main__ import module, parser

# The keys are a promise to whoever reads the figures by program.
KEYS = {
    "create": {"create_exec_ms_p50", "create_exec_ms_p95", "crun_ratio", "docker_ratio", "bwrap_ratio"},
    "exec": {"exec_ms_p50", "exec_ms_p99"},
    "burst": {"n", "ok", "per_s", "p50_ms", "p99_ms", "loop_lag_ms_p99"},
    "stream": {"mib_s"},
    "files": {"mib_s_up", "mib_s_down", "client_rss_mib"},
    "trees": {"files", "up_s", "down_s"},
    "forward": {"rtt_ms_p50", "rtt_ms_p99", "connect_ms_p50", "mib_s_up", "mib_s_down"},
    "placement": {"n", "edges", "distinct_specs", "seconds", "per_s"},
    "idle": {"edge_rss_mib", "mib_per_sandbox"},
    "density": {
        *("live", "create_per_s", "create_ms_p50_first", "create_ms_p50_last", "mib_per_sandbox"),
        *("exec_ms_p50", "exec_ms_p99", "stop_all_s", "costs", "filling_loop_lag_ms_p99", "left", "left_after_end"),
    },
    "stop": {"stop_ms_p50", "stop_1000_s"},
    "sustained": {"per_s", "minutes", "refused", "lost"},
    "ondemand": {
        *("workload", "image_mb", "fetched_mb", "fetched_share", "plain_python_share", "ready_ms", "done_s"),
        *("prefetched_done_s", "cached_s", "full_pull_s", "targz_s", "docker_pull_s"),
    },
    "neighbours": {"before_p50_ms", "during_p50_ms", "before_p99_ms", "during_p99_ms", "factor", "onset_p99_ms"},
    "compose": {"mounts", "p50_us"},
    "disks": {"rows"},
    "tar_vs_erofs": {"rows"},
    "packdiff": {"files", "mb", "seconds", "frozen_s", "tar_s", "speedup", "layer_mb"},
    "pause": {"mb", "random_share", "swap", "pause_ms", "released_share", "resume_first_exec_ms", "touch_all_ms"},
    "fork": {"n", "kind", "seconds", "p50_ms"},
    "job_pause": {"n", "mib_each", "seconds", "released_mib"},
    "recovery": {
        *("edge_restart_s", "adopted", "nats_restart_s", "leader_loss_s"),
        *("lost_events", "lost_results", "doubled_results"),
    },
}


@pytest.fixture(params=NAMES)
def benchmark(request: pytest.FixtureRequest) -> ModuleType:
    return module(request.param)


def test_every_benchmark_is_registered() -> None:
    """The registry names exactly the benchmarks that are promised."""
    assert set(NAMES) == set(KEYS)


def test_keys_are_the_promised_ones(benchmark: ModuleType) -> None:
    """Each benchmark declares the keys that it is promised to report."""
    assert set(benchmark.KEYS) == KEYS[benchmark.__name__.rpartition(".")[2]]


def test_options_come_from_defaults(benchmark: ModuleType) -> None:
    """Each default is an option of the command line with the default's type."""
    name = benchmark.__name__.rpartition(".")[2]
    options = parser().parse_args([name, "--json"])
    assert options.json
    assert {key: getattr(options, key) for key in benchmark.DEFAULTS} == benchmark.DEFAULTS


def test_defaults_are_those_of_the_targets() -> None:
    """The targets are stated for a burst of 200, 2 GiB of file, 32,000 placements over 160 Edges, 10,000 live, 5,000 a second."""
    assert module("burst").DEFAULTS["n"] == 200
    assert module("files").DEFAULTS["mib"] == 2048
    placement = module("placement").DEFAULTS
    assert (placement["n"], placement["edges"]) == (32_000, 160)
    assert module("density").DEFAULTS["n"] == 10_000
    assert module("stop").DEFAULTS["n"] == 1_000
    assert (module("recovery").DEFAULTS["n"], module("recovery").DEFAULTS["kills"]) == (200, 200)
    sustained = module("sustained").DEFAULTS
    assert (sustained["rate"], sustained["minutes"], sustained["refuse"]) == (5_000, 2.0, 0.01)
    assert sustained["rate"] * sustained["lifetime"] == 380_000
    packing = module("packdiff").DEFAULTS
    assert (packing["files"], packing["mb"]) == (5000, 200)
    assert placement["specs"] >= 10_000


def test_percentile_agrees_with_the_standard_library() -> None:
    """Percentiles interpolate between closest ranks as `statistics.quantiles` does."""
    values = [random.Random(7).expovariate(1) for _ in range(101)]
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 95, 99):
        assert harness.percentile(values, percent) == pytest.approx(expected[percent - 1])


def test_percentile_of_one_value_is_that_value() -> None:
    """A single value is all of its percentiles, and nothing has none."""
    assert harness.percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        harness.percentile([], 50)


def test_ratio_is_null_without_a_peer() -> None:
    """A missing peer makes a null ratio, never a zero."""
    assert harness.ratio(None, 2.0) is None
    assert harness.ratio(30.0, 2.0) == 15.0


async def test_interleaving_takes_every_way_once_a_round() -> None:
    """Each way is taken once in each round, warm-up rounds are not counted, and none always follows the same other."""
    order: list[str] = []

    def way(name: str):
        async def take() -> float:
            order.append(name)
            return float(len(order))

        return take

    times, failed = await harness.interleave(4, {"a": way("a"), "b": way("b")}, warm_up=1)
    assert not failed
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4}
    assert sorted(order) == ["a"] * 5 + ["b"] * 5
    assert {"".join(order[at : at + 2]) for at in range(0, 10, 2)} == {"ab", "ba"}


async def test_a_peer_that_fails_is_left_out() -> None:
    """A peer that fails is named with its reason and has no figure; a failure of our own side ends the run."""

    async def ours() -> float:
        return 1.0

    async def peer() -> float:
        raise RuntimeError("gone")

    times, failed = await harness.interleave(3, {"ours": ours, "peer": peer}, may_fail=("peer",))
    assert times == {"ours": [1.0] * 3}
    assert "gone" in failed["peer"]
    with pytest.raises(RuntimeError, match="gone"):
        await harness.interleave(3, {"peer": peer})


def test_free_pages_of_the_cores_own_lists_are_available() -> None:
    """The kernel does not count them as MemAvailable, though any program that runs there gets them first."""
    text = """Node 0, zone   Normal
  pages free     4711
        nr_free_pages 4711
  pagesets
    cpu: 0
              count:    94
              high:     1818
    cpu: 1
              count:    6
              high:     1818
"""
    assert machine.free_by_core(text) == 100 * os.sysconf("SC_PAGE_SIZE")


def test_what_others_start_is_not_left_by_a_run() -> None:
    """A run is what it was started as, all below it, and new orphans; who was there before, and what that starts, is not."""
    init, shell, edge = machine.Process(0, "init"), machine.Process(1, "bash"), machine.Process(100, "python")
    before = {1: init, 50: shell, 100: machine.Process(50, "python"), 101: edge}
    now = before | {
        200: machine.Process(101, "dsec-zygote"),
        201: machine.Process(200, "dsec-zygote"),
        300: machine.Process(50, "make"),
        301: machine.Process(300, "cc"),
        400: machine.Process(1, "aether"),
        401: machine.Process(400, "chronus"),
    }
    assert sorted(machine.own(before, now, frozenset({100}))) == [100, 101, 200, 201, 400, 401]
    assert sorted(machine.own(before, before, frozenset({100}))) == [100, 101]


def test_what_is_left_is_named() -> None:
    """Counts, memory and what it went to, and the groups and processes that are new; nothing is named where nothing is left."""
    mib = 1 << 20
    counts = {"memory_cgroups": 1, "dying_memory_cgroups": 3, "mounts": 5, "descriptors": 9}
    before = machine.State(frozenset({7}), counts, 900 * mib, frozenset({"/a"}), {7: machine.Process(1, "python", 10 * mib)})
    same = dataclasses.replace(before, counts=counts | {"dying_memory_cgroups": 2}, available=800 * mib)
    found = {"memory_cgroups": 0, "dying_memory_cgroups": -1, "mounts": 0, "descriptors": 0}
    assert machine.more(before, same) == found | {"processes": 0, "memory_mib": 100, "processes_mib": 0}
    running = {7: machine.Process(1, "python", 30 * mib), 8: machine.Process(7, "aether", mib)}
    now = dataclasses.replace(before, groups=frozenset({"/a", "/a/b"}), running=running)
    found = machine.more(before, now)
    assert (found["processes"], found["processes_mib"], found["named"]) == (1, 21, ["/a/b", "aether (8)"])


def test_a_process_of_this_run_is_seen() -> None:
    """A child of this process belongs to it while it lives; the kernel's own threads are nobody's."""
    mine = frozenset({os.getpid()})
    before = machine.running()
    with subprocess.Popen(["sleep", "60"]) as child:
        now = machine.running()
        assert child.pid in set(machine.own(before, now, mine)) - set(machine.own(before, before, mine))
        child.kill()
    assert not any(process.name.startswith("kworker") for process in now.values())
