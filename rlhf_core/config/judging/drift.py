"""Configures the drift check of a loop: what is compared, and how often anchors are judged again."""

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
    """Pairs of answers with past verdicts, which a judge judges again (docs/how-to/drift.md)."""

    pairs: Source = Field(description="rows with prompt, answer_a, answer_b and verdict: A, B or tie")
    judge: Judge = Field(description="judge whose verdicts are compared with those of the rows")
    days: Rate = Field(
        7.0,
        description=(
            "verdicts of an earlier result that are newer than this are reused; pairs with older ones are"
            " judged again"
        ),
    )

    @check
    def _judge_again(self) -> Iterator[str]:
        if self.pairs.is_inbox:
            yield f"{self.pairs.path} is an inbox, and anchors are kept pairs: name a file"
        if isinstance(self.judge, ChatJudge) and self.judge.verdict_cache is not None:
            yield (
                "anchors are judged anew, and verdict_cache would return old verdicts: leave it out of the"
                " judge"
            )


class Drift(Gated):
    """Compares the current state of a loop with a fixed past: prompts, answers, refusals, judge and reward
    model, anchors, KL."""

    stage: Literal["drift"] = "drift"
    model: str = Field(description="model of the present; a loop: its last round")
    reference: str = Field("sft", description="model of the past, such as the one that the loop started from")
    evaluation: str = Field(
        "evaluation", description="evaluation whose answers and judgments are read; both models answer in it"
    )
    prompts: Data = Field(description="prompts of the present, such as those of an inbox")
    past_prompts: Data = Field(description="prompts of the past, such as those that were trained on")
    anchors: Anchors | None = Field(None, description="pairs that are judged again at intervals")
    kl: bool = Field(
        False,
        description="measure the KL of the model from the reference; needs an evaluation at temperature 1",
    )
    max_prompts: Positive = Field(
        2000,
        description="at most this many: the last rows of prompts, and rows of past_prompts drawn by the seed",
    )
    prompt_max_len: Annotated[Positive, NotInDigest] = Field(
        1024,
        description="data reports count prompts with more tokens as cut; the comparison reads them whole",
    )
    bootstrap_rounds: Positive = Field(
        1000, description="bootstrap resamples, and permutations of the test of prompts"
    )

    @check
    def _two_models(self) -> Iterator[str]:
        if self.model == self.reference:
            yield (
                f"{self.model} is model and reference, and does not drift from itself: name another reference"
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
