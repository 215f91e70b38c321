"""The rates of `alignflow plan` are those of the calibration runs, others are within its error, its page is
what the programs write."""

from __future__ import annotations

from statistics import median

import pytest

from rlhf_core.forecast.rates import TYPICAL
from tests.benchmarks import calibrate, published


def test_the_rates_are_those_that_the_calibration_runs_say() -> None:
    code = calibrate.RATES.read_text()
    assert calibrate.with_rates(code, calibrate.rates()) == code, (
        "run: python -m tests.benchmarks.calibrate --write"
    )
    slow, typical, fast = calibrate.rates()
    assert (
        slow.scoring < typical.scoring < fast.scoring
        and slow.decode_step > typical.decode_step > fast.decode_step
    )


def test_no_run_is_in_both_sets() -> None:
    used = [(id(config), seconds) for config, _, _, seconds in calibrate.CALIBRATION]
    assert not [run for run in calibrate.HELD_OUT if (id(run[0]), run[3]) in used]
    assert not {(run.record, run.figure) for run in calibrate.CALIBRATION_PASSES} & {
        (run.record, run.figure) for run in calibrate.HELD_OUT_PASSES
    }


@pytest.mark.parametrize(
    ("runs", "bound"), [(calibrate.held_out_seconds, 0.25), (calibrate.held_out_memory, 0.15)]
)
def test_runs_that_no_rate_is_taken_from_are_within_the_error(runs: object, bound: float) -> None:
    found = list(runs())  # type: ignore[operator]
    long = [run for run in found if run.measured >= calibrate.SHORT]
    assert len(long) > 15 and all(abs(run.error) <= bound for run in long)
    assert all(abs(run.typical - run.measured) < 0.065 for run in found if run.measured < calibrate.SHORT), (
        "seconds"
    )
    assert median(abs(run.error) for run in found) < 0.1


def test_no_measured_phase_is_left_out_of_the_page() -> None:
    measured = (
        sum(len(phases) for *_, phases in calibrate.HELD_OUT)
        + len(calibrate.NOT_FITTED)
        + len(calibrate.HELD_OUT_PASSES)
    )
    assert len(list(calibrate.held_out_seconds())) == measured
    assert (
        "; median error 8%, largest 31%. The others took 0.2 s at most, and are off by 0.061 s"
        in calibrate.tables()["seconds"]
    )


def test_a_held_out_run_with_other_seconds_would_be_told() -> None:
    run = calibrate.Compared("a run", 10.0, 12.0, 13.0, 15.0)
    assert run.error == pytest.approx(0.3)
    slower = calibrate.HELD_OUT_PASSES[0]._replace(tokens=2 * calibrate.HELD_OUT_PASSES[0].tokens)
    assert slower.estimate(TYPICAL) == pytest.approx(2 * calibrate.HELD_OUT_PASSES[0].estimate(TYPICAL))


def test_the_page_is_what_the_programs_write() -> None:
    page = expected = calibrate.PAGE.read_text()
    expected = calibrate.with_tables(expected)
    for name, table in published.tables().items():
        expected = calibrate.placed_in(expected, name, "tests.benchmarks.published", table)
    assert page == expected, (
        "run: python -m tests.benchmarks.calibrate --write and python -m tests.benchmarks.published --write"
    )
    with pytest.raises(ValueError, match="lacks the lines '<!-- rates"):
        calibrate.placed_in("no table", "rates", "tests.benchmarks.calibrate", "")
