"""Two nights of tests/nights with the real engines: feedback, a round, its judge, an approval, and a new champion."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nights import start
from tests.nights.faults import Fault, Faults
from tests.nights.record import recorded


@pytest.mark.long
def test_a_night_makes_a_champion_and_poison_does_not(tmp_path: Path) -> None:
    faults = Faults(nights=2, seed=3, faults=(Fault(night=2, fault="poisoned", share=1.0),))
    base = start.first_model(tmp_path / "start", scale=0.3)
    with start.living(tmp_path / "town", tmp_path / "home", base, faults) as (life, held_out):
        nights = [life.live(number) for number in (1, 2)]
        found = recorded(life, nights, held_out)
    assert found["books"] == []
    assert [one["promoted"] for one in found["rounds"]] == [True, False], found["nights"]
    assert found["nights"][1]["named"]["poisoned"]
