"""Configures the drift check of a loop: what it compares, and how often it judges the anchors again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data, Source, Text
from rlhf_core.config.gates import AskedServer, Gated, chat_servers
from rlhf_core.config.judging.judges import ChatJudge, Judge, VllmJudge, names_of_judge
from rlhf_core.config.process_groups import Groups
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.records import Config, NotInDigest, Positive, Rate, check


class Anchors(Config):
    """Pairs of answers with past verdicts, which a judge compares again (docs/how-to/drift.md)."""

    pairs: Source = Field(description="rows with prompt, answer_a, answer_b and verdict (A, B or tie)")
    judge: Judge = Field(description="judge whose verdicts are compared with the verdicts in the rows")
    days: Rate = Field(
        7.0,
        description=(
            "age in days up to which verdicts of an earlier result are reused; older pairs are judged again"
        ),
    )

    @check
    def _judge_again(self) -> Iterator[str]:
        if self.pairs.is_inbox:
            yield f"{self.pairs.path} is an inbox, but anchors are a fixed set of pairs: name a file"
        if isinstance(self.judge, ChatJudge) and self.judge.verdict_cache is not None:
            yield "anchors need new verdicts, but verdict_cache returns old ones: leave it out of the judge"


class Drift(Gated):
    """Compares the current state of a loop with a fixed past: prompts, answers, refusals, judge and reward
    model, anchors, KL."""

    stage: Literal["drift"] = "drift"
    model: str = Field(description="current model; for a loop: its last round")
    reference: str = Field("sft", description="past model, such as the one that the loop started from")
    evaluation: str = Field(
        "evaluation", description="evaluation to read answers and judgments from; it must include both models"
    )
    prompts: Data = Field(description="current prompts, such as those of an inbox")
    past_prompts: Data = Field(description="past prompts, such as those used in training")
    anchors: Anchors | None = Field(
        None, description="pairs that are judged again at intervals; default: none"
    )
    kl: bool = Field(
        False,
        description="measure the KL of the model to the reference; needs an evaluation at temperature 1",
    )
    max_prompts: Positive = Field(
        2000,
        description=(
            "maximum number of rows: the last rows of prompts, and rows of past_prompts drawn by the seed"
        ),
    )
    prompt_max_len: Annotated[Positive, NotInDigest] = Field(
        1024,
        description=(
            "prompt length in tokens above which data reports count a prompt as cut; the comparison reads"
            " whole prompts"
        ),
    )
    bootstrap_rounds: Positive = Field(
        1000, description="number of bootstrap resamples, and of permutations in the test of the prompts"
    )

    @check
    def _two_models(self) -> Iterator[str]:
        if self.model == self.reference:
            yield (
                f"{self.model} is both model and reference, so there is no drift to measure: name another"
                " reference"
            )

    @property
    def texts(self) -> Sequence[Text]:
        limit = "prompt_max_len", self.prompt_max_len
        return [
            Text("prompts", self.prompts, "prompt", *limit, to_newest=True),
            Text("past_prompts", self.past_prompts, "prompt", *limit),
        ]

    @property
    def nested_names(self) -> Sequence[tuple[str, str, str]]:
        return names_of_judge("anchors.judge", self.anchors.judge) if self.anchors else ()

    @property
    def turns(self) -> Sequence[Groups]:
        return (
            [{"judge": self.anchors.judge.engine}]
            if self.anchors and isinstance(self.anchors.judge, VllmJudge)
            else [{}]
        )

    @property
    def servers(self) -> Sequence[AskedServer]:
        judge = self.anchors.judge if self.anchors else None
        return chat_servers([(f"the judge {judge.model}", judge)]) if isinstance(judge, Remote) else []
