"""A suite of questions that must not be lost again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlhf_core.config.data import Source
from rlhf_core.config.evaluation import ChatJudge, Evaluation
from rlhf_core.records import Rate, check


class Regression(Evaluation):
    """A suite of questions that models lost or people reported, judged as in an evaluation: which pass, newly fail or recover, and whether
    the final model's share is within the band of earlier trusted results."""

    stage: Literal["regression"] = "regression"  # type: ignore[assignment]
    questions: Source = Field(description="the suite: a file that `alignflow suite add` writes, or rows with uid, prompt and reason")
    parents: dict[str, str] | None = Field({}, description="model: the model it is also judged against; default: none")
    history: int = Field(
        5, ge=0, description="this many earlier results of the stage, those whose gates passed, make the band; 0: there is none"
    )
    band: Rate = Field(3.0, description="half width of the band, in standard deviations")

    @check
    def _check_judges(self) -> Iterator[str]:
        if any(isinstance(judge, ChatJudge) and judge.interval_width is not None for judge in self.judges):
            yield "a regression suite judges all its questions: leave interval_width out of its judges"
