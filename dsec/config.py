"""Configuration: strict TOML -> frozen Structs, one per room, with ``DSEC_<ROOM>__<KEY>`` overrides from the environment.

Order of precedence: environment, file, defaults. An unknown key is an `InvalidRequest` that names its path and the nearest key.
Every key is documented once, in its `Meta(description=…)`; config/dsec.toml is rendered from them and a test keeps it so.
Times are milliseconds, sizes bytes; 0 means "decide from the node" wherever the description says so.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from dsec import syscalls
from dsec.errors import InvalidRequest, Unsupported
from dsec.model import GIB, check_edge_name

ENV_FILE = "DSEC_CONFIG"
ENV_PREFIX = "DSEC_"


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all rooms of the configuration."""


class BusConfig(Room, frozen=True):
    url: Annotated[str, Meta(description="NATS server(s), separated by commas")] = "nats://127.0.0.1:4222"
    scale_unit: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,32}$", description="scale unit: the <u> of every subject")] = "main"
    creds: Annotated[str, Meta(description="file with NATS credentials; empty = none")] = ""
    signing_key: Annotated[
        str, Meta(description="file with the seed of the NATS account's key that Edges sign workers' credentials with; empty = none")
    ] = ""
    signing_account: Annotated[str, Meta(description="that account (A…) where the key is a signing key of it; empty = the key's own")] = ""
    connect_timeout_ms: Annotated[int, Meta(ge=100, description="how long a first connection may take")] = 5_000
    ping_ms: Annotated[
        int, Meta(ge=20, le=60_000, description="period of pings of the actors; three unanswered ones are a dead connection")
    ] = 5_000
    events_max_age_ms: Annotated[int, Meta(ge=60_000, description="age bound of the stream DSEC_EVENTS")] = 604_800_000
    events_max_bytes: Annotated[int, Meta(ge=1 << 20, description="size bound of the stream DSEC_EVENTS")] = GIB
    events_replicas: Annotated[int, Meta(ge=1, le=5, description="replicas of DSEC_EVENTS and of the KV buckets; 3 in a NATS cluster")] = 1
    spool_max_bytes: Annotated[int, Meta(ge=1 << 16, description="bound of the Edge's spool of events while JetStream is away")] = 64 << 20


class SchedulerConfig(Room, frozen=True):
    name: Annotated[str, Meta(description="name of this instance; empty = made up at start")] = ""
    power_of_k: Annotated[int, Meta(ge=1, le=16, description="nodes sampled for each sandbox; the least loaded is taken")] = 2
    view_max_age_ms: Annotated[int, Meta(ge=1_000, description="heartbeats older than this are not placed upon")] = 5_000
    launch_timeout_ms: Annotated[int, Meta(ge=100, description="how long an Edge may take to accept or refuse a batch")] = 5_000
    retry_ms: Annotated[int, Meta(ge=1, description="first pause before refused sandboxes are placed again; doubles, with jitter")] = 50
    retry_max_ms: Annotated[int, Meta(ge=1, description="longest such pause")] = 2_000
    slice_bytes: Annotated[int, Meta(ge=4_096, le=900_000, description="largest batch sent to one Edge")] = 400_000
    remember_ms: Annotated[int, Meta(ge=1_000, description="how long a burst's slices are recognised as already taken")] = 600_000
    pending_bytes: Annotated[int, Meta(ge=1 << 20, description="memory for what is being placed; beyond it creates are refused")] = 64 << 20
    remember_bytes: Annotated[int, Meta(ge=1 << 20, description="memory for settled slices; beyond it the oldest go")] = 128 << 20


class WatcherConfig(Room, frozen=True):
    name: Annotated[str, Meta(description="name of this instance; empty = made up at start")] = ""
    publish_ms: Annotated[int, Meta(ge=20, le=5_000, description="period of the cluster view; changes of membership go out at once")] = 300
    lost_after_ms: Annotated[int, Meta(ge=1_000, description="silence after which a node is fenced and declared lost")] = 30_000
    vanish_share: Annotated[float, Meta(gt=0, le=1, description="when more than this share of nodes is silent, none is lost")] = 0.3
    forget_ms: Annotated[int, Meta(ge=1_000, description="how long a lost node is still named in the view")] = 3_600_000


