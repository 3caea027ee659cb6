"""From keywords to a checked `SandboxSpec`. Pure: everything is refused here, by field, before anything is sent."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

from dsec.errors import InvalidRequest
from dsec.model import GIB, MIB, ExecSpec, LayerRef, NetworkPolicy, Qos, Resources, SandboxId, SandboxSpec, Worker, check_project

ARG_LIMIT = 128 * 1024 - 1  # MAX_ARG_STRLEN of Linux, less the closing NUL: one string of argv or env
COMMAND_LIMIT = 768 * 1024  # argv and env together: below NATS' 1 MiB payload and the kernel's own limit

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {f"{unit}ib": factor for unit, factor in _UNITS.items() if unit in "kmgt" and unit}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]{0,3})\s*")
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENV_NAME = re.compile(r"[^=\0]+")
_KEY_FIX = {_LABEL_KEY: "use letters, digits and inner . _ - /", _ENV_NAME: "a variable's name holds no ="}
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?")


# What E2B, Modal and Docker call it, and what it is called here.
ALIASES = {
    "cpu": "cpus", "cpu_count": "cpus", "mem": "memory", "mem_limit": "memory", "memory_limit": "memory", "memory_mb": "memory",
    "disk_size": "disk", "pids_limit": "pids", "envs": "env", "env_vars": "env", "environment": "env", "cwd": "workdir",
    "working_dir": "workdir", "metadata": "labels", "tags": "labels", "toolkit": "toolkits", "workspaces": "workspace",
    "network_mode": "network", "internet": "network", "allow_internet_access": "network", "block_network": "network", "gpu": "devices",
    "gpus": "devices", "runtime": "backend", "lifetime": "ttl", "max_lifetime": "ttl",
}  # fmt: skip


class Options(TypedDict, total=False):
    """The keywords of `Client.sandbox`, `Client.create` and `spec`. Sizes are bytes or texts like ``"2GiB"``, times are seconds."""

    workspace: str | LayerRef | Iterable[str | LayerRef] | None
    toolkits: str | LayerRef | Iterable[str | LayerRef]
    backend: str
    arch: Literal["", "x86_64", "aarch64"]
    cpus: float
    memory: int | str
    disk: int | str
    disk_mode: Literal["auto", "quota", "btrfs", "tmpfs", "loop", "dir"]
    inodes: int
    pids: int
    nofile: int
    fsize: int | str
    qos: Literal["be", "ls"]
    network: str | Iterable[str]
    env: Mapping[str, str]
    workdir: str | None
    user: str | None
    hostname: str
    labels: Mapping[str, str]
    devices: Iterable[str]
    node_labels: Mapping[str, str]
    isolation: Literal["shared", "user"]
    idle_timeout: float | None
    on_idle: Literal["pause", "stop"]
    on_client_loss: Literal["stop", "pause", "keep"]
    ttl: float | None
    exec_timeout: float | None
    best_effort: bool
    worker: bool | Worker
    ends_with: str


def wrong(message: str, field: str, value: object = "", fix: str = "") -> InvalidRequest:
    return InvalidRequest(message, field=field, value=value, fix=fix)


def size(value: int | str, field: str = "size") -> int:
    """Bytes from an int, or from a text: ``512MiB``, ``2GiB``, ``512m`` (binary, as Docker reads it), ``10MB`` (decimal)."""
    fix = 'use bytes or a text such as "512MiB" or "2GiB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong("not a size", field, value, fix)
    if isinstance(value, int):
        number = value
    else:
        match = _SIZE.fullmatch(value)
        factor = _UNITS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise wrong("not a size", field, value, fix)
        number = int(float(match[1]) * factor)
    if not 0 <= number < 1 << 62:
        raise wrong("out of range", field, value, fix)
    return number


def milliseconds(value: float | None, field: str, *, none: int = 0) -> int:
    """Milliseconds from seconds; ``None`` becomes ``none``. Refuses negatives, NaN and infinity."""
    if value is None:
        return none
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise wrong("not a time", field, value, "use seconds as a number >= 0")
    return min(math.ceil(value * 1000), 1 << 52)


def text(value: object, field: str, *, limit: int = 4096, empty: bool = False) -> str:
    """A string that can stand in a kernel or wire name: no NUL, no surrogates, not longer than ``limit`` bytes."""
    if not isinstance(value, str):
        raise wrong(f"must be a string, not {type(value).__name__}", field, value)
    if not value and not empty:
        raise wrong("must not be empty", field)
    if "\0" in value:
        raise wrong("holds a NUL byte", field, value, "no path, name or argument in Linux can hold one")
    try:
        length = len(value.encode("utf-8", "surrogateescape"))
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise wrong("is not valid Unicode (it holds surrogates)", field, repr(value)) from None
    if length > limit:
        raise wrong(f"is {length} bytes long, more than {limit}", field, value)
    return value


def layer_name(value: object, field: str) -> str:
    """The name of a layer as a request may carry it; whether it exists is the node's to say. A `LayerRef` means its very content."""
    if isinstance(value, LayerRef):
        value = value.digest
    name = text(value, field, limit=512)
    if any(ch.isspace() or ord(ch) < 32 for ch in name):
        raise wrong("holds white space", field, name, "see `dsec layer ls` for the names there are")
    if name.startswith(("/", "-", ".")) or ".." in name.split("/"):
        raise wrong("is not a layer's name", field, name, "use a name from `dsec layer ls`; import a directory with `dsec layer import`")
    return name


