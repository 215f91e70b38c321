"""Defines the base of every stage's config, and the gates that a stage must pass before its dependents
start."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field

from rlhf_core.config.data import Source, Text
from rlhf_core.config.process_groups import Groups
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.records import Config, Frozen, NotInDigest, check

OnFail = Literal["stop", "warn", "branch"]


class Approve(Config):
    """A person's decision on a stage's result (docs/how-to/approval.md)."""

    by: Literal["human"] = Field("human", description="who decides")
    within: str = Field("48h", description="time to decide, counted from the first request: 30m, 48h, 7d, 2w")

    @check
    def _check_within(self) -> Iterator[str]:
        if not re.fullmatch(r"[1-9][0-9]{0,3}[mhdw]", self.within):
            yield (
                f"within {self.within[:40]!r} is not a duration: write minutes, hours, days or weeks, such as"
                " 30m, 48h, 7d or 2w"
            )

    @property
    def time(self) -> timedelta:
        """The time allowed for the decision."""
        unit = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[self.within[-1]]
        return timedelta(**{unit: int(self.within[:-1])})


class Gate(Config, allow_inf_nan=True):
    """A bound on one metric of a stage's result, or a person's approval. A missing or non-finite metric fails
    the gate."""

    metric: str = Field("", description="metric of the stage's result, such as eval/loss")
    approve: Approve | None = Field(
        None,
        description=(
            "use instead of a metric: stages that depend on this one wait until a person approves it"
        ),
    )
    min: float | None = Field(None, description="the metric must be at least this")
    max: float | None = Field(None, description="the metric must be at most this")
    on_fail: OnFail = Field(
        "stop",
        description=(
            "stop: no further stage starts; warn: only a message; branch: stages that depend on this one are"
            " skipped, others run"
        ),
    )

    @check
    def _check_bounds(self) -> Iterator[str]:
        if self.approve is not None:
            if self.metric or self.min is not None or self.max is not None:
                yield "a gate has either a metric with a bound or approve: write two gates"
            if self.on_fail == "warn":
                yield "on_fail: warn would ignore a refused approval: leave on_fail out, or set it to branch"
            return
        if not self.metric:
            yield "a gate needs a metric with a bound, or approve"
        elif self.min is None and self.max is None:
            yield f"a gate on {self.metric} needs a bound: set min, max or both"
        if any(bound is not None and not math.isfinite(bound) for bound in (self.min, self.max)):
            yield f"the gate on {self.metric} has a bound that is not a finite number: correct min or max"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield (
                f"min={self.min:g} is above max={self.max:g}, so nothing can pass the gate on {self.metric}:"
                " correct one of them"
            )

    @property
    def what(self) -> str:
        """The metric, or `approval`, for tables."""
        return "approval" if self.approve else self.metric

    @property
    def bound(self) -> str:
        if self.approve:
            return f"a person approves within {self.approve.within}"
        bounds = [
            f"at least {self.min:g}" if self.min is not None else "",
            f"at most {self.max:g}" if self.max is not None else "",
        ]
        return " and ".join(filter(None, bounds))

    def passes(self, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class Verdict(Frozen):
    """The result of a gate. `value` is None when the result lacks the metric. `meaning` is empty unless the
    gate failed.

    For an approval, `said` holds the decision in words, and `waits` is true while the decision is open.
    """

    stage: str
    gate: Gate
    value: float | None
    passed: bool
    meaning: str = ""
    said: str = ""
    waits: bool = False

    @property
    def word(self) -> Literal["passed", "waits", "failed"]:
        """The result in one word."""
        if self.passed:
            return "passed"
        return "waits" if self.waits else "failed"

    @property
    def summary(self) -> str:
        """Returns the metric, its value and the bound as one sentence without a full stop."""
        if self.gate.approve:
            return f"stage {self.stage}: {self.said}"
        found = (
            f"{self.gate.metric} is {self.value:.6g}"
            if self.value is not None
            else f"its result has no metric {self.gate.metric}"
        )
        return f"stage {self.stage}: {found}, and the gate requires {self.gate.bound}"

    def record(self) -> dict[str, Any]:
        """Returns a flat, JSON-ready record for `summary.json`."""
        gate = self.gate.model_dump(exclude={"approve"} if self.gate.approve is None else None)
        if self.gate.approve:
            return {
                **gate,
                "value": None,
                "passed": self.passed,
                "waits": self.waits,
                "said": self.said,
                "meaning": self.meaning,
            }
        return {**gate, "value": self.value, "passed": self.passed, "meaning": self.meaning}


class Key(NamedTuple):
    """A key that a stage reads from the environment. `reader`: the name that messages give to what needs the
    key. A key that is not `required` is used only if it is set."""

    reader: str
    variable: str
    required: bool = True


class AskedServer(NamedTuple):
    """A server that a stage sends requests to but does not start. `reader`: the name that messages give to
    the sender. `key_variable`: the environment variable whose key is sent; None: no key is sent. `chat`: the
    model of a chat endpoint."""

    reader: str
    address: str
    key_variable: str | None
    chat: Remote | None = None


def chat_servers(readers: Iterable[tuple[str, Remote]]) -> list[AskedServer]:
    """Returns the servers of models behind endpoints; each key is the model's name in messages."""
    return [AskedServer(title, one.base_url, one.key_variable, one) for title, one in readers]


