"""What the native launcher is told, and what cannot be told to it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import msgspec
import pytest

from dsec.backends import frame
from dsec.backends.base import LaunchPlan, Mount
from dsec.backends.frame import Tag
from dsec.backends.plan import CAPABILITIES, Node, make_plan
from dsec.errors import Unsupported
from dsec.model import LayerRef, SandboxId, SandboxSpec
from dsec.qos.cgroup import Order

pytestmark = pytest.mark.guest
BASE = LayerRef(name="small", digest="sha256:" + "5" * 64)


def plan(*, userns: bool = True, **fields: object) -> LaunchPlan:
    node = Node(edge="n1", state_dir="/var/lib/dsec", userns=userns, disk_modes=("tmpfs", "loop", "dir"))
    spec = msgspec.convert({"image": "small", "best_effort": True, **fields}, SandboxSpec)
    return make_plan(spec, id=SandboxId("n1", "01m8n2gx8rqztk6tndyg3jwmjc"), slot=2, refs=[BASE], node=node)


def sections(data: bytes) -> dict[int, list[bytes]]:
    magic, version, count, size, zero = frame.HEAD.unpack_from(data)
    assert (magic, version, size, zero) == (frame.MAGIC, frame.VERSION, len(data), 0)
    found: dict[int, list[bytes]] = {}
    at = frame.HEAD.size
    for _ in range(count):
        tag, none, length = frame.SECTION.unpack_from(data, at)
        assert none == 0
        at += frame.SECTION.size
        found.setdefault(tag, []).append(data[at : at + length])
        at += length
    assert at == len(data)
    return found


def test_a_frame_says_what_the_plan_says() -> None:
    """Ids, capabilities, paths, environment and the writable layer arrive as they were planned."""
    made = plan(env={"A": "b c"}, hostname="worker")
    assert made.idmap is not None
    groups = Order(("/cg/pids/x",), (("/cg/pids/x/pids.max", "9"),), ("/cg/pids/x/tasks",))
    found = sections(frame.render(made, lowers=2, socket="/run/x", groups=groups, seccomp=b"12345678"))
    assert (found[Tag.MADE], found[Tag.SETTINGS]) == ([b"/cg/pids/x\0"], [b"/cg/pids/x/pids.max\x009\0"])
    assert (found[Tag.GROUPS], found[Tag.SOCKET]) == ([b"/cg/pids/x/tasks\0"], [b"/run/x\0"])
    assert struct.unpack("=II", found[Tag.IDS][0]) == (made.idmap.base, made.idmap.count)
    assert struct.unpack("=Q", found[Tag.CAPS][0])[0] == frame.capability_set(CAPABILITIES)
    assert found[Tag.HOSTNAME] == [b"worker\0"]
    assert b"A=b c\0" in found[Tag.ENV][0]
    assert found[Tag.MASKED][0].split(b"\0")[:-1] == [path.encode() for path in made.masked]
    assert found[Tag.UPPER][0][8:].split(b"\0")[0] == str(made.resources.disk).encode()
    assert found[Tag.SECCOMP] == [b"12345678"]
    assert struct.unpack("=I", found[Tag.NO_NEW_PRIVS][0]) == (1,)
    assert len(found[Tag.MOUNT]) == len(made.mounts)


def test_without_ids_there_is_no_section_for_them() -> None:
    """A plan without a user namespace says so by leaving the ids out."""
    found = sections(frame.render(plan(userns=False), lowers=2, socket="/run/x"))
    assert Tag.IDS not in found
    assert Tag.SECCOMP not in found


def test_groups_of_a_terminal_are_ids_outside() -> None:
    """The mounter of a devpts stands outside of the user namespace: its gid is the one that 5 inside is outside."""
    made = plan()
    assert made.idmap is not None
    assert any(f"gid={made.idmap.base + 5}".encode() in body for body in sections(frame.render(made, lowers=2, socket="/run/x"))[Tag.MOUNT])


def test_an_image_is_named_by_its_path() -> None:
    """A loop upper is told as a kind and a path."""
    body = sections(frame.render(plan(disk_mode="loop"), lowers=2, socket="/run/x"))[Tag.UPPER][0]
    assert struct.unpack_from("=II", body) == (frame.UPPER_LOOP, 0)
    assert body.endswith(b"/disk\0")


def test_what_cannot_be_said_is_refused() -> None:
    """An unknown capability, a NUL byte and too large an environment are errors with the field's name."""
    made = plan()
    with pytest.raises(Unsupported, match="capabilities"):
        frame.render(msgspec.structs.replace(made, capabilities=("CAP_FLY",)), lowers=2, socket="/run/x")
    with pytest.raises(Unsupported, match="mounts"):
        frame.render(msgspec.structs.replace(made, mounts=(Mount(target="/x\0y", fstype="proc"),)), lowers=2, socket="/run/x")
    with pytest.raises(Unsupported, match="env"):
        frame.render(msgspec.structs.replace(made, env={"A": "x" * (frame.MAX_FRAME + 1)}), lowers=2, socket="/run/x")


def test_capabilities_have_the_kernels_numbers() -> None:
    """The first, one in the middle and the last."""
    assert frame.capability_set(("CAP_CHOWN", "CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE")) == 1 | 1 << 21 | 1 << 40


def test_both_sides_speak_of_the_same_frame() -> None:
    """The version and the magic number that a zygote reads are those that are written."""
    header = (Path(frame.__file__).parent / "launcher/launcher.h").read_text()
    found = re.search(r"FRAME_MAGIC = (\w+), FRAME_VERSION = (\d+), MAX_FRAME = (\d+) << 20", header)
    assert found is not None
    assert (int(found[1], 16), int(found[2]), int(found[3]) << 20) == (frame.MAGIC, frame.VERSION, frame.MAX_FRAME)
