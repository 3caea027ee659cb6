"""A group of rollouts whose controller runs in DSec itself: it survives the client that started it, and its own death.

    python -m examples.rollout_worker demo          (as root) a cluster of its own; the client and then the controller are killed with -9
    python -m examples.rollout_worker start         against DSEC_URL: prints the worker's id and leaves
    python -m examples.rollout_worker fetch ID      from anywhere, later: waits for the result and prints it
    python -m examples.rollout_worker resume ID     start the controller anew after its death; it goes on where it was

The controller, this same file inside of a worker sandbox, samples a group of rollouts of one task, runs each in a sandbox of its job,
rewards what the task's tests say, and moves a small softmax policy by the group-relative advantage (reward less the group's mean, over its
standard deviation: GRPO, arXiv:2402.03300). Every command has a `step` key and every choice follows from the seed, so a controller that
begins again repeats nothing. It needs nothing but the standard library and libdsec.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import libdsec

HOME = "/work"
GROUP, ROUNDS = 6, 3
RATE = 1.0  # of learning
MEMORY = "64MiB"

# The task: a shell function that clamps $1 to [$2, $3]. A rollout makes it in two turns, each a choice of the policy's.
TURNS = (
    ('if [ "$1" -lt "$2" ]; then echo "$2"; return; fi', 'if [ "$1" -gt "$2" ]; then echo "$2"; return; fi', ":"),
    ('if [ "$1" -gt "$3" ]; then echo "$3"; return; fi', 'if [ "$1" -lt "$3" ]; then echo "$1"; return; fi', ":"),
)
CASES = ((5, 1, 9, 5), (0, 1, 9, 1), (12, 1, 9, 9), (9, 1, 9, 9))
TESTS = "".join(f'[ "$(clamp {x} {low} {high})" = {want} ] && n=$((n + 1))\n' for x, low, high, want in CASES)
GRADE = f'n=0; . ./clamp.sh; {TESTS}echo "$n"; echo grade >>trace'


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(each - max(logits)) for each in logits]
    return [each / sum(weights) for each in weights]


def sample(logits: list[float], key: str) -> int:
    """The same choice for the same key, whoever asks."""
    return random.Random(key).choices(range(len(logits)), probabilities(logits))[0]


def advantages(rewards: list[float]) -> list[float]:
    """Each reward against its group."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in rewards) / len(rewards))
    return [(each - mean) / (deviation + 1e-6) for each in rewards]


def learned(policy: list[list[float]], choices: list[list[int]], scores: list[float]) -> list[list[float]]:
    """One step along the policy's gradient: what did better than its group becomes likelier."""
    made = [list(logits) for logits in policy]
    for chosen, score in zip(choices, scores, strict=True):
        for turn, choice in enumerate(chosen):
            for at, p in enumerate(probabilities(policy[turn])):
                made[turn][at] += RATE * score * ((at == choice) - p) / len(choices)
    return made


