"""`make chaos` in short: a seeded campaign of deaths under load, on containers where they can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import container_missing
from tests.chaos.campaign import Campaign


@pytest.mark.timeout(420)
async def test_a_short_campaign_of_deaths_loses_nothing(state_dir: Path) -> None:
    """Actors die at named points and from outside while clients make, use, pause, fork and end sandboxes: no acknowledged result is lost or
    doubled, the table of the lifecycle holds, events tell all of it, and nothing is left. How many die depends on the machine's speed."""
    report = await Campaign(state_dir, seed=11, rounds=1, container=not container_missing()).run()
    print(f"\n{report.deaths} deaths, {report.steps} steps, points: {', '.join(sorted(report.reached))}")
    assert not report.wrong, f"seed {report.seed}, {report.rounds} rounds: {report.wrong[:10]}"
    assert report.rounds
    assert report.steps
