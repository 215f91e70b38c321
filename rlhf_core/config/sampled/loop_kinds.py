"""Configures loops: rounds of sampling or of feedback, and training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data, Text
from rlhf_core.config.sampled.sampled_rounds import PostProcessor, Rounds
from rlhf_core.config.training.preference import PreferenceLoss, UnpairedLoss
from rlhf_core.config.training.trainable import Trainable, TrainedPolicy
from rlhf_core.records import NotInDigest, Positive, Rate, check


class Loop(Trainable, TrainedPolicy):
    """Rounds of training, each of which starts from the model of the previous round. The plan expands a loop
    into stages."""

    policy: str = Field("sft", description="model that the first round starts from")
    rounds: Positive = Field(2, le=1000, description="number of rounds, at most 1000")
    learning_rate: Rate = Field(5e-7, description="peak learning rate of each round")

    @check
    def _check_no_ema(self) -> Iterator[str]:
        if self.ema is not None:
            yield (
                "ema: each round of a loop exports only one model: leave ema out, or write the rounds as"
                " stages"
            )

    @check
    def _check_no_sweep(self) -> Iterator[str]:
        if self.sweep:
            yield (
                "sweep: a loop cannot have variants: sweep a stage before it, or write a loop for each value"
            )


class SampledLoop(Rounds, Loop):
    """Rounds of sampling answers, then training on them."""

    max_len: int = Field(
        0,
        ge=0,
        description="maximum sequence length in training, in tokens; 0: prompt_max_len + generate_max_len",
    )
    prompts_per_round: Positive = Field(1024, description="give each round the next slice of the prompts")


class IterativeDPO(SampledLoop, PreferenceLoss):
    """Rounds of a preferences stage and a dpo stage: `iterative` with the post-processor dpo."""

    stage: Literal["iterative_dpo"] = "iterative_dpo"
    post_processor: Literal["dpo"] = Field("dpo", description="pairs of the best and the worst answer")


class Iterative(SampledLoop, PreferenceLoss, UnpairedLoss):
    """Rounds of sampling, then training as `post_processor` requires: dpo, kto, or sft."""

    stage: Literal["iterative"] = "iterative"
    post_processor: PostProcessor = Field(
        description=(
            "how each round trains. dpo: DPO on pairs; kto: KTO on labelled answers; rejection_sampling,"
            " conditional_sft: SFT on answers"
        )
    )
    packing: Annotated[bool, NotInDigest] = Field(
        True, description="rejection_sampling, conditional_sft: pack several documents into a row"
    )

    @check
    def _check_owners(self) -> Iterator[str]:
        """Yields a sentence for each field that the chosen post-processor does not read, and for KTO batches
        of one answer."""
        if self.post_processor == "kto" and self.train_batch_size < 2:
            yield "post_processor 'kto' estimates its KL over train_batch_size answers: set it to 2 or more"
        for field, owners in POST_PROCESSOR_FIELDS.items():
            if (
                self.post_processor not in owners
                and getattr(self, field) != type(self).model_fields[field].default
            ):
                yield (
                    f"{field} applies only to post_processor {' or '.join(owners)}: leave it out for"
                    f" {self.post_processor!r}"
                )


class IterativeFeedback(Loop, PreferenceLoss, UnpairedLoss):
    """Rounds of training on people's feedback: each round takes the new rows of its inbox."""

    stage: Literal["iterative_feedback"] = "iterative_feedback"
    method: Literal["dpo", "kto"] = Field(
        description="dpo: train on edits and rankings, as pairs; kto: train on thumbs, as labelled answers"
    )
    feedback: Data = Field(
        description="an inbox (NAME.inbox), and optionally other sources, which are the same in each round"
    )
    min_new_rows: Annotated[Positive, NotInDigest] = Field(
        1, description="number of new rows for this method that the inbox must hold before a round starts"
    )

    @property
    def texts(self) -> Sequence[Text]:
        return [
            Text(
                "feedback",
                self.feedback,
                "preference" if self.method == "dpo" else "labelled",
                "max_len",
                self.max_len,
            )
        ]

    @property
    def new_rows_needed(self) -> int:
        return self.min_new_rows

    @check
    def _check_feedback(self) -> Iterator[str]:
        if not any(source.is_inbox for source in self.feedback.sources):
            yield (
                "feedback: no source is an inbox, so rounds would have no new rows: name a folder that ends"
                " with .inbox"
            )
        if self.method == "kto" and self.train_batch_size < 2:
            yield "method 'kto' estimates its KL over train_batch_size answers: set it to 2 or more"
        for field, owners in METHOD_FIELDS.items():
            if self.method not in owners and getattr(self, field) != type(self).model_fields[field].default:
                yield (
                    f"{field} applies only to method {' or '.join(owners)}: leave it out for {self.method!r}"
                )


METHOD_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("loss", "label_smoothing", "nll_coef", "gamma", "lambd"), ("dpo",)),
    **dict.fromkeys(UnpairedLoss.model_fields, ("kto",)),
}
POST_PROCESSOR_FIELDS: dict[str, tuple[PostProcessor, ...]] = {
    **dict.fromkeys(("loss", "label_smoothing", "nll_coef", "gamma", "lambd"), ("dpo",)),
    "beta": ("dpo", "kto"),
    **dict.fromkeys(UnpairedLoss.model_fields, ("kto",)),
    "packing": ("rejection_sampling", "conditional_sft"),
}