class EdgeConfig(Room, frozen=True):
    name: Annotated[str, Meta(description="name of this node (a-z 0-9 -); empty = from the host name")] = ""
    state_dir: Annotated[str, Meta(description="records, event spool and sandbox directories of this Edge")] = "/var/lib/dsec"
    backends: Annotated[tuple[str, ...], Meta(description="backends that this node offers: container, docker, fake")] = ("container",)
    labels: Annotated[dict[str, str], Meta(description="labels that a spec's node_labels select")] = {}
    devices: Annotated[tuple[str, ...], Meta(description="devices that this node offers")] = ()
    slots: Annotated[int, Meta(ge=1, le=1_000_000, description="sandboxes at most, paused ones not counted")] = 4_000
    memory: Annotated[int, Meta(ge=0, description="memory for sandboxes; 0 = what the node has less memory_reserve")] = 0
    memory_reserve: Annotated[int, Meta(ge=0, description="kept for the Edge, the holder and the page cache")] = GIB
    memory_overcommit: Annotated[float, Meta(gt=0, le=64, description="memory limits admitted per byte of memory")] = 4.0
    cpus: Annotated[float, Meta(ge=0, description="cores for sandboxes; 0 = what the node has")] = 0.0
    cpu_overcommit: Annotated[float, Meta(gt=0, le=1_000, description="cpu shares admitted per core")] = 128.0
    pids: Annotated[int, Meta(ge=0, description="processes expected at most; 0 = pid_max - 4096")] = 0
    pids_overcommit: Annotated[float, Meta(gt=0, le=1_000, description="process limits admitted per expected process")] = 16.0
    disk: Annotated[int, Meta(ge=0, description="disk for what sandboxes write; 0 = the size of where it lies, unless that is memory")] = 0
    disk_overcommit: Annotated[float, Meta(gt=0, le=1_000, description="disk limits admitted per byte of disk")] = 16.0
    starting_max: Annotated[int, Meta(ge=0, le=1_000, description="sandboxes launched at one time; 0 = 2 a core, 4 to 8")] = 0
    queue_max: Annotated[int, Meta(ge=1, description="accepted sandboxes that may wait for their launch")] = 20_000
    heartbeat_ms: Annotated[int, Meta(ge=20, description="period of heartbeats")] = 1_000
    sweep_ms: Annotated[int, Meta(ge=10, description="period of the one timer that looks at idle, lease and deadline clocks")] = 1_000
    coalesce_ms: Annotated[int, Meta(ge=0, le=100, description="how long news of a burst wait for more of the same")] = 5
    unclaimed_ms: Annotated[int, Meta(ge=100, description="a sandbox of a lease that the lease never names is reaped after this")] = 60_000
    stopped_retention_ms: Annotated[int, Meta(ge=0, description="how long the end of a sandbox is remembered")] = 3_600_000
    paused_ttl_ms: Annotated[int, Meta(ge=0, description="a sandbox paused for longer is stopped; 0 = never")] = 604_800_000
    on_shutdown: Annotated[str, Meta(pattern="^(keep|stop)$", description="what SIGTERM does to sandboxes: keep | stop")] = "keep"
    orphan_grace_ms: Annotated[
        int, Meta(ge=0, description="without an Edge for so long, a node's sandboxes are ended and freed; 0 = they live on")
    ] = 3_600_000
    stop_parallel: Annotated[int, Meta(ge=1, le=1_000, description="sandboxes stopped at one time")] = 16


class FakeConfig(Room, frozen=True):
    launch_ms: Annotated[float, Meta(ge=0, description="how long a launch of the fake backend takes")] = 0.0
    launch_fail_rate: Annotated[float, Meta(ge=0, le=1, description="share of its launches that fail")] = 0.0


class ContainerConfig(Room, frozen=True):
    driver: Annotated[
        str,
        Meta(
            pattern="^(native|crun|runc)$",
            description="what starts containers: native = the project's launcher (where the kernel cannot: runtime) | crun | runc",
        ),
    ] = "native"
    runtime: Annotated[str, Meta(description="OCI runtime where the driver is one, or must be: auto | crun | runc, or a path")] = "auto"
    cgroup_root: Annotated[str, Meta(description="group below which sandboxes live; empty = dsec")] = ""
    userns: Annotated[bool, Meta(description="user namespaces for all sandboxes")] = True
    disk: Annotated[
        str,
        Meta(
            pattern="^(auto|quota|btrfs|tmpfs|loop)$",
            description="writable layers, unless a sandbox asks: auto = the first that is there of quota, btrfs, tmpfs (memory), loop",
        ),
    ] = "auto"
    disk_store_bytes: Annotated[
        int, Meta(ge=0, description="sparse btrfs file in edge.state_dir for writable layers where the node has no quota; 0 = none")
    ] = 0


class DockerConfig(Room, frozen=True):
    host: Annotated[str, Meta(description="the daemon's socket, unix:///path")] = "unix:///var/run/docker.sock"
    runtime: Annotated[str, Meta(description="name under which `dockerd --add-runtime` knows DSec's wrapper")] = "dsec"


