"""Planning decides every default, and refuses what cannot be, naming field, value and fix."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.backends.plan import CAPABILITIES, IDMAP_BASE, IDMAP_COUNT, MAX_SLOTS, LayerDefaults, Node, another, make_plan, memory_bytes
from dsec.errors import InvalidRequest, Unsupported
from dsec.layers.store import LayerConfig
from dsec.model import MIB, LayerRef, NetworkPolicy, Resources, SandboxId, SandboxSpec
from dsec.security.network import Block

OPEN = NetworkPolicy(mode="open")
NODE = Node(edge="n1", state_dir="/var/lib/dsec", arch="x86_64")
ID = SandboxId("n1", "01m8mp3mtd4wgsy7m05m2q1jkc")
REFS = (LayerRef(name="tool", digest="sha256:a"), LayerRef(name="debian-12", digest="sha256:b"))


def plan(node: Node = NODE, slot: int = 0, configs: tuple[LayerDefaults | None, ...] = (), **fields: Any) -> Any:
    return make_plan(SandboxSpec(image="debian-12", **fields), id=ID, slot=slot, refs=REFS, node=node, layer_configs=configs)


def test_every_name_derives_from_the_id() -> None:
    """Directory, cgroup and host name come from the ulid; the layers keep their order."""
    made = plan(slot=3)
    assert made.id == str(ID)
    assert made.state_dir == f"/var/lib/dsec/sandboxes/{ID.ulid}"
    assert made.cgroup == f"dsec/n1/{ID.ulid}"
    assert made.hostname == f"sb-{ID.ulid[-8:]}"
    assert made.lowers == REFS
    assert (made.idmap.base, made.idmap.count) == (IDMAP_BASE + 3 * IDMAP_COUNT, IDMAP_COUNT)
    assert [text.split(":")[0] for text in made.degraded] == ["memory"]


def test_what_keeps_memory_and_disk_apart_is_named() -> None:
    """What the sandbox may ask for, where this node has it, and what the node may be given."""
    (text,) = plan().degraded
    assert text.endswith("; container.disk_store_bytes of the node keeps them apart")
    (text,) = plan(msgspec.structs.replace(NODE, disk_modes=("tmpfs", "loop", "dir"))).degraded
    assert text.endswith('; disk_mode="loop" of the sandbox or container.disk_store_bytes of the node keeps them apart')


def test_same_input_same_plan() -> None:
    """Planning is pure, and a plan survives its encoding."""
    assert plan() == plan()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan()), type=type(plan())) == plan()


@pytest.mark.parametrize(
    ("node", "fields"),
    [
        (NODE, {}),
        (NODE, {"hostname": "box", "env": {"A": "b"}, "workdir": "/w"}),
        (msgspec.structs.replace(NODE, userns=False), {"best_effort": True}),
        (msgspec.structs.replace(NODE, net=Block(net4="10.208.64.0/18", net6="fd12:3456::/64", prefix="dsab")), {"network": OPEN}),
    ],
)
def test_one_plan_makes_another(node: Node, fields: dict[str, Any]) -> None:
    """By the plan of one sandbox that of the next, of the same spec, is what planning it anew gives; a slot too many is refused."""
    spec, next_id = SandboxSpec(image="debian-12", **fields), SandboxId("n1", "01m8mp3mtd4wgsy7m05m2q1jkd")
    anew = make_plan(spec, id=next_id, slot=7, refs=REFS, node=node)
    assert another(plan(node, slot=3, **fields), spec, next_id, 7, node) == anew
    with pytest.raises(InvalidRequest):
        another(plan(node, **fields), spec, next_id, MAX_SLOTS, node)


def test_c54_environment_is_declared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's environment is never looked at; layers declare, the spec wins, a higher layer wins over a lower one."""
    monkeypatch.setenv("SECRET_OF_THE_NODE", "x")
    monkeypatch.setenv("LANG", "xx_XX")
    configs = (LayerConfig(env={"A": "tool"}, user="dev"), LayerConfig(env={"A": "base", "B": "base", "C": "base"}, workdir="/srv"))
    made = plan(configs=configs, env={"C": "spec"})
    assert made.env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "A": "tool",
        "B": "base",
        "C": "spec",
    }
    assert (made.workdir, made.user) == ("/srv", "dev")
    assert plan(configs=configs, user="root", workdir="/w").user == "root"