class Asked(NamedTuple):
    """Questions and the maximum number to use."""

    source: Source
    most: int | None


class Gated(Config):
    """A stage with gates. Gates do not affect the result and are not in the stage's digest."""

    stage: str = Field(description="kind of the stage")
    gates: Annotated[tuple[Gate, ...], NotInDigest] = Field(
        (), description="bounds on this stage's metrics, checked before dependent stages start"
    )

    @property
    def turns(self) -> Sequence[Groups]:
        """The turns of the stage, each a mapping of group names to processes. Only the groups of one turn run
        at the same time."""
        return [{}]

    @property
    def together(self) -> Sequence[Sequence[str]]:
        """The names of groups that share GPUs."""
        return ()

    @property
    def texts(self) -> Sequence[Text]:
        """The data sets of the stage, each with its row type and token limit."""
        return ()

    @property
    def servers(self) -> Sequence[AskedServer]:
        """The servers that the stage sends requests to but does not start."""
        return ()

    @property
    def needed_keys(self) -> Sequence[Key]:
        """The keys that the stage reads from the environment."""
        return [Key(server.reader, server.key_variable) for server in self.servers if server.key_variable]

    @property
    def nested_names(self) -> Sequence[tuple[str, str, str]]:
        """The models that the kind's `names` does not include. Each entry holds the place in the config, the
        name, and the output that a stage of this name must have."""
        return ()

    @property
    def remote_models(self) -> Collection[str] | None:
        """The names of models behind endpoints; None if the stage can have none."""
        return None

    @property
    def asks(self) -> Asked | None:
        """The questions on which the stage judges models, or None; none of these models may be trained on
        them."""
        return None

    @property
    def judges_of_answers(self) -> Sequence[Any]:
        """The judges of the models' answers. The first decides."""
        return ()

    @property
    def final_model(self) -> str | None:
        """The model that metrics without a model's name describe; None: they describe every model that the
        stage uses."""
        return None

    @property
    def published_model(self) -> str | None:
        """The model that the stage publishes, or None if it publishes none."""
        return None

    @property
    def answering(self) -> Sequence[tuple[str, str]]:
        """The field and name of each model that answers on the engines of the group `sampler`."""
        return ()

    @property
    def talks_to(self) -> Mapping[str, Environment]:
        """The environments that the stage's model interacts with, by their place in the config."""
        return {}

    @property
    def exports(self) -> Sequence[str]:
        """The names of additional models that the stage exports; other stages refer to them as
        STAGE.EXPORT."""
        return ()

    @property
    def variants(self) -> Mapping[str, Self]:
        """The configs of a swept stage's variants by name suffix; empty without a sweep."""
        return {}

    @property
    def new_rows_needed(self) -> int | None:
        """How many new rows in its inbox start a round of a feedback loop; None for other stages."""
        return None

    @property
    def made_for(self) -> str | None:
        """The post-processor applied to the stage's answers; None if the stage has none."""
        return None

    def tokenizer_model(self, start: str) -> str | None:
        """Returns the name of the model whose tokenizer the stage uses, or None if there is none. `start`:
        the field of its kind that names the start model."""
        return getattr(self, start, None)

    def loads(self, place: str) -> bool:
        """Returns whether the stage loads the model named at this place of its config into PyTorch."""
        return False

    def lengths(self, start: str) -> Mapping[tuple[str, str], tuple[int, str]]:
        """Returns the longest input in tokens of each model, by place (empty, or a field) and name, with the
        fields that set it. `start`: name of the start model."""
        return {}

    def rows_made(self, prompts: int) -> int:
        """Returns the maximum number of training rows that the stage makes for other stages from this many
        prompts."""
        return 0