def several(value: object, field: str, fix: str) -> list[Any]:
    """The items of a list; anything that is none is refused by name instead of with Python's own words."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise wrong(f"is not a list but {type(value).__name__}", field, repr(value), fix)
    return list(value)


def names(value: str | LayerRef | Iterable[str | LayerRef] | None, field: str) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    items = [value] if isinstance(value, str | LayerRef) else several(value, field, "give a layer's name, or a list of them")
    if len(items) > 100:
        raise wrong(f"names {len(items)} layers, more than 100", field)
    return tuple(layer_name(item, f"{field}[{at}]" if len(items) > 1 else field) for at, item in enumerate(items))


def str_map(value: Mapping[str, str] | None, field: str, *, keys: re.Pattern[str], limit: int, value_limit: int) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong("must be a mapping of strings", field, value)
    if len(value) > limit:
        raise wrong(f"holds {len(value)} entries, more than {limit}", field)
    result = {}
    for key, item in value.items():
        name = text(key, f"{field} key", limit=512)
        if not keys.fullmatch(name):
            raise wrong("is not a usable name", f"{field} key", name, _KEY_FIX[keys])
        result[name] = text(item, f"{field}.{name}", limit=value_limit, empty=True)
    return result


def env_map(value: Mapping[str, str] | None, field: str = "env") -> dict[str, str]:
    return str_map(value, field, keys=_ENV_NAME, limit=4096, value_limit=ARG_LIMIT)


def labels_map(value: Mapping[str, str] | None, field: str = "labels") -> dict[str, str]:
    return str_map(value, field, keys=_LABEL_KEY, limit=64, value_limit=256)


def choice(value: object, field: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise wrong("is none of the choices", field, value, f"use one of {', '.join(allowed)}")
    return value


def number(value: object, field: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"must be a number, not {type(value).__name__}", field, value, f"use a number from {low:g} to {high:g}")
    if not math.isfinite(value) or not low <= value <= high:
        raise wrong("is out of range", field, value, f"use a number from {low:g} to {high:g}")
    return float(value)


def whole(value: object, field: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(f"must be a whole number, not {type(value).__name__}", field, value, f"use a whole number from {low} to {high}")
    if not low <= value <= high:
        raise wrong("is out of range", field, value, f"use a whole number from {low} to {high}")
    return value


def bounded(value: int | str, field: str, low: int, shown: str) -> int:
    result = size(value, field)
    if result < low:
        raise wrong(f"is less than {shown}", field, value, f"use at least {shown}")
    return result


def user_name(value: str | None, field: str = "user") -> str:
    if value is None or value == "":
        return ""
    if not _USER.fullmatch(text(value, field, limit=65)):
        raise wrong("is not a user", field, value, 'use a name or uid, with ":group" if need be')
    return value


def directory(value: str | None, field: str = "workdir") -> str:
    if value is None or value == "":
        return ""
    if not text(value, field).startswith("/"):
        raise wrong("is not an absolute path", field, value, "begin it with /")
    return value


def network_policy(value: str | Iterable[str]) -> NetworkPolicy:
    if isinstance(value, str):
        return NetworkPolicy(mode=choice(value, "network", ("none", "open")))
    rules = tuple(text(rule, f"network[{at}]", limit=512) for at, rule in enumerate(several(value, "network", 'use "none" or "open"')))
    return NetworkPolicy(mode="rules", rules=rules) if rules else NetworkPolicy()


def worker_limits(value: bool | Worker) -> Worker | None:
    if value is False:
        return None
    if value is True:
        return Worker()
    if not isinstance(value, Worker):
        raise wrong("is not a worker's description", "worker", value, "use True or libdsec.Worker(…)")
    if value.project:
        check_project(value.project)
    for mode in several(value.networks, "worker.networks", 'use ("none",) or ("none", "open")'):
        choice(mode, "worker.networks", ("none", "open"))
    choice(value.on_end, "worker.on_end", ("stop", "keep"))
    return value


def option_meant(name: str) -> str:
    """The fix for an option that there is not: the likely one, or all of them."""
    known = sorted([*Options.__annotations__, "timeout"])  # the latter is of the calls that make sandboxes, not of what they make
    near = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"


def spec(image: str, **options: Unpack[Options]) -> SandboxSpec:
    """A checked `SandboxSpec`, for `Client.burst` and to keep. Same keywords and defaults as `Client.sandbox`.

    Raises `InvalidRequest` with ``field``, ``value`` and ``fix`` for the first thing that is wrong.
    """
    given: dict[str, Any] = dict(options)
    unknown = sorted(set(given) - set(Options.__annotations__))
    if unknown:
        raise wrong("is not an option of a sandbox", unknown[0], "", option_meant(unknown[0]))
    get = given.get
    resources = Resources(
        cpus=number(get("cpus", 1), "cpus", 0.01, 1024),
        memory=bounded(get("memory", 512 * MIB), "memory", 16 * MIB, "16MiB"),
        disk=bounded(get("disk", GIB), "disk", MIB, "1MiB"),
        inodes=whole(get("inodes", 262_144), "inodes", 64, 1 << 32),
        pids=whole(get("pids", 256), "pids", 4, 1_000_000),
        nofile=whole(get("nofile", 0), "nofile", 0, 1 << 20),
        fsize=size(get("fsize", 0), "fsize"),
    )
    hostname = get("hostname", "")
    if hostname and not _NAME.fullmatch(text(hostname, "hostname", limit=64)):
        raise wrong("is not a host name", "hostname", hostname, "use letters, digits and inner . _ -, 64 at most")
    if not isinstance(get("best_effort", False), bool):
        raise wrong("must be True or False", "best_effort", get("best_effort"))
    result = SandboxSpec(
        image=layer_name(image, "image"),
        workspaces=names(get("workspace"), "workspace"),
        toolkits=names(get("toolkits", ()), "toolkits"),
        backend=text(get("backend", "container"), "backend", limit=64),
        arch=choice(get("arch", ""), "arch", ("", "x86_64", "aarch64")),
        resources=resources,
        disk_mode=choice(get("disk_mode", "auto"), "disk_mode", ("auto", "quota", "btrfs", "tmpfs", "loop", "dir")),
        qos=Qos(choice(get("qos", "be"), "qos", ("be", "ls"))),
        env=env_map(get("env")),
        workdir=directory(get("workdir")),
        user=user_name(get("user")),
        hostname=hostname,
        labels=labels_map(get("labels")),
        devices=tuple(text(device, "devices", limit=256) for device in several(get("devices", ()), "devices", "give a list")),
        node_labels=labels_map(get("node_labels"), "node_labels"),
        isolation=choice(get("isolation", "shared"), "isolation", ("shared", "user")),
        network=network_policy(get("network", "none")),
        idle_timeout_ms=milliseconds(get("idle_timeout", 1800), "idle_timeout"),
        on_idle=choice(get("on_idle", "pause"), "on_idle", ("pause", "stop")),
        on_client_loss=choice(get("on_client_loss", "stop"), "on_client_loss", ("stop", "pause", "keep")),
        ttl_ms=milliseconds(get("ttl"), "ttl"),
        exec_timeout_ms=milliseconds(get("exec_timeout", 600), "exec_timeout"),
        best_effort=get("best_effort", False),
        worker=worker_limits(get("worker", False)),
        ends_with=str(SandboxId.parse(text(get("ends_with"), "ends_with"))) if get("ends_with") else "",
    )
    if sum(len(key) + len(value) for key, value in result.env.items()) > 256 * 1024:
        raise wrong("is more than 256 KiB in all", "env", "", "put large values into a file with files.write")
    return result


def argv(cmd: str | Iterable[str], field: str = "cmd") -> tuple[str, ...]:
    """``str`` becomes ``/bin/sh -c``, a list is the argv itself. Refuses NUL bytes and what execve would refuse as too long."""
    if isinstance(cmd, str):
        parts: tuple[object, ...] = ("/bin/sh", "-c", cmd)
    elif isinstance(cmd, bytes | bytearray):
        raise wrong("must be a string or a list of strings, not bytes", field, bytes(cmd[:80]))
    else:
        parts = tuple(several(cmd, field, "give a shell command as a string, or argv as a list"))
    if not parts:
        raise wrong("is an empty list", field, "", "name a program")
    fix = "write it to a file with files.write and run that"
    total = 0
    for at, part in enumerate(parts):
        where = field if isinstance(cmd, str) else f"{field}[{at}]"
        checked = text(part, where, limit=1 << 40, empty=at > 0)
        length = len(checked.encode())
        total += length + 1
        if length > ARG_LIMIT:
            raise wrong(f"is {length} bytes long; Linux takes {ARG_LIMIT} bytes in one argument", where, checked, fix)
    if total > COMMAND_LIMIT:
        raise wrong(f"is {total} bytes long, more than {COMMAND_LIMIT}", field, "", fix)
    return tuple(str(part) for part in parts)


def exec_spec(
    cmd: str | Iterable[str],
    *,
    timeout: float | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    wall_timeout: bool = False,
    stdin: bool = False,
    background: bool = False,
    stream: bool = False,
    tty: bool = False,
    rows: int = 24,
    cols: int = 80,
) -> ExecSpec:
    """A checked `ExecSpec`. ``timeout`` None: the sandbox's own default; 0: no limit."""
    environment = env_map(env)
    arguments = argv(cmd)
    used = sum(len(a) for a in arguments) + sum(len(k) + len(v) + 2 for k, v in environment.items())
    if used > COMMAND_LIMIT:
        raise wrong(f"makes a command of {used} bytes, more than {COMMAND_LIMIT}", "env", "", "put large values into a file")
    return ExecSpec(
        argv=arguments,
        cwd=directory(cwd, "cwd"),
        env=environment,
        user=user_name(user),
        timeout_ms=None if timeout is None else milliseconds(timeout, "timeout"),
        wall_timeout=wall_timeout,
        background=background,
        stdin=stdin,
        tty=tty,
        rows=whole(rows, "rows", 1, 10_000),
        cols=whole(cols, "cols", 1, 10_000),
        stream=stream,
    )