# ------------------------------------------------------------------ inside: the controller
class Controller:
    """What it must not forget is in one file, replaced as a whole."""

    def __init__(self, dsec: libdsec.Client, image: str, home: Path, seed: str, pause: float) -> None:
        self.dsec, self.image, self.seed, self.pause = dsec, image, seed, pause
        self.path = home / "state.json"
        self.result = home / "result.json"
        self.state: dict[str, Any] = {
            "round": 0,
            "policy": [[0.0] * len(turn) for turn in TURNS],
            "rollouts": [],
            "rounds": [],
            "starts": 0,
        }
        if self.path.exists():
            self.state = json.loads(self.path.read_text())

    def keep(self, path: Path, value: object) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value))
        part.replace(path)

    async def run(self) -> None:
        self.state["starts"] += 1
        self.keep(self.path, self.state)
        for info in await self.dsec.list():  # a start before this one may have died before it had written them down
            if info.id not in self.state["rollouts"]:
                await (await self.dsec.attach(info.id)).stop()
        while self.state["round"] < ROUNDS:
            await self.one_round()
        self.keep(self.result, {"starts": self.state["starts"], "rounds": self.state["rounds"], "policy": self.state["policy"]})

    async def one_round(self) -> None:
        number, policy = self.state["round"], self.state["policy"]
        if not self.state["rollouts"]:  # ids are on disk before anything is run in them
            async with asyncio.timeout(300):
                spec = libdsec.spec(self.image, memory=MEMORY, disk="16MiB", cpus=0.5, pids=32)
                made = await self.dsec.create_many(spec, GROUP)
            self.state["rollouts"] = [sandbox.id for sandbox in made]
            self.keep(self.path, self.state)
        group = [await self.dsec.attach(each) for each in self.state["rollouts"]]
        outcomes = await asyncio.gather(*(self.rollout(sandbox, f"{number}.{at}") for at, sandbox in enumerate(group)))
        rewards = [reward for _, reward, _ in outcomes]
        scores = advantages(rewards)
        self.state["policy"] = learned(policy, [chosen for chosen, _, _ in outcomes], scores)
        self.state["rounds"].append({"rewards": rewards, "advantages": scores, "commands_run": [ran for _, _, ran in outcomes]})
        self.state["round"] += 1
        self.state["rollouts"] = []
        self.keep(self.path, self.state)
        await asyncio.gather(*(sandbox.stop() for sandbox in group))

    async def rollout(self, sandbox: libdsec.Sandbox, key: str) -> tuple[list[int], float, int]:
        """The choices, the reward and how many commands have really run."""
        await sandbox.exec("echo 'clamp() {' >clamp.sh; echo begin >>trace", cwd="/tmp", step="begin", check=True)
        chosen = []
        for turn, options in enumerate(TURNS):
            choice = sample(self.state["policy"][turn], f"{self.seed} {key} {turn}")
            command = f"sleep {self.pause}; echo '{options[choice]}' >>clamp.sh; echo turn >>trace"
            await sandbox.exec(command, cwd="/tmp", step=f"turn-{turn}", check=True)
            chosen.append(choice)
        await sandbox.exec("echo 'echo \"$1\"; }' >>clamp.sh; echo end >>trace", cwd="/tmp", step="end", check=True)
        graded = await sandbox.exec(GRADE, cwd="/tmp", step="grade", check=True)
        ran = await sandbox.exec("wc -l <trace", cwd="/tmp", check=True)
        return chosen, int(graded.stdout) / len(CASES), int(ran.stdout)


async def control(image: str, seed: str, pause: float) -> None:
    """The controller's program. Its lease has the job's name, so that a second one takes up what the first one held."""
    async with libdsec.connect(lease=os.environ["DSEC_JOB"][-26:], lease_ttl=600) as dsec:
        await Controller(dsec, image, Path(HOME), seed, pause).run()


# ------------------------------------------------------------------ outside: whoever starts it, and whoever wants the result
async def begin(worker: libdsec.Sandbox, image: str, seed: str, pause: float) -> None:
    """Start the controller, which from then on needs nobody."""
    argv = ["python3", f"{HOME}/controller.py", "control", "--image", image, "--seed", seed, "--pause", str(pause)]
    async with worker.start(["/bin/sh", "-c", f'exec "$@" >>{HOME}/log 2>&1', "controller", *argv], stdin=False) as process:
        process.detach()


async def start(dsec: libdsec.Client, image: str, seed: str, pause: float) -> libdsec.Sandbox:
    """A worker with the controller running in it; it outlives this client."""
    worker = await dsec.create(image, toolkits=["libdsec"], worker=True, memory="160MiB", disk="64MiB", pids=128, idle_timeout=None)
    await worker.exec(f"mkdir -p {HOME}", check=True)
    await worker.files.write(f"{HOME}/controller.py", Path(__file__).read_bytes())
    await begin(worker, image, seed, pause)
    return worker


async def fetch(worker: libdsec.Sandbox, timeout: float = 600.0) -> dict[str, Any]:
    """The result, once it is there. Raises `DeadlineExceeded`."""
    async with asyncio.timeout(timeout):
        while not await worker.files.exists(f"{HOME}/result.json"):  # noqa: ASYNC110 - it is written inside
            await asyncio.sleep(0.2)
    found: dict[str, Any] = json.loads(await worker.files.read(f"{HOME}/result.json"))
    return found


