"""The learning rate over the steps, and the weights that decay."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_core.config.training.optimiser_fields import Decayed
from rlhf_core.config.training.schedule_fields import ScheduleFields
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.learning_rate import learning_rate, tell_long_warmup
from tests.unit.training.test_frozen_weights import SHAPE


def rates(total: int, peak: float = 1.0, **fields: Any) -> list[float]:
    """Returns the rate of each step, and of one after the last."""
    schedule = ScheduleFields(**fields)
    return [learning_rate(step, total, peak, schedule) for step in range(total + 1)]


def test_the_default_warms_up_and_follows_a_cosine_to_its_floor() -> None:
    found = rates(100, warmup_ratio=0.1)
    assert found[:10] == pytest.approx([(k + 1) / 10 for k in range(10)]) and found[10] == 1.0
    assert found[55] == pytest.approx(0.55) and found[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(found[10:]))


@pytest.mark.parametrize("total", [1, 7, 100])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 1.0])
def test_the_default_is_this_cosine_to_the_last_bit(total: int, warmup_ratio: float) -> None:
    warmup = math.ceil(total * warmup_ratio)
    for step, rate in enumerate(rates(total, 3e-6, warmup_ratio=warmup_ratio)[:-1]):
        angle = math.pi * min(1.0, (step - warmup) / max(1, total - warmup))
        cosine = 3e-6 * (0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(angle)))
        assert rate == (3e-6 * (step + 1) / warmup if step < warmup else cosine)


def test_a_linear_schedule_falls_by_the_same_amount_at_each_step() -> None:
    found = rates(20, 2.0, schedule="linear", warmup_ratio=0, min_lr_ratio=0.5)
    assert found == pytest.approx([2.0 - k / 20 for k in range(21)])
    assert rates(4, schedule="linear", warmup_steps=2, min_lr_ratio=0) == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_a_constant_schedule_stays_at_its_peak_after_the_warm_up() -> None:
    assert rates(5, 2.0, schedule="constant", warmup_steps=2, min_lr_ratio=0.1) == [1.0, *[2.0] * 5]


def test_wsd_stays_at_its_peak_and_falls_in_the_last_share() -> None:
    found = rates(100, schedule="wsd", warmup_steps=10, decay_ratio=0.2, min_lr_ratio=0.1)
    assert found[9:80] == [1.0] * 71, "the fall begins at step 80"
    assert found[79:] == pytest.approx([*(1 - 0.9 * k / 20 for k in range(21)), 0.1])
    whole = rates(10, schedule="wsd", warmup_ratio=0, decay_ratio=1.0)
    assert whole[:-1] == pytest.approx(rates(10, schedule="linear", warmup_ratio=0)[1:])


@pytest.mark.parametrize(("total", "falling"), [(1, 1), (10, 1), (20, 2), (70, 7), (71, 8)])
def test_the_last_step_of_wsd_has_the_lowest_rate(total: int, falling: int) -> None:
    found = rates(total, schedule="wsd", warmup_steps=0, decay_ratio=0.1, min_lr_ratio=0.1)[:-1]
    assert found[-1] == pytest.approx(0.1) and found.count(1.0) == total - falling


def test_wsd_with_a_long_warm_up_falls_after_it() -> None:
    found = rates(10, schedule="wsd", warmup_steps=8, decay_ratio=0.5, min_lr_ratio=0)
    assert found == pytest.approx([*(k / 8 for k in range(1, 9)), 0.5, 0, 0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_every_rate_of_a_short_run_is_a_positive_number_up_to_the_peak(schedule: str) -> None:
    floor = 0.01 if schedule == "wsd" else 0.0
    for total in (1, 2, 3):
        for fields in ({}, {"warmup_steps": 0}, {"warmup_steps": 50}, {"warmup_ratio": 0.5}):
            found = rates(total, schedule=schedule, min_lr_ratio=floor, **fields)[:-1]
            assert all(0 < rate <= 1 for rate in found), (total, fields)


def test_warmup_steps_are_steps_and_one_that_is_too_long_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert rates(100, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(100, warmup_steps=4, warmup_ratio=0) == rates(100, warmup_steps=4)
    assert rates(10, warmup_steps=20)[9] == 0.5
    tell_long_warmup(10, ScheduleFields(warmup_steps=20))
    assert capsys.readouterr().out.startswith("warmup_steps=20, and this run has 10 optimiser steps")
    tell_long_warmup(20, ScheduleFields(warmup_steps=20))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "both set the length of the warm-up"),
        ({"schedule": "wsd", "warmup_ratio": 0.6, "decay_ratio": 0.5}, "more than all steps:"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ScheduleFields(**fields)


VECTORS = {
    "q_proj.bias",
    "k_proj.bias",
    "v_proj.bias",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def decayed(module: Policy | Scorer, decay: Decayed) -> set[str]:
    """Returns the weights that one step without any gradient has changed. A decayed weight is multiplied by
    1 - rate * weight_decay (Loshchilov and Hutter 2019)."""
    engine = TorchEngine(module, AdamW((0.9, 0.95), 0.5, 1.0, decay))
    before = {}
    for name, weight in module.model.named_parameters():
        with torch.no_grad():
            weight.add_(1.0)
        weight.grad = torch.zeros_like(weight)
        before[name] = weight.detach().clone()
    engine.step(0.1)
    changed = set()
    for name, weight in module.model.named_parameters():
        if not torch.equal(weight, before[name]):
            torch.testing.assert_close(weight.detach(), before[name] * 0.95)
            changed.add(name)
    return changed


@pytest.mark.parametrize("tied", [False, True])
def test_each_choice_decays_its_weights_of_a_policy(tied: bool) -> None:
    def module() -> Policy:
        return Policy(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)))

    every = {name for name, _ in module().model.named_parameters()}
    vectors = {
        name for name in every if name == "model.norm.weight" or any(name.endswith(end) for end in VECTORS)
    }
    outer = {name for name in every if "embed_tokens" in name or "lm_head" in name}
    assert len(outer) == 2 - tied
    assert decayed(module(), "all") == every
    assert decayed(module(), "matrices") == every - vectors
    assert decayed(module(), "hidden") == every - vectors - outer


def test_the_head_of_a_scorer_is_no_hidden_matrix() -> None:
    def module() -> Scorer:
        return Scorer(Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0)))

    outer = decayed(module(), "matrices") - decayed(module(), "hidden")
    assert outer == {"model.embed_tokens.weight", "score.weight"}
