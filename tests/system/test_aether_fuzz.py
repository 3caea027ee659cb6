"""A short run of the frame fuzzer; the long one is ``python -m tests.fuzz.frames --seconds 600``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz import frames


def test_the_frame_parser_survives_a_second_of_mutations(tmp_path: Path) -> None:
    """No read beyond a frame and no broken promise about what a parsed frame holds."""
    assert frames.main(["--seconds", "1", "--seed", "1", "--plain"]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="archives hold files of any owner")
def test_the_tar_reader_survives_two_seconds_of_mutations() -> None:
    """No crash, and nothing outside of the target, whatever the archive holds."""
    assert frames.main(["--seconds", "2", "--seed", "1", "--plain", "--what", "unpack"]) == 0


def test_the_launchers_parser_survives_a_second_of_mutations() -> None:
    """No read beyond a frame, and an accepted order points only into it and holds what it promises."""
    assert frames.main(["--seconds", "1", "--seed", "1", "--plain", "--what", "launch"]) == 0
