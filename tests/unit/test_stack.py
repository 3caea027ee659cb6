"""The order and the checks of a sandbox's layers."""

from __future__ import annotations

import hashlib

import pytest

from dsec.errors import InvalidRequest, NotFound
from dsec.layers import stack
from dsec.model import LayerRef, SandboxSpec


def _resolve(name: str) -> LayerRef:
    if name == "absent":
        raise NotFound("no such layer", field="layer", value=name, fix="did you mean present?")
    content = name.partition("=")[0]
    return LayerRef(name=name, digest="sha256:" + hashlib.sha256(content.encode()).hexdigest())


def test_toolkits_are_above_workspaces_above_the_base_and_the_last_named_is_topmost() -> None:
    """lowers is topmost first."""
    plan = stack.build(SandboxSpec(image="base", workspaces=("w1", "w2"), toolkits=("t1", "t2")), _resolve)
    assert [ref.name for ref in plan.lowers] == ["t2", "t1", "w2", "w1", "base"]
    assert [level.field for level in plan.levels] == ["toolkits[1]", "toolkits[0]", "workspaces[1]", "workspaces[0]", "image"]


def test_describe_prints_one_line_a_layer_with_the_base_at_the_bottom() -> None:
    """The plan can be read before anything is mounted."""
    lines = stack.build(SandboxSpec(image="base", toolkits=("tool",)), _resolve).describe().splitlines()
    assert [line.split()[:3] for line in lines] == [["2", "toolkit", "tool"], ["1", "base", "base"]]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SandboxSpec(image=""), "image"),
        (SandboxSpec(image="b", toolkits=("t", "t")), "toolkits[1]"),
        (SandboxSpec(image="b", workspaces=("b",)), "workspaces[0]"),
        (SandboxSpec(image="b", toolkits=tuple(f"t{n}" for n in range(500))), "toolkits"),
        (SandboxSpec(image="b", workspaces=("x=1",), toolkits=("x=2",)), "workspaces[0]"),
    ],
)
def test_bad_stacks_are_refused_with_the_field_at_fault(spec: SandboxSpec, field: str) -> None:
    """Empty names, doubles by name or by content, and more layers than the kernel stacks."""
    with pytest.raises(InvalidRequest) as caught:
        stack.build(spec, _resolve)
    assert caught.value.field == field


def test_as_many_layers_as_the_kernel_takes_are_accepted() -> None:
    """500 lowers is the limit, not one less."""
    spec = SandboxSpec(image="b", toolkits=tuple(f"t{n}" for n in range(stack.MAX_LOWERS - 1)))
    assert len(stack.build(spec, _resolve).lowers) == stack.MAX_LOWERS


def test_an_unknown_layer_keeps_its_fix_and_gets_the_specs_field() -> None:
    """The error says which key of the spec to mend."""
    with pytest.raises(NotFound) as caught:
        stack.build(SandboxSpec(image="b", toolkits=("t", "absent")), _resolve)
    assert (caught.value.field, caught.value.value, caught.value.fix) == ("toolkits[1]", "absent", "did you mean present?")


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("debain-12", ["debian-12", "busybox"], "debian-12"),
        ("debian", ["debian-12", "other"], "debian-12"),
        ("zzz", ["debian-12"], "this node has debian-12"),
        ("zzz", [], "bootstrap"),
    ],
)
def test_close_matches_names_what_was_probably_meant(name: str, known: list[str], says: str) -> None:
    """A typo is answered with the name, an empty store with the command that fills it."""
    assert says in stack.close_matches(name, known)
