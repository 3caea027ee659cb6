"""A short run of the frame fuzzer; the long one is ``python -m tests.fuzz.frames --seconds 600``."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import frames


def test_the_frame_parser_survives_a_second_of_mutations(tmp_path: Path) -> None:
    """No read beyond a frame and no broken promise about what a parsed frame holds."""
    assert frames.main(["--seconds", "1", "--seed", "1", "--plain"]) == 0
