"""What the doctor's answers look like: for programs as JSON, for people as lines. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "fallback", "missing"]


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One feature: its status, what was found, what follows from it, and the command that a person may run."""

    name: str
    status: Status
    found: str
    consequence: str = ""
    fix: str = ""


class Running(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An Edge of this machine that serves, as its last heartbeat tells. ``pools``: launches that found their parts made ahead, and all.
    ``trouble``: why nothing is known of it."""

    edge: str
    url: str
    trouble: str = ""
    sandboxes: int = 0
    pools: dict[str, tuple[int, int]] = {}

    def text(self) -> str:
        """In one line."""
        if self.trouble:
            return f"{self.url}: {self.trouble}"
        ahead = ", ".join(f"{name} {found} of {launches}" for name, (found, launches) in sorted(self.pools.items()))
        return f"{self.url}: {self.sandboxes} sandboxes" + (f"; launches with parts made ahead: {ahead}" if ahead else "")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one node, and the Edges that serve there."""

    node: str
    kernel: str
    checks: tuple[Check, ...]
    running: tuple[Running, ...] = ()

    def get(self, name: str) -> Check:
        """The check of that name. Raises `KeyError`."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def json(self) -> str:
        """The report as one JSON object."""
        return msgspec.json.encode(self).decode()

    def table(self) -> str:
        """The report for people: one line a feature, and below it what follows and what helps."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.node}: kernel {self.kernel}"]
        for check in self.checks:
            lines.append(f"{check.status:<8}  {check.name:<{width}}  {check.found}")
            indent = " " * (width + 12)
            if check.status != "ok" and check.consequence:
                lines.append(f"{indent}{check.consequence}")
            if check.status != "ok" and check.fix:
                lines.append(f"{indent}fix: {check.fix}")
        lines += [f"{'running':<8}  {each.edge:<{width}}  {each.text()}" for each in self.running]
        counts = {status: sum(check.status == status for check in self.checks) for status in ("ok", "fallback", "missing")}
        lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
        return "\n".join(lines)
