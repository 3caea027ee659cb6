"""Which layers make a sandbox's root, and in which order: pure, no disk, no kernel.

Topmost first, as overlayfs takes them: toolkits (the last named is the topmost, so it may override the ones before it),
workspaces (likewise), then the base. The same file in two layers is the topmost one's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from dsec.errors import DsecError, InvalidRequest, NotFound
from dsec.model import LayerRef, SandboxSpec

MAX_LOWERS = 500  # overlayfs, OVL_MAX_STACK

Role = Literal["toolkit", "workspace", "base"]


class Level(msgspec.Struct, frozen=True):
    """One layer in its place; ``field`` is where the spec named it (``toolkits[0]``)."""

    role: Role
    field: str
    ref: LayerRef


class Stack(msgspec.Struct, frozen=True):
    """The layers of one sandbox, topmost first."""

    levels: tuple[Level, ...]

    @property
    def lowers(self) -> tuple[LayerRef, ...]:
        """What goes into `LaunchPlan.lowers`: topmost first, the base last."""
        return tuple(level.ref for level in self.levels)

    def describe(self) -> str:
        """The plan for a person, topmost first, one layer a line."""
        width = max(len(level.ref.name) for level in self.levels)
        return "\n".join(
            f"{len(self.levels) - n:3d}  {level.role:9s}  {level.ref.name:{width}s}  {level.ref.digest[:19]}"
            for n, level in enumerate(self.levels)
        )


def names(spec: SandboxSpec) -> tuple[tuple[Role, str, str], ...]:
    """The spec's layer names in stacking order, topmost first: (role, field, name). Raises `InvalidRequest`.

    Checked here, before any look-up: an empty name, the same name twice in one spec, more than `MAX_LOWERS` layers.
    """
    found: list[tuple[Role, str, str]] = [("base", "image", spec.image)]
    found += [("workspace", f"workspaces[{n}]", name) for n, name in enumerate(spec.workspaces)]
    found += [("toolkit", f"toolkits[{n}]", name) for n, name in enumerate(spec.toolkits)]
    if len(found) > MAX_LOWERS:
        raise InvalidRequest(
            f"{len(found)} layers, the kernel stacks at most {MAX_LOWERS}",
            field="toolkits" if len(spec.toolkits) > len(spec.workspaces) else "workspaces",
            value=str(len(found)),
            fix="import several directories as one layer",
        )
    seen: dict[str, str] = {}
    for _, field, name in found:
        if not name:
            raise InvalidRequest("a layer's name is empty", field=field, fix="name a layer that `dsec layer list` shows")
        if name in seen:
            raise InvalidRequest(f"the layer is already named by {seen[name]}", field=field, value=name, fix="name it once")
        seen[name] = field
    return tuple(reversed(found))


def build(spec: SandboxSpec, resolve: Callable[[str], LayerRef]) -> Stack:
    """The stack of a spec. ``resolve`` turns a name into its content (`LayerStore.lookup`) and raises `NotFound` or `InvalidRequest`.

    Errors carry the spec's field. Two names of the same content are refused: overlayfs does not take one layer twice (ELOOP).
    """
    levels: list[Level] = []
    by_digest: dict[str, Level] = {}
    for role, field, name in names(spec):
        try:
            ref = resolve(name)
        except (NotFound, InvalidRequest) as error:
            raise _at(error, field) from None
        level = Level(role, field, ref)
        twin = by_digest.setdefault(ref.digest, level)
        if twin is not level:
            raise InvalidRequest(f"the same content as {twin.field} ({twin.ref.name})", field=field, value=name, fix="name it once")
        levels.append(level)
    return Stack(tuple(levels))


def _at(error: DsecError, field: str) -> DsecError:
    return type(error)(error.message, field=field, value=error.value, fix=error.fix, reason=error.reason)


def close_matches(name: str, known: Iterable[str]) -> str:
    """What to answer for an unknown name: the likely ones meant, or how to make one."""
    choices = sorted(set(known))
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if not near:  # `debian` for `debian-12`
        near = [choice for choice in choices if choice.startswith(name) or name.startswith(choice)][:3]
    if near:
        return "did you mean " + " or ".join(near) + "?"
    if choices:
        return "this node has " + ", ".join(choices[:8]) + (", …" if len(choices) > 8 else "")
    made = "make one with `dsec layer bootstrap debian` or `dsec layer import`"
    return f"this node has no layers yet: {made}; `--store DIR`, or the --url of the `dsec up` that is meant, names another store there"