class PauseConfig(Room, frozen=True):
    swap: Annotated[
        str,
        Meta(
            pattern="^(off|node|zram|file)$",
            description="where paused memory goes: off = it stays, node = what the machine swaps to, zram | file = swap of the Edge's own",
        ),
    ] = "node"
    swap_bytes: Annotated[int, Meta(ge=0, description="size of that zram device or file; 0 = as the node's memory")] = 0
    swap_file: Annotated[str, Meta(description="that file; empty = <edge.state_dir>/swap")] = ""
    prefetch: Annotated[bool, Meta(description="a resumed sandbox's memory is read back behind it; false = as it is touched")] = True
    parallel: Annotated[int, Meta(ge=0, le=1_000, description="threads that send memory to swap; 0 = one a core")] = 0
    quiesce_ms: Annotated[int, Meta(ge=0, le=60_000, description="how long a pause waits for requests that are being answered")] = 1_000


class NetworkConfig(Room, frozen=True):
    ipv4_range: Annotated[str, Meta(description="private addresses of open sandboxes; each Edge takes a free block")] = "10.208.0.0/12"
    ipv4_block: Annotated[int, Meta(ge=8, le=29, description="prefix length of an Edge's block; /18 has room for 16,381 sandboxes")] = 18
    ipv6: Annotated[bool, Meta(description="IPv6 for open sandboxes, where the node forwards it")] = True
    ipv6_prefix: Annotated[str, Meta(description="a /64 for open sandboxes; empty = a unique local one made from the Edge's name")] = ""
    deny: Annotated[tuple[str, ...], Meta(description="networks that no sandbox reaches, beside node, sandboxes, metadata and bus")] = ()
    upstreams: Annotated[tuple[str, ...], Meta(description="resolvers, ADDRESS or ADDRESS@PORT; empty = those of /etc/resolv.conf")] = ()
    connections: Annotated[int, Meta(ge=1, le=1_000_000, description="connections of a sandbox at one time")] = 4_096
    mtu: Annotated[int, Meta(ge=0, le=65_535, description="MTU of sandboxes' interfaces; 0 = that of the node's way out")] = 0


class LayersConfig(Room, frozen=True):
    store_dir: Annotated[str, Meta(description="layer store of this node; empty = <edge.state_dir>/layers")] = ""
    remote: Annotated[
        str, Meta(description="store that nodes share: a directory, s3://bucket/prefix or https://host/prefix; empty = none")
    ] = ""
    registries: Annotated[
        tuple[str, ...],
        Meta(description='registries that sandboxes may name images of ("python:3.12"), pulled when absent; "*" = any, [] = no pulls'),
    ] = ("docker.io", "ghcr.io", "quay.io", "gcr.io", "mcr.microsoft.com", "public.ecr.aws", "registry.k8s.io")
    on_demand: Annotated[
        bool, Meta(description="fill layers of the remote store, and eStargz images, as they are read, where the kernel can")
    ] = True
    patience_ms: Annotated[
        int, Meta(ge=100, le=600_000, description="how long a reader waits for a remote store that does not answer; then EIO")
    ] = 10_000
    cache_bytes: Annotated[int, Meta(ge=0, description="disk for layers of the remote store; unused ones are evicted; 0 = no limit")] = 0


class UpConfig(Room, frozen=True):
    nats_port: Annotated[int, Meta(ge=0, le=65_535, description="port of the embedded nats-server; 0 = any free one")] = 4222
    schedulers: Annotated[int, Meta(ge=1, le=64, description="Scheduler instances that `dsec up` starts")] = 1


class LogConfig(Room, frozen=True):
    level: Annotated[str, Meta(pattern="^(debug|info|warning|error)$", description="debug | info | warning | error")] = "info"
    json: Annotated[bool, Meta(description="one JSON object a line instead of text")] = False


class Config(Room, frozen=True):
    """The whole configuration, as `load` returns it."""

    bus: BusConfig = BusConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    watcher: WatcherConfig = WatcherConfig()
    edge: EdgeConfig = EdgeConfig()
    fake: FakeConfig = FakeConfig()
    container: ContainerConfig = ContainerConfig()
    docker: DockerConfig = DockerConfig()
    pause: PauseConfig = PauseConfig()
    network: NetworkConfig = NetworkConfig()
    layers: LayersConfig = LayersConfig()
    up: UpConfig = UpConfig()
    log: LogConfig = LogConfig()


def check_features(environ: Mapping[str, str]) -> None:
    """Raises `InvalidRequest` where ``DSEC_DISABLE`` names what is no feature: what it was meant to hide would stay in use."""
    if unknown := syscalls.not_features(environ.get("DSEC_DISABLE", "")):
        fix = f"use {', '.join(sorted(syscalls.FEATURES))}"
        raise InvalidRequest("names no feature that can be hidden", field="DSEC_DISABLE", value=", ".join(unknown), fix=fix)


