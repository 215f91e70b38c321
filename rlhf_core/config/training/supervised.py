"""Configures SFT and the reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data, TemplateArgs, Text, template_mistakes
from rlhf_core.config.training.trainable import Trainable, TrainedPolicy
from rlhf_core.records import NotInDigest, Rate, check


class SFT(Trainable, TrainedPolicy):
    """Supervised fine-tuning: token-mean NLL over assistant tokens."""

    rows = "sft"
    stage: Literal["sft"] = "sft"
    model: str = Field("base", description="model to train")
    data: Data | None = Field(
        None,
        description=(
            "rows with messages, or with prompt and response (required for condition reward); or set answers"
        ),
    )
    answers: str | None = Field(
        None,
        description="preferences stage whose answers are the data (rejection_sampling, conditional_sft)",
    )
    template: str = Field(
        "chat",
        description="with answers: 'chat' or a plain template with one {} for the prompt",
    )
    template_args: TemplateArgs = Field(
        {}, description="with answers: arguments of the chat template by name"
    )
    eval_data: Data | None = Field(None, description="held-out rows for the evaluation loss")
    packing: Annotated[bool, NotInDigest] = Field(
        True, description="pack several documents into a row (best fit); attention never crosses them"
    )
    condition: Literal["none", "reward"] = Field(
        "none",
        description=(
            "reward: conditional SFT, where the prompt ends with the standardised reward of its answer"
            " (column reward_key)"
        ),
    )

    @property
    def packs(self) -> bool:
        """Whether a row may hold several documents."""
        return self.packing or self.micro_train_tokens is not None

    @check
    def _check_data(self) -> Iterator[str]:
        yield from template_mistakes(self.template, self.template_args)
        if (self.data is None) == (self.answers is None):
            yield (
                "an sft stage needs exactly one of data (files) and answers (the name of a preferences stage)"
            )

    @property
    def texts(self) -> Sequence[Text]:
        return [
            text._replace(rows="scored") if self.condition == "reward" else text for text in super().texts
        ]


class RewardModel(Trainable):
    """Bradley-Terry reward model (Ouyang et al. 2022, eq. 1) with an optional margin (Llama 2, eq. 2)."""

    rows = "preference"
    stage: Literal["reward_model"] = "reward_model"
    model: str = Field(
        "sft",
        description=(
            "model to start from: a language model gets a scalar head of zeros; a reward model keeps its"
            " trained head and continues from its scores"
        ),
    )
    data: Data = Field(description="rows with prompt, chosen and rejected")
    eval_data: Data | None = Field(
        None, description="held-out pairs, on which accuracy, score mean and std are measured"
    )
    centering: float = Field(
        0.0, ge=0, description="coefficient of (r_chosen + r_rejected)^2 (Eisenstein et al. 2023)"
    )
    learning_rate: Rate = Field(9e-6, description="peak learning rate")

    @check
    def _check_policy_fields(self) -> Iterator[str]:
        if self.ema is not None:
            yield (
                "ema works only for policies, because an averaged reward model would need its own score"
                " statistics: leave it out"
            )
