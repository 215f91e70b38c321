"""Checks schedules of `alignflow serve`: one that never fires is refused before anything is deployed."""

from __future__ import annotations

import pytest

from flows.serving.schedules import schedule_of


@pytest.mark.parametrize(
    ("cron", "told"), [("0 0 30 2 *", "month 2 has no day 30"), ("5 4 31 4,6 *", "month 4,6 has no day 31")]
)
def test_a_cron_that_never_fires_is_refused(cron: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"never fires: {told}; correct the day or the month"):
        schedule_of(None, cron, "UTC")


@pytest.mark.parametrize("cron", ["0 2 * * *", "0 0 29 2 *", "0 0 31 1,2 *", "@daily"])
def test_a_cron_that_fires_is_taken(cron: str) -> None:
    assert schedule_of(None, cron, "Europe/Berlin").cron == cron


def test_an_interval_needs_no_cron() -> None:
    assert schedule_of(60, "0 0 30 2 *", "UTC").cron is None
