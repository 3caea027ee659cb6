"""What a drain of a node still has to do, and how it says so."""

from __future__ import annotations

from dsec.commands.drain import left, words


def test_what_is_left_to_do() -> None:
    """A pause has done its work where all are paused, a wait where none is there."""
    assert left("wait", {"running": 2, "paused": 1}) == 3
    assert left("stop", {}) == 0
    assert left("pause", {"paused": 3}) == 0
    assert left("pause", {"paused": 3, "creating": 1}) == 1
    assert words({"running": 2, "paused": 1, "creating": 0}) == "1 paused, 2 running"
    assert words({}) == "no sandboxes"
