"""Configures DPO and its relatives, and KTO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data, TemplateArgs, template_mistakes
from rlhf_core.config.training.trainable import Trainable, TrainedPolicy
from rlhf_core.records import Config, Rate, check


class PreferenceLoss(Config):
    """Fields for the loss of DPO (Rafailov et al. 2023, eq. 7) and its relatives."""

    beta: Rate | None = Field(
        None,
        description="strength of the KL anchor; SimPO: scale of the log-probs; default: 0.1, for simpo 2",
    )
    loss: Literal["sigmoid", "ipo", "ipo_sum", "simpo", "orpo"] = Field(
        "sigmoid",
        description=(
            "sigmoid: DPO; ipo: Azar et al. 2023, with log-probs averaged over tokens; ipo_sum: with summed"
            " log-probs, as printed in the paper; without a reference: simpo (Meng et al. 2024), orpo (Hong"
            " et al. 2024)"
        ),
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="cDPO: probability that a label is flipped")
    nll_coef: float = Field(0.0, ge=0, description="weight of the token-mean NLL of the chosen response")
    gamma: float = Field(1.0, ge=0, description="SimPO: margin by which the chosen response must win")
    lambd: Rate = Field(0.1, description="ORPO: weight of the odds-ratio term relative to the NLL")

    @check
    def _check_loss(self) -> Iterator[str]:
        if self.loss != "sigmoid" and self.label_smoothing:
            yield f"label_smoothing applies only to loss 'sigmoid' (cDPO): set it to 0 for {self.loss!r}"
        if self.loss == "orpo" and (self.beta is not None or self.nll_coef):
            yield "loss 'orpo' has no beta and its own NLL term: leave beta and nll_coef out, and set lambd"
        if self.loss != "simpo" and self.gamma != 1:
            yield f"gamma applies only to loss 'simpo': leave it out for {self.loss!r}"
        if self.loss != "orpo" and self.lambd != 0.1:
            yield f"lambd applies only to loss 'orpo': leave it out for {self.loss!r}"


class UnpairedLoss(Config):
    """Fields for the weights in a KTO stage's loss (Ethayarajh et al. 2024, eq. 8)."""

    w_desirable: float = Field(1.0, ge=0, description="KTO: weight of desirable answers")
    w_undesirable: float = Field(1.0, ge=0, description="KTO: weight of undesirable answers")

    @check
    def _check_weights(self) -> Iterator[str]:
        if self.w_desirable + self.w_undesirable == 0:
            yield "w_desirable and w_undesirable are both 0, so nothing would be trained: raise one"


REFERENCE_FREE = ("simpo", "orpo")


class DirectAlignment(Trainable, TrainedPolicy):
    """Fields that dpo and kto stages share."""

    policy: str = Field("sft", description="model to train")
    reference: str | None = Field(None, description="reference model; default: the policy before training")
    template: str = Field(
        "chat",
        description="template for pairs or answers: 'chat' or a plain template with one {} for the prompt",
    )
    template_args: TemplateArgs = Field(
        {}, description="arguments of the chat template by name, for pairs or answers"
    )
    learning_rate: Rate = Field(5e-7, description="peak learning rate")

    @check
    def _check_template(self) -> Iterator[str]:
        yield from template_mistakes(self.template, self.template_args)


class DPO(DirectAlignment, PreferenceLoss):
    """Direct preference optimisation against the starting model, or against `reference`."""

    rows = "preference"
    stage: Literal["dpo"] = "dpo"
    data: Data | None = Field(None, description="preference pairs; or set pairs")
    pairs: str | None = Field(None, description="preferences stage whose pairs are the data")
    eval_data: Data | None = Field(None, description="held-out pairs")

    @check
    def _check_data(self) -> Iterator[str]:
        if (self.data is None) == (self.pairs is None):
            yield "a dpo stage needs exactly one of data (files) and pairs (the name of a preferences stage)"
        if self.reference is not None and self.loss in REFERENCE_FREE:
            yield f"loss {self.loss!r} uses no reference: leave reference out"


class KTO(DirectAlignment, UnpairedLoss):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024): trains on unpaired answers, each labelled
    desirable or undesirable."""

    rows = "labelled"
    stage: Literal["kto"] = "kto"
    data: Data | None = Field(
        None,
        description=(
            "rows with prompt, response and label (a preference pair counts as two answers); or set answers"
        ),
    )
    answers: str | None = Field(
        None, description="preferences stage whose labelled answers (or pairs) are the data"
    )
    eval_data: Data | None = Field(None, description="held-out answers, or pairs")
    beta: Rate = Field(0.1, description="strength of the KL anchor")
    train_batch_size: Annotated[int, Field(ge=2)] = Field(
        128, description="answers per optimiser step, all ranks together; the KL is estimated over them"
    )

    @check
    def _check_data(self) -> Iterator[str]:
        if (self.data is None) == (self.answers is None):
            yield (
                "a kto stage needs exactly one of data (files) and answers (the name of a preferences stage)"
            )