def test_never_dangerous_capabilities() -> None:
    """The capabilities that would undo masks or take the agent's socket are in no plan."""
    assert not {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_MKNOD", "CAP_NET_ADMIN"} & set(CAPABILITIES)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resources": Resources(memory=16 * MIB)}, "resources.memory"),
        ({"resources": Resources(pids=4)}, "resources.pids"),
        ({"backend": "docker"}, "backend"),
        ({"arch": "riscv64"}, "arch"),
        ({"workdir": "/a/../b"}, "workdir"),
        ({"workdir": "relative"}, "workdir"),
        ({"workdir": "/a\0b"}, "workdir"),
        ({"env": {"1X": "y"}}, "env.1X"),
        ({"env": {"A=B": "y"}}, "env.A=B"),
        ({"env": {"X": "a\0b"}}, "env.X"),
        ({"env": {"X": "y" * (1 << 17)}}, "env.X"),
        ({"env": {f"X{i}": "y" * (1 << 16) for i in range(20)}}, "env"),
        ({"resources": Resources(inodes=1 << 63)}, "resources.inodes"),
        ({"resources": Resources(disk=1 << 62), "disk_mode": "loop"}, "resources.disk"),
        ({"user": "a b"}, "user"),
        ({"user": "root:"}, "user"),
        ({"user": "../etc"}, "user"),
        ({"user": "70000"}, "user"),
        ({"hostname": "-bad"}, "hostname"),
        ({"hostname": "a" * 65}, "hostname"),
        ({"disk_mode": "floppy"}, "disk_mode"),
    ],
)
def test_bad_requests_name_field_and_fix(fields: dict[str, Any], field: str) -> None:
    """Each wrong value is an InvalidRequest with its field, its value and a way out."""
    with pytest.raises(InvalidRequest) as caught:
        plan(**fields)
    assert caught.value.field == field
    assert caught.value.value
    assert caught.value.fix


@pytest.mark.parametrize(
    "fields",
    [
        {"network": NetworkPolicy(mode="open")},
        {"network": NetworkPolicy(mode="rules", rules=("packages.example:443",))},
        {"devices": ("kvm",)},
    ],
)
def test_what_is_not_enforced_is_refused(fields: dict[str, Any]) -> None:
    """A policy that nothing enforces is never accepted silently."""
    with pytest.raises(Unsupported):
        plan(**fields)


def test_weaker_nodes_say_so() -> None:
    """What the node lacks is in `degraded`; an unlimited disk is refused unless it was asked for."""
    node = Node(edge="n1", state_dir="/s", userns=False, userns_missing="switched off", disk_modes=("dir",), arch="x86_64")
    with pytest.raises(Unsupported):
        plan(node)
    made = plan(node, best_effort=True)
    assert made.idmap is None
    assert [text.split(":")[0] for text in made.degraded] == ["disk", "userns"]


def test_a_disk_that_is_memory_is_told() -> None:
    """Where the upper is a tmpfs the memory limit alone is not enforced; `degraded` says so, with the mode that helps if there is one."""
    with_loop = Node(edge="n1", state_dir="/s", disk_modes=("tmpfs", "loop", "dir"), arch="x86_64")
    assert 'disk_mode="loop"' in plan(with_loop).degraded[0]
    assert "loop" not in plan().degraded[0]
    assert plan(with_loop, disk_mode="loop").degraded == ()


def test_tmpfs_counts_as_memory() -> None:
    """A tmpfs upper is memory: it is in the limit and in what admission reserves; a loop upper is not."""
    resources = Resources(memory=64 * MIB, disk=32 * MIB)
    assert memory_bytes(plan(resources=resources)) == 96 * MIB
    node = msgspec.structs.replace(NODE, disk_modes=("tmpfs", "loop"))
    assert memory_bytes(plan(node, resources=resources, disk_mode="loop")) == 64 * MIB


def test_slots_are_bounded() -> None:
    """Ranges of ids never overlap and never leave 32 bits."""
    last = plan(slot=MAX_SLOTS - 1).idmap
    assert last.base + last.count < 2**32
    with pytest.raises(InvalidRequest):
        plan(slot=MAX_SLOTS)


@given(st.text(max_size=30), st.text(max_size=30), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_any_text_is_planned_or_refused(user: str, workdir: str, env: dict[str, str]) -> None:
    """No text in a spec makes planning fail in any other way than InvalidRequest."""
    try:
        made = plan(user=user, workdir=workdir, env=env)
    except InvalidRequest:
        return
    assert ".." not in made.workdir.split("/")
    assert not any("=" in name for name in made.env)
