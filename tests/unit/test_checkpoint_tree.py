"""How `dsec tree` draws branches: from records alone, whatever of them has ended."""

from __future__ import annotations

from typing import Any

from dsec.commands.checkpoint import draw
from dsec.model import Checkpoint, SandboxInfo, SandboxSpec, State

A, B, C, S, T, U = (f"n1-{'0' * 25}{n}" for n in range(6))


def cp(sid: str, sandbox: str, parent: str = "", **more: Any) -> Checkpoint:
    spec = SandboxSpec(image="i", checkpoint=parent)
    return Checkpoint(id=sid, sandbox=sandbox, parent=parent, project="p", principal="me", spec=spec, size=4096, **more)


def box(sid: str, checkpoint: str = "") -> SandboxInfo:
    return SandboxInfo(id=sid, state=State.RUNNING, image="i", project="p", principal="me", checkpoint=checkpoint)


def test_branches_are_drawn_below_what_they_began_from() -> None:
    """Sandboxes stand below their checkpoint, its checkpoints below the sandbox; what began from none is not shown."""
    lines = draw([cp(A, S, name="one"), cp(B, T, A, kept=False), cp(C, T, A)], [box(S), box(T, A), box(U, B)])
    assert lines == [
        f'{A} "one" disk 4.0 KiB',
        f"└─ {T} running",
        f"   ├─ [{B}] disk 4.0 KiB",
        f"   │  └─ {U} running",
        f"   └─ {C} disk 4.0 KiB",
    ]


def test_what_has_ended_leaves_no_gap() -> None:
    """A checkpoint of a sandbox that has ended stands below the checkpoint that it began from; one whose beginning is gone is a root."""
    assert draw([cp(A, S), cp(B, T, A)], []) == [f"{A} disk 4.0 KiB", f"└─ {B} disk 4.0 KiB"]
    assert [line.split()[0] for line in draw([cp(B, T, A)], [])] == [B]
