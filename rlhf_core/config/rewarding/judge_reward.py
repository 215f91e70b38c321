"""A chat model that rates answers, as a source of rewards (docs/how-to/judged-rewards.md)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from rlhf_core.config.data import Source
from rlhf_core.config.rewarding.judge_models import JudgingModel, with_kind
from rlhf_core.config.rewarding.weighed_reward import StandardisedReward
from rlhf_core.records import Config, Positive, Rate, Share, check

BEST_OF_TEN = (1.0, 10.0)
FEW_PAIRS = 4


class Criterion(Config):
    """One of several things that a judge rates in an answer."""

    name: str = Field(
        description="one word or a few, which the judge repeats", pattern=r"^[A-Za-z]([\w -]{0,38}\w)?$"
    )
    text: str = Field(description="what to rate, and what a good answer has", min_length=1)
    weight: Rate = Field(1.0, description="share in the reward, relative to the other criteria")


class LabelledPairs(Config):
    """Pairs of answers with a label, which a judge must agree with before it rewards."""

    data: Source = Field(description="rows with a prompt and two answers, chosen and rejected, held out")
    min: Share = Field(
        0.7, description="share of pairs, ties half, below which the stage stops before its engines start"
    )
    limit: Positive = Field(200, description="at most this many pairs, the first")

    @field_validator("data", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @check
    def _check_data(self) -> Iterator[str]:
        if self.data.is_inbox:
            yield f"{self.data.path} is an inbox, and a judge is held against kept pairs: name a file"


class JudgeReward(StandardisedReward):
    """A chat model that judges each answer. The lowest number of `scale` is the reward 0, the highest 1; with
    `compare`, the reward is the share of pairs that the answer wins."""

    kind: Literal["judge"] = "judge"
    judge: JudgingModel = Field(
        description="the chat model: behind an endpoint, or with kind vllm a model of this run"
    )
    rubric: str | None = Field(
        None, description="what to rate, and what a good answer has; in its place: criteria", min_length=1
    )
    criteria: tuple[Criterion, ...] = Field(
        (), description="things to rate one by one, in one reply; the reward is their weighted mean"
    )
    scale: tuple[float, float] = Field(BEST_OF_TEN, description="the worst and the best rating")
    reference: str | None = Field(
        None,
        description="column of the prompts' rows with a reference answer that the judge is shown",
        min_length=1,
    )
    compare: Literal["none", "reference", "group"] = Field(
        "none",
        description=(
            "in place of ratings, the judge compares: each answer with the reference answer, or with other"
            " answers to the prompt; each pair in both orders"
        ),
    )
    pairs_per_answer: Positive = Field(
        FEW_PAIRS,
        description=(
            "compare group: pairs that each answer is in, at most all of its prompt; one more if this and the"
            " number of answers are odd"
        ),
    )
    agreement: LabelledPairs | None = Field(
        None, description="labelled pairs that the judge must agree with; default: it is not checked"
    )

    @property
    def title(self) -> str:
        return self.name or re.sub(r"[^\w.:-]", "_", self.judge.model.rstrip("/").rpartition("/")[2])

    @field_validator("judge", mode="before")
    @classmethod
    def _with_kind(cls, value: Any) -> Any:
        return with_kind(value)

    @check
    def _check_rubric(self) -> Iterator[str]:
        if (self.rubric is None) == (not self.criteria):
            yield "a judge needs to know what to rate: set either rubric or criteria"
        repeated = [
            name
            for name, count in Counter(criterion.name.lower() for criterion in self.criteria).items()
            if count > 1
        ]
        if repeated:
            yield f"two criteria are called {repeated[0]!r}: give one of them another name"

    @check
    def _check_compare(self) -> Iterator[str]:
        if self.compare == "reference" and self.reference is None:
            yield "compare: reference needs the column of the reference answers: set reference"
        if self.compare != "none" and self.criteria:
            yield "criteria are rated one by one, and compare asks for one verdict: write them into rubric"
        if self.compare != "none" and self.scale != BEST_OF_TEN:
            yield "scale is for ratings, and compare asks which answer is better: leave it out"
        if self.compare != "group" and self.pairs_per_answer != FEW_PAIRS:
            yield "pairs_per_answer is for compare: group: leave it out"

    @check
    def _check_scale(self) -> Iterator[str]:
        low, high = self.scale
        if low >= high:
            yield f"scale: {low:g} is not below {high:g}: write the worst rating first, then the best"
