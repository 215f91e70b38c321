"""Supervised fine-tuning and the reward model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.data import Data
from rlhf_core.config.training import ROUTER, Trainable
from rlhf_core.types import Rate


class SFT(Trainable):
    """Supervised fine-tuning: token-mean NLL over assistant tokens."""

    stage: Literal["sft"] = "sft"
    model: str = Field("base", description="model to train")
    data: Data | None = Field(None, description="rows with messages, or prompt and response (condition reward: these); or set answers")
    answers: str | None = Field(None, description="a preferences stage whose answers are the data (rejection_sampling, conditional_sft)")
    template: str = Field("chat", description="template of those answers: 'chat' or a plain one with one {}")
    eval_data: Data | None = Field(None, description="held-out rows for the evaluation loss")
    router_aux_coef: float = Field(0.0, ge=0, description=ROUTER)
    packing: bool = Field(True, description="pack documents into rows of max_len (best fit); attention never crosses them")
    condition: Literal["none", "reward"] = Field(
        "none", description="reward: conditional SFT, the prompt ends with the standardised reward of its answer (column reward_key)"
    )

    @model_validator(mode="after")
    def _check_data(self) -> SFT:
        if (self.data is None) == (self.answers is None):
            raise ValueError("an sft stage needs exactly one of data (files) and answers (the name of a preferences stage)")
        return self


class RewardModel(Trainable):
    """Bradley-Terry reward model (Ouyang et al. 2022, eq. 1) with an optional margin (Llama 2, eq. 2)."""

    stage: Literal["reward_model"] = "reward_model"
    model: str = Field("sft", description="backbone; the scalar head starts at zero")
    data: Data = Field(description="rows with prompt, chosen and rejected")
    eval_data: Data | None = Field(None, description="held-out pairs: accuracy, score mean and std are measured on them")
    loss: Literal["sigmoid", "logexp"] = Field(
        "sigmoid", description="-log sigmoid(d - margin), or log(1 + exp(margin - d)): two names of one function, the margin counts in both"
    )
    centering: float = Field(0.0, ge=0, description="coefficient of (r_chosen + r_rejected)^2 (Eisenstein et al. 2023)")
    learning_rate: Rate = Field(9e-6, description="peak learning rate")
