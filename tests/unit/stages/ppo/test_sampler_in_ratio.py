"""`sampler_is: in_ratio`: the sampler's log-probs are the old policy, and the actor does not score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_core.stages.ppo.rewards.credit import distance_to_sampler, divergence
from rlhf_core.stages.ppo.roles.trained import Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout
from tests.support.recorded_rollout import OLD, SAMPLER, arrays, close, credited
from tests.support.recorded_rollout import ppo as recorded
from tests.support.tiny_roles import actor, experience, flat, models, plain_engine

__all__ = ["models", "plain_engine"]
IN_RATIO = {"sampler_is": "in_ratio", "advantage_estimator": "grpo", "init_kl_coef": 0.0}
STEPS = [Update([6, 2, 7], 1e-2, 0.0), Update([1, 0, 4, 3], 1e-2, 0.0)]


def of_sampler(items: list[Experience], gap: float) -> list[Experience]:
    """Experience whose old policy is a sampler that differs from the trainer by `gap` nats at each token."""
    return [replace(e, old_logprobs=e.old_logprobs - np.float32(gap), sampler_logprobs=None) for e in items]


@pytest.mark.usefixtures("plain_engine")
def test_without_a_gap_it_trains_as_with_scored_log_probs(models: Path) -> None:
    items = experience(models)
    usual = actor(models, **IN_RATIO | {"sampler_is": "truncate"})
    in_ratio = actor(models, **IN_RATIO)
    expected = usual.train(items, STEPS).metrics
    found = in_ratio.train(of_sampler(items, 0.0), STEPS).metrics
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(flat(in_ratio), flat(usual))


@pytest.mark.usefixtures("plain_engine")
def test_a_gap_is_in_the_ratio_and_counts_against_the_clip(models: Path) -> None:
    gap = 0.5  # a ratio of 1.65, beyond the clip at 1.2
    raised = [replace(e, advantages=1.0) for e in of_sampler(experience(models), gap)]
    role = actor(models, **IN_RATIO)
    before = flat(role)
    metrics = role.train(raised, STEPS[:1]).metrics[0]
    assert metrics["policy/ratio"] == pytest.approx(np.exp(gap), rel=1e-4)
    assert metrics["policy/clip_share"] == pytest.approx(1) and metrics["policy/grad_norm"] == 0
    assert flat(role).equal(before), "a clipped ratio has no gradient where the advantage is positive"


@pytest.mark.usefixtures("plain_engine")
def test_the_first_step_tells_the_log_probs_before_it(models: Path) -> None:
    items = experience(models)
    found = actor(models, **IN_RATIO).train(of_sampler(items, 0.1), STEPS).logprobs
    assert sorted(i for i, _ in found) == sorted(STEPS[0].indices), "later steps have other weights"
    for i, values in found:
        mask = items[i].document.mask_array
        np.testing.assert_allclose(values[mask], items[i].old_logprobs[mask], atol=1e-5)
    assert actor(models, sampler_is="off").train(items, STEPS).logprobs == []


def test_distances_are_those_of_the_answers_that_were_measured() -> None:
    usual = credited(recorded(n_samples_per_prompt=2))
    rollouts = [
        Rollout(None, item.document, sampler, True)  # type: ignore[arg-type]
        for item, sampler in zip(usual.experience, arrays(SAMPLER), strict=True)
    ]
    config = recorded(sampler_is="in_ratio")
    old = arrays(OLD)
    told = divergence(rollouts, arrays(SAMPLER), None, [0, 1], 0.1, config).metrics
    assert not [name for name in told if name.startswith("sampler/")], "they are the sampler's own"
    whole = distance_to_sampler(rollouts, list(enumerate(old)), config)
    assert whole["sampler/gap"] == close(usual.metrics["sampler/gap"]) and whole["sampler/gap"] > 0
    assert whole["sampler/capped"] == 0 and whole["sampler/weight_mean"] == 1, "the loss has no weights"
    part = distance_to_sampler(rollouts, [(1, old[1])], config)
    assert part["sampler/gap"] == close(np.abs(old[1] - arrays(SAMPLER)[1])[1:].mean())
    assert distance_to_sampler(rollouts, [], config) == {}, "the actor was frozen"


def test_the_actor_scores_only_for_its_reference() -> None:
    assert recorded(sampler_is="truncate").scorings["actor"] == 1
    assert recorded(sampler_is="in_ratio").scorings["actor"] == 0
    with_adapters = recorded(sampler_is="in_ratio", lora={})
    assert with_adapters.reference_in_actor and with_adapters.scorings["actor"] == 1