def show(result: dict[str, Any]) -> None:
    for number, each in enumerate(result["rounds"]):
        rewards = " ".join(f"{reward:.2f}" for reward in each["rewards"])
        scores = " ".join(f"{score:+.2f}" for score in each["advantages"])
        print(f"round {number}: rewards {rewards}   advantages {scores}")
    best = " ".join("/".join(f"{p:.2f}" for p in probabilities(logits)) for logits in result["policy"])
    twice = sum(ran - 5 for each in result["rounds"] for ran in each["commands_run"])
    print(f"policy {best}; the controller was started {result['starts']} times, commands that ran twice: {twice}", flush=True)


async def demo(image: str, pause: float) -> int:
    """See the module. 0 where the result came whole and nothing ran twice."""
    import secrets
    import signal
    import tempfile

    from dsec import trees
    from dsec.actors.up import Cluster
    from dsec.layers.bootstrap import bootstrap_debian
    from dsec.layers.client import bootstrap_client
    from dsec.layers.store import LayerStore

    store = LayerStore(Path(__file__).resolve().parent.parent / ".cache/layers")
    await bootstrap_debian(store, progress=print)
    await bootstrap_client(store, progress=print)
    state = Path(tempfile.mkdtemp(prefix="dsec-rollout-"))
    overrides = {"layers": {"store_dir": str(store.root.absolute())}}
    try:
        async with Cluster(state, edges=(f"rollout-{secrets.token_hex(3)}",), overrides=overrides) as cluster:
            command = [sys.executable, "-m", "examples.rollout_worker", "start", "--image", image, "--pause", str(pause), "--stay"]
            client = await asyncio.create_subprocess_exec(*command, stdout=-1, env={**os.environ, "DSEC_URL": cluster.url})
            assert client.stdout is not None
            worker_id = (await client.stdout.readline()).decode().strip()
            client.send_signal(signal.SIGKILL)
            await client.wait()
            print(f"worker {worker_id}; the client that started it was killed", flush=True)
            async with libdsec.connect(cluster.url) as dsec:
                worker = await dsec.attach(worker_id)
                while len(await dsec.list(labels={"dsec.job": worker_id})) <= GROUP:  # noqa: ASYNC110 - it is done inside
                    await asyncio.sleep(0.1)
                await asyncio.sleep(1.5 * pause)
                await worker.exec("kill -9 $(grep -l controller.py /proc/[0-9]*/cmdline | grep -o '[0-9]*' | grep -vx $$)", check=False)
                print("the controller was killed and started again", flush=True)
                await begin(worker, image, "0", pause)
                result = await fetch(worker)
                show(result)
                await worker.stop()
        return 0 if len(result["rounds"]) == ROUNDS and all(ran == 5 for each in result["rounds"] for ran in each["commands_run"]) else 1
    finally:
        await asyncio.to_thread(trees.clear, state)


async def run(options: argparse.Namespace) -> int:
    if options.command == "control":
        await control(options.image, options.seed, options.pause)
        return 0
    if options.command == "demo":
        return await demo(options.image, options.pause)
    async with libdsec.connect() as dsec:
        if options.command == "start":
            print((await start(dsec, options.image, options.seed, options.pause)).id, flush=True)
            await asyncio.sleep(3600 if options.stay else 0)
        else:
            worker = await dsec.attach(options.id)
            if options.command == "resume":
                await begin(worker, options.image, options.seed, options.pause)
            else:
                show(await fetch(worker))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.rollout_worker", description="a group of rollouts, controlled from inside")
    parser.add_argument("command", choices=["demo", "start", "resume", "fetch", "control"])
    parser.add_argument("id", nargs="?", default="", help="of the worker, for resume and fetch")
    parser.add_argument("--image", default="debian-12", help="with Python, for the worker and its rollouts")
    parser.add_argument("--seed", default="0", help="all choices follow from it")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds that a turn takes")
    parser.add_argument("--stay", action="store_true", help="start: stay connected")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
