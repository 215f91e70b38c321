"""What the config says of frozen weights before any model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PPO, Data


def ppo(**fields: Any) -> PPO:
    return PPO.model_validate({"prompts": Data(sources="asks.jsonl"), **fields})


def test_freezing_all_of_the_language_model_needs_an_estimator_without_a_critic() -> None:
    projector = {"freeze": {"names": "*"}, "image_encoder": "projector"}
    with pytest.raises(ValidationError, match="leaves the critic no weight to train"):
        ppo(**projector)
    alone = ppo(**projector, advantage_estimator="grpo", n_samples_per_prompt=2)
    assert alone.freeze is not None and alone.freeze.names == ("*",)
    assert ppo(freeze={"names": "*.mlp.*"}).has_critic
