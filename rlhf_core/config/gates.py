"""The base of every stage's config, and what a stage must reach before those that depend on it start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlhf_core.config.data import Text
from rlhf_core.config.processes import Groups
from rlhf_core.records import Config, Frozen, NotInDigest, check

OnFail = Literal["stop", "warn", "branch"]


class Gate(Config, allow_inf_nan=True):
    """A bound on one metric of a stage's result. A metric that is missing or not finite fails it."""

    metric: str = Field(description="metric of the stage's result, such as eval/loss")
    min: float | None = Field(None, description="the metric must be at least this")
    max: float | None = Field(None, description="the metric must be at most this")
    on_fail: OnFail = Field(
        "stop",
        description="stop: nothing more is started; warn: only a message; branch: stages that depend on this one are skipped, others run",
    )

    @check
    def _check_bounds(self) -> Iterator[str]:
        if self.min is None and self.max is None:
            yield f"a gate on {self.metric} needs a bound: set min, max or both"
        if any(bound is not None and not math.isfinite(bound) for bound in (self.min, self.max)):
            yield f"a bound of the gate on {self.metric} is not a finite number: correct min or max"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield f"min={self.min:g} is above max={self.max:g}: nothing could pass the gate on {self.metric}"

    @property
    def bound(self) -> str:
        bounds = [f"at least {self.min:g}" if self.min is not None else "", f"at most {self.max:g}" if self.max is not None else ""]
        return " and ".join(filter(None, bounds))

    def passes(self, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class Verdict(Frozen):
    """The result of a gate. `value` None: the result has no such metric. `meaning` is empty unless the gate failed."""

    stage: str
    gate: Gate
    value: float | None
    passed: bool
    meaning: str = ""

    @property
    def summary(self) -> str:
        """Returns the metric, its value and the bound as one sentence without a full stop."""
        found = f"{self.gate.metric} is {self.value:.6g}" if self.value is not None else f"its result has no metric {self.gate.metric}"
        return f"stage {self.stage}: {found}, and the gate requires {self.gate.bound}"

    def record(self) -> dict[str, Any]:
        """Returns a flat, JSON-ready record for `summary.json`."""
        return {**self.gate.model_dump(), "value": self.value, "passed": self.passed, "meaning": self.meaning}


class Key(NamedTuple):
    """A key that a stage reads from the environment. `reader` needs it, for messages; not `required`: only if it is set."""

    reader: str
    variable: str
    required: bool = True


class Gated(Config):
    """A stage with gates. Gates change no result and are not in its digest."""

    stage: str = Field(description="kind of the stage")
    gates: Annotated[tuple[Gate, ...], NotInDigest] = Field(
        (), description="bounds on this stage's metrics, checked before a stage that depends on it starts"
    )

    @property
    def turns(self) -> Sequence[Groups]:
        """Its groups of processes by name; only those of one turn run at the same time."""
        return [{}]

    @property
    def together(self) -> Sequence[Sequence[str]]:
        """Names of groups that share GPUs."""
        return ()

    @property
    def texts(self) -> Sequence[Text]:
        """The data sets that it reads from files."""
        return ()

    @property
    def needed_keys(self) -> Sequence[Key]:
        """The keys that it reads from the environment."""
        return ()
