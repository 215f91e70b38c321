"""Curves as SVG: any finite values are drawn within their panel."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.dashboard.dashboard_charts import (
    HEIGHT,
    WIDTH,
    LabelledCurves,
    draw,
    main_panels,
    other_panels,
    ticks,
)
from rlhf_core.config.metrics.metric import Panel

VALUES = st.floats(allow_nan=False, allow_infinity=False)
PANEL = Panel("Loss", {"loss": "training", "eval/loss": "held out"}, level=0.0, band="std")


@given(st.lists(VALUES, min_size=1, max_size=12), st.lists(VALUES, max_size=12), VALUES)
def test_all_coordinates_are_within_the_drawing(first: list[float], second: list[float], step: float) -> None:
    curves = {
        "loss": list(enumerate(first)),
        "eval/loss": [(step, value) for value in second],
        "std": list(enumerate(first)),
    }
    drawn = draw(PANEL, [LabelledCurves("", curves, {})])
    assert drawn is not None
    numbers = [
        float(text) for line in drawn.lines for text in re.findall(r"-?[\d.]+|nan|inf", line.path + line.band)
    ]
    assert all(-1 <= number <= WIDTH + 1 for number in numbers)
    assert all(math.isfinite(number) for number in numbers)
    assert all(-1 <= mark.at <= HEIGHT + 1 for mark in drawn.marks_y)
    assert drawn.level is not None
    assert -1 <= drawn.level <= HEIGHT + 1


@given(VALUES, VALUES)
def test_ticks_are_few_and_within_the_range(one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    slack = 1e-9 * max(abs(low), abs(high), 1e-300)
    assert all(low - slack <= value <= high + slack for value in found)


@pytest.mark.parametrize(
    ("low", "high", "wanted"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-2.2, 4.4, [-2, 0, 2, 4]), (3, 3, [3])]
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


def test_values_near_one_have_different_labels() -> None:
    drawn = draw(
        Panel("Ratio", {"ratio": ""}, level=1.0),
        [LabelledCurves("", {"ratio": [(1, 0.9996), (2, 1.0002)]}, {})],
    )
    assert drawn is not None and [mark.text for mark in drawn.marks_y] == ["0.9996", "0.9998", "1", "1.0002"]


def test_two_runs_have_their_own_colours_and_labels() -> None:
    runs = [
        LabelledCurves(label, {"loss": [(1, 1.0), (2, value)], "eval/loss": [(2, value)]}, {})
        for label, value in (("first", 0.5), ("second", 0.7))
    ]
    (panel,) = main_panels("sft", runs)[:1]
    assert [line.label for line in panel.lines] == [
        "first training",
        "first held out",
        "second training",
        "second held out",
    ]
    assert len({line.colour for line in panel.lines}) == 2
    assert [line.dashed for line in panel.lines] == [False, True] * 2


def test_a_metric_that_was_never_finite_is_told() -> None:
    panels = main_panels("sft", [LabelledCurves("", {"loss": [], "grad_norm": [(1, 1.0)]}, {"loss": 7})])
    assert [(panel.title, panel.missing, len(panel.lines)) for panel in panels] == [
        ("Loss", 7, 0),
        ("Gradient norm", 0, 1),
    ]
    assert main_panels("unheard", []) == [] == other_panels("unheard", [])
    others = other_panels(
        "sft",
        [LabelledCurves("", {"loss": [(1, 1.0)] * 2, "mine": [(1, 1.0), (2, 1.0)], "once": [(1, 1.0)]}, {})],
    )
    assert [panel.title for panel in others] == ["mine"]
