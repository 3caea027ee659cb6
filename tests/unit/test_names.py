"""Names that users of other clients know: what is told when they are used here."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

import libdsec
import libdsec.blocking
from libdsec import names
from libdsec.client import SandboxContext

TABLES = {"client": names.CLIENT, "sandbox": names.SANDBOX, "files": names.FILES, "context": names.CONTEXT}
CLASSES: dict[str, tuple[type, ...]] = {
    "client": (libdsec.Client, libdsec.blocking.Client),
    "sandbox": (libdsec.Sandbox, libdsec.blocking.Sandbox),
    "files": (libdsec.Files, libdsec.blocking.Files),
    "context": (SandboxContext, libdsec.blocking.SandboxContext),
}
OURS = {  # set when they are made
    "sandbox": {"files", "id", "labels"},
    "client": set(),
    "files": set(),
    "context": set(),
}


@pytest.mark.parametrize("owner", sorted(TABLES))
def test_hints_name_what_exists(owner: str) -> None:
    """No hint is for a name that is there, and each names methods that are."""
    table: Mapping[str, str] = TABLES[owner]
    here = set(dir(CLASSES[owner][0])) | OURS[owner]
    assert not here.intersection(table)
    for hint in table.values():
        found = re.findall(r"\b(client|sandbox|files)\.(\w+)", hint)
        assert found, hint
        for thing, name in found:
            assert name in set(dir(CLASSES[thing][0])) | OURS[thing], hint


@pytest.mark.parametrize("cls", [cls for each in CLASSES.values() for cls in each])
def test_a_name_of_others_is_told_by_ours(cls: type) -> None:
    """It stays an AttributeError, so that hasattr, getattr and copying work as always."""
    thing = cls.__new__(cls)
    name, hint = next(iter(cls._meant.items()))  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': use {re.escape(hint)}"):
        getattr(thing, name)
    assert not hasattr(thing, "no_such_thing")
    with pytest.raises(AttributeError, match=r"has no attribute 'no_such_thing'$"):
        thing.no_such_thing  # noqa: B018


def test_short_names_for_the_same_thing() -> None:
    """`kill` and `terminate` end a sandbox, as `stop` does, with and without an event loop."""
    for cls in CLASSES["sandbox"]:
        assert {"kill", "terminate", "is_running", "stop"} <= set(dir(cls))
