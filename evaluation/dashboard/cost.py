"""Adds up the GPU-hours and money of a run: the GPUs that its stages reserve, multiplied by the run time of
their processes, and the fees of judges.

A stage's GPUs are the GPUs that it reserves in Ray; if its parts run one after the other, the largest part
counts. An attempt has no recorded end if the process that started it was killed. The time of such attempts is
left out, and the sums are then shown as "at least". Stages that had already finished add no cost to the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from evaluation.dashboard.artifacts_folder import Folder, Missing
from evaluation.dashboard.state import Stage, numbers
from rlhf_core.cluster.layout import arrange
from rlhf_core.config import Cost, StageConfig
from rlhf_core.runs.run_dir import RESULT
from rlhf_core.runs.run_records import RunRecord

CONFIG: TypeAdapter[StageConfig] = TypeAdapter(StageConfig)
FEES = ("judge_cost", "answer_cost")  # US dollars, in the results of evaluations and calibrations


class UsageLine(NamedTuple):
    """The usage of one stage in a run. `gpus`: None if unknown; `unended`: the number of attempts without a
    recorded end, whose time is not in `seconds`."""

    stage: str
    attempts: int
    unended: int
    seconds: float
    gpus: float | None
    fees: float

    @property
    def gpu_hours(self) -> float:
        return (self.gpus or 0.0) * self.seconds / 3600


class Bill(NamedTuple):
    """The total of a run. `price`: the price of a GPU-hour; None if the recipe does not state it."""

    lines: list[UsageLine]
    price: Cost | None

    @property
    def gpu_hours(self) -> float:
        return sum(line.gpu_hours for line in self.lines)

    @property
    def fees(self) -> float:
        return sum(line.fees for line in self.lines)

    @property
    def at_least(self) -> bool:
        """Returns whether the sums omit the time of some attempts or the GPUs of some stages."""
        return any(line.unended or line.gpus is None for line in self.lines)

    @property
    def money(self) -> str:
        """Returns the cost of the GPUs and the fees, as text; '' when neither is known."""
        sums: dict[str, float] = {}
        if self.price:
            sums[self.price.currency] = self.gpu_hours * self.price.gpu_hour
        if self.fees:
            sums["USD"] = sums.get("USD", 0.0) + self.fees
        return " + ".join(f"{value:,.2f} {currency}" for currency, value in sums.items())


def bill(folder: Folder, run: RunRecord, stages: Sequence[Stage]) -> Bill:
    """Returns the bill of a run."""
    lines = []
    for stage in stages:
        with suppress(Missing):  # not begun, or removed
            lines.append(_line(folder, run, stage, folder.stage(stage.folder)))
    return Bill(lines, price_of(folder, run))


def price_of(folder: Folder, run: RunRecord) -> Cost | None:
    """Returns the price in the recipe that was run; None when the recipe has no price or cannot be read."""
    config = folder.json(run.file).get("config")
    try:
        return (
            Cost.model_validate(config["cost"]) if isinstance(config, dict) and config.get("cost") else None
        )
    except ValidationError:
        return None


def _line(folder: Folder, run: RunRecord, stage: Stage, run_dir: Path) -> UsageLine:
    until = run.ended if run.ended is not None else math.inf
    attempts = [one for one in folder.attempts(run_dir).attempts if int(run.started) <= one.started <= until]
    seconds = sum(one.seconds for one in attempts if one.seconds is not None)
    unended = sum(one.seconds is None for one in attempts)
    if attempts and attempts[-1].seconds is None and stage.state == "running":
        seconds = seconds + max(0.0, time.time() - attempts[-1].started)
        unended = unended - 1
    metrics = numbers(folder.json(run_dir / RESULT).get("metrics")) if attempts else {}
    fees = sum(
        value for name, value in metrics.items() if name.partition("/")[0] in FEES and math.isfinite(value)
    )
    return UsageLine(
        stage.name, len(attempts), unended, seconds, gpus_of(folder.request(run_dir).get("config", {})), fees
    )


def gpus_of(config: Mapping[str, Any]) -> float | None:
    """Returns the number of GPUs that a stage reserves; None when its configuration is from another
    version."""
    try:
        checked = CONFIG.validate_python(config)
        layouts = [arrange(groups, checked.together) for groups in checked.turns]
    except (ValueError, LookupError):
        return None
    return max((sum(bundle.get("GPU", 0.0) for bundle in layout.bundles) for layout in layouts), default=0.0)
