"""A plan becomes the runtime's config, and nothing in it comes from anywhere else."""

from __future__ import annotations

import base64
import json

import msgspec

from dsec.backends.plan import Node, make_plan
from dsec.backends.render import BLOB_ANNOTATION, render
from dsec.model import LayerRef, SandboxId, SandboxSpec

NODE = Node(edge="n1", state_dir="/s", arch="x86_64")
PLAN = make_plan(
    SandboxSpec(image="i", env={"X": "y"}),
    id=SandboxId("n1", "01m8mp3mtd4wgsy7m05m2q1jkc"),
    slot=1,
    refs=[LayerRef(name="i", digest="sha256:b")],
    node=NODE,
)


def test_namespaces_and_maps() -> None:
    """Every namespace is new, ids are mapped, privileges cannot be gained."""
    config = render(PLAN, root="/mnt/root")
    kinds = {entry["type"] for entry in config["linux"]["namespaces"]}
    assert kinds == {"pid", "mount", "ipc", "uts", "cgroup", "network", "user"}
    assert config["linux"]["uidMappings"] == [{"containerID": 0, "hostID": 165536, "size": 65536}] == config["linux"]["gidMappings"]
    assert config["process"]["noNewPrivileges"]
    assert config["process"]["capabilities"]["bounding"] == list(PLAN.capabilities)
    assert "ambient" not in config["process"]["capabilities"]
    assert "X=y" in config["process"]["env"]
    assert len(config["mounts"]) == 2
    json.dumps(config)


def test_without_user_namespace() -> None:
    """A plan without an id map asks for no user namespace."""
    config = render(msgspec.structs.replace(PLAN, idmap=None), root="/r")
    assert "uidMappings" not in config["linux"]
    assert not any(entry["type"] == "user" for entry in config["linux"]["namespaces"])


def test_filter_is_a_blob_for_crun_and_rules_for_runc() -> None:
    """crun gets the compiled program as an annotation, runc gets rules; never both."""
    crun = render(PLAN, root="/r", seccomp_blob=b"12345678")
    assert base64.b64decode(crun["annotations"][BLOB_ANNOTATION]) == b"12345678"
    assert "seccomp" not in crun["linux"]
    runc = render(PLAN, root="/r", seccomp_oci={"defaultAction": "SCMP_ACT_ERRNO"})
    assert runc["linux"]["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert runc["annotations"] == {}
