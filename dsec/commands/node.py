"""Commands of a node: up, serve, doctor, inspect. What they need beyond the light client is imported when they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from dsec.commands.common import Settings, common, emit, run
from dsec.commands.layer_common import stored
from dsec.commands.run import make_spec, spec_options


def needs_node(work: Callable[[], Any]) -> Any:
    """Run it; where the packages of a node are missing, say which and how to get them."""
    from dsec.errors import Unsupported

    try:
        return work()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("dsec", "libdsec"):
            raise
        raise Unsupported(f"the package {error.name} is missing", reason="packages", fix="pip install 'dsec[node]'") from error


@click.command("up")
@click.option("--config", default=None, metavar="FILE", help="Configuration file. [env: DSEC_CONFIG]")
@click.option("--state-dir", default=None, metavar="DIR", help="Where everything is kept. [default: edge.state_dir]")
@click.option("--backend", multiple=True, help="Backend of the node. [default: edge.backends]")
@click.option("--name", default=None, help="Name of the node. [default: edge.name, or n1]")
@click.option("--port", default=None, type=click.IntRange(0, 65_535), help="Of nats-server; 0 = any. [default: up.nats_port]")
@click.option("--schedulers", default=None, type=click.IntRange(1, 64), help="How many. [default: up.schedulers]")
@click.option("--ready-file", default="", metavar="FILE", help="Written when it serves, with the same line as on standard output.")
@common
def up_command(
    settings: Settings,
    config: str | None,
    state_dir: str | None,
    backend: tuple[str, ...],
    name: str | None,
    port: int | None,
    schedulers: int | None,
    ready_file: str,
) -> int:
    """nats-server, Watcher, Scheduler and Edge on this machine, until Ctrl+C or SIGTERM, which also ends all sandboxes.

    Prints one JSON line when it serves: {"ready": "up", "url": …}.
    """
    from dsec.config import load, parse

    def tables() -> Any:
        import msgspec

        made: dict[str, dict[str, Any]] = msgspec.to_builtins(load(config))
        edge = {"state_dir": state_dir and os.path.abspath(state_dir), "backends": list(backend) or None, "name": name}
        made["edge"] |= {key: value for key, value in edge.items() if value is not None}
        made["up"] |= {key: value for key, value in {"nats_port": port, "schedulers": schedulers}.items() if value is not None}
        if settings.verbose:
            made["log"]["level"] = "debug"
        return parse(made)

    chosen = tables()

    def work() -> int:
        from dsec.actors.run import setup_log
        from dsec.actors.up import up
        from dsec.bus import bus

        setup_log(chosen)
        code: int = bus.run(up(chosen, ready_file=ready_file))
        return code

    return int(needs_node(work))


@click.command("serve")
@click.argument("actor", type=click.Choice(["scheduler", "watcher", "edge"]))
@click.option("--config", default=None, metavar="FILE", help="Configuration file. [env: DSEC_CONFIG]")
@common
def serve_command(settings: Settings, actor: str, config: str | None) -> int:
    """Run one actor until SIGTERM. Prints one JSON line when it serves."""
    from dsec.config import load, parse

    chosen = load(config)
    if settings.url:
        import msgspec

        made: dict[str, dict[str, Any]] = msgspec.to_builtins(chosen)
        made["bus"]["url"] = settings.url
        chosen = parse(made)

    def work() -> int:
        from dsec.actors.run import run_actor

        return run_actor(actor, chosen)

    return int(needs_node(work))


@click.command("doctor")
@common
def doctor_command(settings: Settings) -> int:
    """What this machine can do, what it lacks and what that costs. Exit code 1 where no node can run here.

    Of each Edge that `dsec up` runs here, and of that of DSEC_CONFIG, also how many launches found parts made ahead.
    """
    import msgspec

    from dsec import config, doctor
    from dsec.commands import running

    config.check_features(os.environ)
    report = msgspec.structs.replace(doctor.diagnose(), running=run(running.here()))
    click.echo(report.json() if settings.json else report.table())
    return 0 if all(report.get(name).status != "missing" for name in ("root", "cgroup", "oci", "seccomp")) else 1


@click.command("inspect")
@click.argument("target", metavar="ID|IMAGE")
@spec_options
@click.option("--plan", is_flag=True, help="Print the launch plan of a sandbox of IMAGE with these options; nothing is made.")
@stored
@common
def inspect_command(settings: Settings, target: str, plan: bool, config: str | None, store: str | None, **given: Any) -> None:
    """All about the sandbox ID, as JSON; with --plan what a sandbox of IMAGE would be on this node."""
    if plan:
        emit(needs_node(lambda: run(plan_of(target, given, config, store))))
        return

    async def work() -> Any:
        from dsec.bus.messages import Empty, InfoReply
        from dsec.model import SandboxId

        sid = SandboxId.parse(target)
        async with settings.connect() as client:
            return (await client._request(sid, "info", Empty(), InfoReply)).info

    emit(run(work()))


async def plan_of(image: str, given: dict[str, Any], config: str | None, directory: str | None = None) -> Any:
    """The LaunchPlan that this node would hand to its backend."""
    from dsec.backends.disk import Disks
    from dsec.backends.plan import Node, make_plan
    from dsec.commands.local import layers_directory, node_config
    from dsec.config import load
    from dsec.layers import stack
    from dsec.layers.store import LayerStore
    from dsec.model import LayerRef, SandboxId, new_ulid

    spec = make_spec(image, given)
    loaded = load(config) if directory else node_config(config)  # whose store is named need not say which of several nodes is meant
    edge = loaded.edge.name or "here"
    room = loaded.container
    modes = ("tmpfs", "dir") if spec.backend == "fake" else Disks.seen(loaded.edge.state_dir, room.disk, room.disk_store_bytes).modes
    node = Node(
        edge=edge, state_dir=loaded.edge.state_dir, cgroup_root=room.cgroup_root or "dsec", backends=(spec.backend,), disk_modes=modes
    )
    if spec.backend == "fake":
        refs: tuple[LayerRef, ...] = tuple(LayerRef(name=name, digest="sha256:" + "0" * 64) for _, _, name in stack.names(spec))
        configs = []
    else:
        store = LayerStore(directory or layers_directory(loaded))
        refs = stack.build(spec, store.lookup).lowers
        configs = [await store.config(ref.digest) for ref in refs]
    return make_plan(spec, id=SandboxId(edge, new_ulid()), slot=0, refs=refs, node=node, layer_configs=configs)