def check_root(config: EdgeConfig) -> None:
    """Raises `Unsupported` where this process may not make containers; what the fake backend makes needs no root."""
    if "container" in config.backends and os.geteuid() != 0:
        raise Unsupported(
            "a node with containers needs root", field="edge.backends", value="container", reason="not root",
            fix="run as root; `dsec doctor` tells what else a node needs, and clients need none of it",
        )  # fmt: skip


def rooms() -> dict[str, type[Room]]:
    """Room name -> its Struct, in the order of the file."""
    hints = get_type_hints(Config)
    return {name: hints[name] for name in Config.__struct_fields__}


def edge_name(config: Config) -> str:
    """The configured name, or the host's as far as it is usable."""
    if config.edge.name:
        return check_edge_name(config.edge.name)
    host = socket.gethostname().split(".")[0].lower()
    made = "".join(c if c.isascii() and c.isalnum() else "-" for c in host).strip("-")[:40].strip("-")
    return check_edge_name(made or "node")


def load(path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read a configuration.

    Args:
        path: a TOML file; None = the file that ``DSEC_CONFIG`` names, or only defaults.
        environ: where overrides are taken from; None = `os.environ`.

    Raises:
        InvalidRequest: an unreadable file, an unknown key, a value of the wrong type or out of range.
    """
    env = os.environ if environ is None else environ
    chosen = path or env.get(ENV_FILE) or None
    data: dict[str, Any] = {}
    if chosen is not None:
        try:
            data = tomllib.loads(Path(chosen).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(f"cannot read the configuration: {error.strerror}", field="config", value=str(chosen)) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"not TOML: {error}", field="config", value=str(chosen)) from error
    return parse(data, env)


def parse(data: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """The configuration in ``data`` (tables by room) with overrides from ``environ``; errors as in `load`."""
    known = rooms()
    merged: dict[str, Any] = {}
    check_features(environ or {})
    for room, table in data.items():
        _known(room, known, "")
        if not isinstance(table, dict):
            raise InvalidRequest("must be a table", field=room, value=table, fix=f"write [{room}]")
        for key in table:
            _known(key, known[room].__struct_fields__, room)
        merged[room] = dict(table)
    for name, text in (environ or {}).items():
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        room, _, key = name[len(ENV_PREFIX) :].lower().partition("__")
        _known(room, known, "", name)
        _known(key, known[room].__struct_fields__, room, name)
        merged.setdefault(room, {})[key] = _from_text(known[room], key, text)
    try:
        return msgspec.convert(merged, Config)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$.")
        room, _, key = field.partition("[")[0].partition(".")
        given = merged.get(room, {}).get(key)
        default = getattr(known[room](), key, None) if room in known else None
        fix = "" if default is None else f"the default is {_toml(default)}"
        raise InvalidRequest(what[:1].lower() + what[1:], field=field, value=given, fix=fix) from error


def _known(key: str, allowed: Any, room: str, given: str = "") -> None:
    if key in allowed:
        return
    near = difflib.get_close_matches(key, list(allowed), n=3)
    fix = f"did you mean {' or '.join(near)}" if near else f"known here: {', '.join(allowed)}"
    path = f"{room}.{key}" if room else key
    raise InvalidRequest("unknown key in the configuration", field=path, value=given, fix=fix)


def _from_text(room: type[Room], key: str, text: str) -> Any:
    """A value of the environment: TOML where it is TOML, else the text itself; keys of type str always take the text."""
    default = getattr(room(), key)
    if isinstance(default, str):
        return text
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        if isinstance(default, tuple):
            return [part.strip() for part in text.split(",") if part.strip()]
        return text


def render() -> str:
    """config/dsec.toml: every key, its default, one line of comment."""
    lines = [
        "# Every key of DSec's configuration with its default. Times are milliseconds, sizes bytes.",
        "# DSEC_<ROOM>__<KEY>=value in the environment overrides a key, e.g. DSEC_EDGE__SLOTS=100.",
    ]
    for room, struct in rooms().items():
        lines += ["", f"[{room}]"]
        defaults = struct()
        for key, hint in get_type_hints(struct, include_extras=True).items():
            note = next((m.description for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta) and m.description), "")
            lines += [f"# {note}", f"{key} = {_toml(getattr(defaults, key))}"]
    return "\n".join(lines) + "\n"


def dump(config: Config) -> str:
    """A configuration as TOML, for a child process; `parse` reads it back to an equal one."""
    lines: list[str] = []
    for room, table in msgspec.to_builtins(config).items():
        lines += [f"[{room}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)
