"""float16 and heads in fp32: what is refused, which models of PPO are in float16, and what is in no digest."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import DPO, PPO, SFT, RewardModel

DATA = {"sources": "rows.jsonl"}


def sft(**fields: Any) -> SFT:
    return SFT.model_validate({"data": DATA, **fields})


def ppo(**fields: Any) -> PPO:
    return PPO.model_validate({"prompts": DATA, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dtype": "float16", "zero_stage": 0},
            "dtype=float16 needs DeepSpeed's loss scaling, but this stage uses plain torch: set zero_stage to 1, 2, 3"
            " or auto, or dtype to bfloat16",
        ),
        (
            {"dtype": "float16", "optimizer": "muon"},
            "this stage uses plain torch: set optimizer to adamw, or dtype",
        ),
        ({"dtype": "float16", "float8": True}, "float8 works only with bfloat16, but dtype is float16"),
        (
            {"fp32_head": True},
            "fp32_head computes the logits of 16-bit weights in fp32, but dtype is float32",
        ),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], message: str) -> None:
    for of_stage in (sft, ppo):
        with pytest.raises(ValidationError, match=message):
            of_stage(**fields)


@pytest.mark.parametrize("stage", ["auto", 1, 2, 3])
def test_one_rank_trains_float16_with_deepspeed(stage: Any) -> None:
    config = sft(dtype="float16", zero_stage=stage)
    assert not config.alone and [each.stage for each in config.shardings] == [1, 2, 3]
    assert sft(dtype="bfloat16").alone and sft(dtype="bfloat16").shardings[0].stage == 0


def test_float16_in_ppo_is_for_the_models_that_are_compared() -> None:
    roles = ("actor", "reference", "critic", "reward:reward_model")
    assert [ppo(dtype="float16").dtype_in(role) for role in roles] == ["float16"] * 2 + ["bfloat16"] * 2
    assert {ppo(dtype="float32").dtype_in(role) for role in roles} == {"float32"}
    model = RewardModel.model_validate({"data": DATA, "dtype": "float16"})
    assert model.dtype_in("model") == "float16"


def test_stages_without_a_policy_have_no_head_in_fp32() -> None:
    assert DPO.model_validate({"data": DATA, "dtype": "bfloat16", "fp32_head": True}).fp32_head
    with pytest.raises(ValidationError, match="fp32_head"):
        RewardModel.model_validate({"data": DATA, "dtype": "bfloat16", "fp32_head": True})
