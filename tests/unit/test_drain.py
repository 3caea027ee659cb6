"""What a drain of a node still has to do."""

from __future__ import annotations

from dsec.actors.drain import left
from dsec.model import State


def test_what_is_left_to_do() -> None:
    """A pause has done its work where all are paused, a stop where none is there."""
    assert left("stop", [State.RUNNING, State.PAUSED]) == 2
    assert left("stop", []) == 0
    assert left("pause", [State.PAUSED, State.PAUSED]) == 0
    assert left("pause", [State.PAUSED, State.CREATING]) == 1
