"""Configures a chat model that judges answers, as a source of rewards (docs/how-to/judged-rewards.md)."""

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
    """A criterion by which a judge rates an answer."""

    name: str = Field(
        description="name of the criterion, one or a few words, which the judge repeats",
        pattern=r"^[A-Za-z]([\w -]{0,38}\w)?$",
    )
    text: str = Field(description="what to rate, and what makes an answer good", min_length=1)
    weight: Rate = Field(1.0, description="weight in the reward, relative to the other criteria")


class LabelledPairs(Config):
    """Labelled pairs of answers that a judge must agree with before its rewards are used."""

    data: Source = Field(description="held-out rows with a prompt and two answers, chosen and rejected")
    min: Share = Field(
        0.7,
        description=(
            "minimum share of pairs on which the judge agrees (ties count half); below it the stage stops"
            " before its engines start"
        ),
    )
    limit: Positive = Field(200, description="maximum number of pairs, taken from the start")

    @field_validator("data", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @check
    def _check_data(self) -> Iterator[str]:
        if self.data.is_inbox:
            yield (
                f"{self.data.path} is an inbox, but a judge is checked against a fixed set of pairs: name a"
                " file"
            )


class JudgeReward(StandardisedReward):
    """A chat model that judges each answer. The lowest rating of `scale` gives reward 0, the highest gives 1.
    With `compare`, the reward is the fraction of pairs that the answer wins."""

    kind: Literal["judge"] = "judge"
    judge: JudgingModel = Field(
        description="the chat model: behind an endpoint, or, with another kind, on this stage's own engines"
    )
    rubric: str | None = Field(
        None,
        description="what to rate, and what makes an answer good; alternatively set criteria",
        min_length=1,
    )
    criteria: tuple[Criterion, ...] = Field(
        (),
        description=(
            "criteria to rate one by one, in one reply; the reward is the weighted mean of their ratings"
        ),
    )
    scale: tuple[float, float] = Field(BEST_OF_TEN, description="the worst and the best rating")
    reference: str | None = Field(
        None,
        description="column of the prompts' rows with a reference answer to show the judge",
        min_length=1,
    )
    compare: Literal["none", "reference", "group"] = Field(
        "none",
        description=(
            "let the judge compare answers instead of rating them, each pair in both orders. reference: each"
            " answer with the reference answer; group: with other answers to the prompt"
        ),
    )
    pairs_per_answer: Positive = Field(
        FEW_PAIRS,
        description=(
            "compare group: number of pairs that each answer is in, at most all pairs of the prompt; one more"
            " if this number and the number of answers are both odd"
        ),
    )
    agreement: LabelledPairs | None = Field(
        None, description="labelled pairs that the judge must agree with; default: no check"
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
            yield "a judge needs instructions on what to rate: set either rubric or criteria"
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
            yield "compare: reference needs a column with reference answers: set reference"
        if self.compare != "none" and self.criteria:
            yield "criteria are rated one by one, but compare needs a single verdict: write them into rubric"
        if self.compare != "none" and self.scale != BEST_OF_TEN:
            yield "scale applies only to ratings, but compare asks which answer is better: leave it out"
        if self.compare != "group" and self.pairs_per_answer != FEW_PAIRS:
            yield "pairs_per_answer applies only to compare: group: leave it out"

    @check
    def _check_scale(self) -> Iterator[str]:
        low, high = self.scale
        if low >= high:
            yield f"scale: {low:g} is not below {high:g}: write the worst rating first, then the best"
