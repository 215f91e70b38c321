"""Takes the rates of `alignflow plan` from one set of measured runs, and its error from others.

    python -m tests.benchmarks.calibrate            # prints the rates, and the error on runs that they are
    not taken from
    python -m tests.benchmarks.calibrate --write    # also writes both to rlhf_core/forecast/rates.py and
    docs/reference/forecast.md

A rate is what a run's seconds say of it: the rate of the forecast, times the seconds that it gives, by the
seconds measured. The worst, the median and the best of the calibration runs are the ends and the middle of
the range. PPO stages are those of tests/support/measured.py, passes and sampling those of results/.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.fitting_passes import Pass
from rlhf_core.forecast.hardware import GIB, Gpu
from rlhf_core.forecast.memory import ProcessBytes, gpu_peaks, roles
from rlhf_core.forecast.rates import Rates
from rlhf_core.forecast.seconds import phases, seconds_of_pass
from rlhf_core.hub.model_config import Size
from tests.benchmarks.record import RESULTS, load
from tests.support.measured import (
    BEFORE_THEY_RAN,
    CALIBRATION,
    H100,
    H200,
    HELD_OUT,
    LARGE_MODEL,
    NOT_FITTED,
    SMALL_MODEL,
    with_bf16_sums,
)

ROOT = Path(__file__).parents[2]
RATES = ROOT / "rlhf_core/forecast/rates.py"
PAGE = ROOT / "docs/reference/forecast.md"
UNIT = Rates(1.0, 1.0, 1.0, 0.0, 0.5)
# seconds: shorter phases are in the table, and their error in seconds is bounded, not that in percent
SHORT = 0.5


class Trained(NamedTuple):
    """A record of training passes: its figure, in ms a pass or tokens a second of all ranks."""

    record: str
    figure: str
    size: Size
    gpu: Gpu
    ranks: int
    zero_stage: int
    tokens: int
    length: int  # of the documents
    head: bool = True

    @property
    def seconds(self) -> float:
        found = load(RESULTS / f"{self.record}.json")["figures"][self.figure]
        return float(
            found["value"] / 1e3 if found["unit"] == "ms" else self.tokens * self.ranks / found["value"]
        )

    def estimate(self, rates: Rates) -> float:
        return seconds_of_pass(
            self.size, Pass(self.tokens, 0.0), self.zero_stage, self.head, self.gpu, self.length, rates
        )


class Compared(NamedTuple):
    """A run that no rate is taken from: seconds or GiB measured, and estimated at the best, the median and
    the worst rates."""

    what: str
    measured: float
    fast: float
    typical: float
    slow: float

    @property
    def error(self) -> float:
        return self.typical / self.measured - 1


CALIBRATION_PASSES = [
    Trained("passes-plain-h200", "pass", SMALL_MODEL, H200, 1, 0, 16384, 600),
    Trained("sft-h100", "rate", SMALL_MODEL, H100, 1, 0, 16384, 680),
    Trained("sft-zero3-2h200", "rate", SMALL_MODEL, H200, 2, 3, 32768, 680),
    Trained("passes-7.6b-zero3-4h200", "pass", LARGE_MODEL, H200, 4, 3, 10240, 600),
]
HELD_OUT_PASSES = [
    Trained("sft-h200", "rate", SMALL_MODEL, H200, 1, 0, 16384, 680),
    Trained("sft-h200-flash2", "rate", SMALL_MODEL, H200, 1, 0, 16384, 680),
    Trained("passes-zero3-2h200", "pass of 16,384", SMALL_MODEL, H200, 2, 3, 16384, 600),
    Trained("passes-zero3-2h200", "pass of 32,768", SMALL_MODEL, H200, 2, 3, 32768, 600),
    Trained("passes-zero3-4h200", "pass", SMALL_MODEL, H200, 4, 3, 16384, 600),
    Trained("sft-zero3-4h200", "rate", SMALL_MODEL, H200, 4, 3, 16384, 680),
    Trained("rm-zero3-2h200", "rate", SMALL_MODEL, H200, 2, 3, 32768, 1024, head=False),
    Trained("rm-zero3-4h200", "rate", SMALL_MODEL, H200, 4, 3, 16384, 1024, head=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        RATES.write_text(with_rates(RATES.read_text(), rates()))
        PAGE.write_text(with_tables(PAGE.read_text()))
    for title, lines in tables().items():
        print(f"{title}\n\n{lines}\n")


def implied() -> dict[str, list[float]]:
    """The rates that each calibration run says, by their names."""
    found: dict[str, list[float]] = {"scoring": [], "training": [], "sharded": [], "decode_step": []}
    for run in CALIBRATION_PASSES:
        found["sharded" if run.zero_stage == 3 else "training"].append(run.estimate(UNIT) / run.seconds)
    for config, size, gpu, measured in CALIBRATION:
        unit = estimated(config, size, gpu, UNIT)
        found["scoring"].append(unit["score"] / measured["score"])
        if not config.adam_offload:  # whose steps are on the host
            found["sharded" if config.zero_stage == 3 else "training"].append(
                unit["train"] / measured["train"]
            )
        if "generate" in measured:
            found["decode_step"].append((measured["generate"] - unit["generate"]) / config.generate_max_len)
    return found


def rates() -> tuple[Rates, Rates, Rates]:
    """The worst, the median and the best rates of the calibration runs."""
    by_name = {name: sorted(values, reverse=name == "decode_step") for name, values in implied().items()}

    def taken(choose: Callable[[Sequence[float]], float], exposed: float) -> Rates:
        chosen = {
            name: round(choose(values), 5 if name == "decode_step" else 3) for name, values in by_name.items()
        }
        return Rates(**chosen, exposed=exposed)

    return taken(lambda values: values[0], 1.0), taken(median, 0.5), taken(lambda values: values[-1], 0.0)


def estimated(config: PPO, size: Size, gpu: Gpu, at: Rates) -> dict[str, float]:
    return phases(
        config, arrange(config.placed, config.together), dict.fromkeys(config.groups, size), gpu, at
    )


def held_out_seconds() -> Iterator[Compared]:
    """Seconds of phases and passes, and of whole steps, that no rate is taken from."""
    ends = rates()[::-1]
    for number, (config, size, gpu, measured) in enumerate(HELD_OUT, 1):
        by_rates = [estimated(config, size, gpu, at) for at in ends]
        for phase, seconds in measured.items():
            yield Compared(
                f"{title(config, size, gpu)} ({number}), {phase}",
                seconds,
                *(found[phase] for found in by_rates),
            )
    for number, (config, gpu, _, seconds) in enumerate(NOT_FITTED, 1):
        totals = [sum(estimated(config, SMALL_MODEL, gpu, at).values()) for at in ends]
        yield Compared(f"{title(config, SMALL_MODEL, gpu)} (step {number})", seconds, *totals)
    for run in HELD_OUT_PASSES:
        yield Compared(f"{run.record}, {run.figure}", run.seconds, *(run.estimate(at) for at in ends))


def held_out_memory() -> Iterator[Compared]:
    """GiB of the fullest GPU of stages that ran after the estimate was made."""
    grpo = HELD_OUT[-1][0]
    peaks = [(config, size, gpu, max(gib)) for config, size, gpu, gib in BEFORE_THEY_RAN]
    for number, (config, size, gpu, gib) in enumerate(
        [*peaks, (grpo, SMALL_MODEL, H100, 61.5), (HELD_OUT[2][0], SMALL_MODEL, H200, 113.5)], 1
    ):
        layout = arrange(config.placed, config.together)
        found = max(held for _, held in gpu_peaks(config, layout, _held(config, size, gpu)).values())
        yield Compared(f"{title(config, size, gpu)} (memory {number})", gib, *[found / GIB] * 3)


def _held(config: PPO, size: Size, gpu: Gpu) -> dict[str, ProcessBytes]:
    return roles(with_bf16_sums(config), dict.fromkeys(config.groups, size), gpu.memory)


def title(config: PPO, size: Size, gpu: Gpu) -> str:
    gpus = len(
        {place for places in arrange(config.placed, config.together).gpus().values() for place in places}
    )
    name = "H100" if gpu.memory < 100 * GIB else "H200"
    return f"{config.advantage_estimator}, {size.parameters / 1e9:.1f}B, {gpus} x {name}"


def tables() -> dict[str, str]:
    """The tables of the page, by their titles."""
    found = {"rates": _rates_table()}
    seconds = list(held_out_seconds())
    memory = list(held_out_memory())
    rows = ["| run | measured, s | estimated | range | error |", "|---|---|---|---|---|"]
    for run in seconds:
        rows.append(
            f"| {run.what} | {run.measured:.3g} | {run.typical:.3g} | {run.fast:.3g} to {run.slow:.3g} |"
            f" {run.error:+.0%} |"
        )
    found["seconds"] = "\n".join([*rows, _summary(seconds, 0.25)])
    rows = ["| run | measured, GiB | estimated | error |", "|---|---|---|---|"]
    rows += [f"| {run.what} | {run.measured:.3g} | {run.typical:.3g} | {run.error:+.0%} |" for run in memory]
    found["memory"] = "\n".join([*rows, _summary(memory, 0.15)])
    return found


def _summary(runs: Sequence[Compared], bound: float) -> str:
    errors = sorted(abs(run.error) for run in runs)
    beyond = [run for run in runs if abs(run.error) > bound]
    said = (
        f"\n{len(runs) - len(beyond)} of {len(runs)} within {bound:.0%}; median error {median(errors):.0%},"
        f" largest {errors[-1]:.0%}."
    )
    if not beyond:
        return said
    longest = max(run.measured for run in beyond)
    off = max(abs(run.typical - run.measured) for run in beyond)
    return f"{said} The others took {longest:.2g} s at most, and are off by {off:.2g} s at most."


def _rates_table() -> str:
    named = {
        "scoring": "share of the matrix rate, passes without gradients",
        "training": "share of the matrix rate, training in plain torch, ZeRO-1 and 2",
        "sharded": "share of the matrix rate, training under ZeRO-3",
        "decode_step": "seconds of a step of vLLM besides reading",
    }
    counts: Mapping[str, int] = {name: len(values) for name, values in implied().items()}
    rows = ["| rate | worst | median | best | runs |", "|---|---|---|---|---|"]
    for name, what in named.items():
        worst, middle, best = (getattr(found, name) for found in rates())
        rows.append(f"| {what} | {worst:g} | {middle:g} | {best:g} | {counts[name]} |")
    return "\n".join(rows)


def with_rates(code: str, found: tuple[Rates, Rates, Rates]) -> str:
    """The module with other rates."""
    for name, each in zip(("SLOW", "TYPICAL", "FAST"), found, strict=True):
        code = re.sub(rf"^{name} = Rates\(.*\)$", f"{name} = Rates{tuple(each)}", code, flags=re.MULTILINE)
    return code


def with_tables(page: str) -> str:
    """The page with its three tables."""
    for name, table in tables().items():
        page = placed_in(page, name, "tests.benchmarks.calibrate", table)
    return page


def placed_in(page: str, name: str, module: str, table: str) -> str:
    """Replaces the text between the markers of a table; returns the page. Raises ValueError without the
    markers."""
    begin = f"<!-- {name}: python -m {module} --write -->"
    end = f"<!-- end of {name} -->"
    before, marker, rest = page.partition(begin)
    _, closing, after = rest.partition(end)
    if not marker or not closing:
        raise ValueError(f"the page lacks the lines {begin!r} and {end!r}: add them where the table belongs")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


if __name__ == "__main__":
    main()
