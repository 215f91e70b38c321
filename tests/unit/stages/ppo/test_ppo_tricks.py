"""The ten tricks that keep PPO stable, each with the test that fails when it is broken
(docs/explanation/ppo.md), and the family.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Document
from rlhf_core.models.reward_scoring import STATISTICS
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.stages.ppo.iteration_loop import adapted
from rlhf_core.stages.ppo.ppo_setup import model_paths, schedule_of, setup_of
from rlhf_core.stages.ppo.roles.read_only import Reward
from rlhf_core.stages.ppo.roles.trained import Update
from tests.support.tiny_roles import (
    PATHS,
    actor,
    credited,
    critic,
    documents,
    drawn,
    experience,
    flat,
    model,
    models,
    plain_engine,
    ppo,
    said,
)

__all__ = ["models", "plain_engine"]

# 1. The reward stands on the last token only.


def test_the_reward_is_paid_on_the_last_token_only() -> None:
    # gamma 0: an advantage is the token's own reward minus its value
    found = credited(ppo(gamma=0, whiten_advantages=False))
    for i, (earned, values) in enumerate(zip(said(found, "returns"), said(found, "values"), strict=True)):
        assert earned[:-1] == pytest.approx(0, abs=1e-6) and earned[-1] == pytest.approx(i, abs=1e-6)
        assert said(found, "advantages")[i] == pytest.approx(earned - values, abs=1e-6)
    spread = credited(ppo(gamma=0, whiten_advantages=False, reward_at="every_token"))
    for i, earned in enumerate(said(spread, "returns")):
        assert earned == pytest.approx(np.full(len(earned), i / len(earned)), abs=1e-6)


# 2. Token-level RL: every token is an action with a ratio of its own.


def test_each_token_has_its_own_ratio(models: Path, plain_engine: None) -> None:
    items = experience(models)
    moved = [
        e.__class__(**{**vars(e), "old_logprobs": e.old_logprobs - np.linspace(0, 0.6, len(e.document))})
        for e in items
    ]
    shares = {
        ratio: actor(models, ratio=ratio).train(moved, [Update(list(range(8)), 1e-9, 0.0)]).metrics[0]
        for ratio in ("token", "sequence")
    }
    tokens = [np.exp(np.linspace(0, 0.6, len(e.document))[2:]) for e in moved]
    assert shares["token"]["policy/ratio"] == pytest.approx(np.concatenate(tokens).mean(), rel=1e-4)
    assert shares["token"]["policy/ratio_gap"] == pytest.approx(
        np.abs(np.concatenate(tokens) - 1).mean(), rel=1e-4
    )
    geometric = [np.exp(np.log(ratios).mean()) for ratios in tokens]
    assert shares["sequence"]["policy/ratio"] == pytest.approx(np.mean(geometric), rel=1e-4)


# 3. A KL term on every token.


def test_the_kl_is_paid_token_by_token() -> None:
    found = credited(ppo(gamma=0, whiten_advantages=False), kl_coef=0.5, rewards=[0.0] * 8)
    references = drawn(documents(8))[1]
    for e, earned, reference in zip(found.experience, said(found, "returns"), references, strict=True):
        assert e.old_logprobs is not None
        gap = (e.old_logprobs - reference)[np.array(e.document.mask)]
        assert earned == pytest.approx(-0.5 * gap, abs=1e-6)
        assert len(set(earned.tolist())) == len(earned)
    off = credited(ppo(gamma=0, whiten_advantages=False), kl_coef=0.0, rewards=[0.0] * 8)
    assert all(earned == pytest.approx(0, abs=1e-6) for earned in said(off, "returns"))


def test_the_kl_in_the_loss_pulls_towards_the_reference(models: Path, plain_engine: None) -> None:
    """Without any advantage only the KL moves the policy: a first step changes nothing without it and lowers
    it with it."""
    items = experience(models, scale=0.0)
    still = actor(models)
    before = flat(still)
    still.train(items, [Update(list(range(8)), 1e-2, 0.5)])
    assert torch.equal(flat(still), before)
    pulled = actor(models, kl_in="loss", kl_estimator="k3")
    steps = pulled.train(items, [Update(list(range(8)), 1e-2, 0.5)] * 5).metrics
    assert steps[-1]["policy/kl_loss"] < 0.8 * steps[0]["policy/kl_loss"]


def test_the_adaptive_coefficient_waits_for_the_first_update_of_the_actor() -> None:
    """An actor that is still the reference has a KL of 0 by definition, which says nothing of the
    coefficient."""
    adaptive = ppo(kl_target=0.1, freezing_actor_steps=3)
    start = KLController(0.3, 0.1)
    assert [adapted(start, adaptive, step, 0.0) == start for step in range(5)] == [True] * 4 + [False]
    assert adapted(start, ppo(kl_target=0.1), 0, 0.0) == start
    assert adapted(start, ppo(kl_target=0.1, rollouts_only=True), 9, 0.5) == start
    assert adapted(start, ppo(kl_target=0.1), 1, 0.5).coef > 0.3
    with pytest.raises(ValueError, match="stays 0 if init_kl_coef is 0: set init_kl_coef above 0"):
        ppo(kl_target=0.1, init_kl_coef=0.0)


@pytest.mark.parametrize(
    ("start", "end", "iterations", "expected"),
    [
        (0.2, 0.0, 5, [0.2, 0.15, 0.1, 0.05, 0.0]),
        (0.1, 0.3, 3, [0.1, 0.2, 0.3]),
        (0.2, 0.0, 1, [0.2]),
        (0.2, 0.2, 2, [0.2, 0.2]),
        (0.2, None, 3, [0.2, 0.2, 0.2]),
    ],
)
def test_the_coefficient_moves_in_a_straight_line(
    start: float, end: float | None, iterations: int, expected: list[float]
) -> None:
    config = ppo(init_kl_coef=start, final_kl_coef=end)
    assert [config.kl_coef_of(i, iterations) for i in range(iterations)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kl_target": 0.1}, "kl_target adapts the coefficient, but final_kl_coef schedules it"),
        ({"init_kl_coef": 0.0}, "final_kl_coef needs a KL from the first iteration:"),
        ({"final_kl_coef": -0.1}, "final_kl_coef"),
    ],
)
def test_a_schedule_of_the_coefficient_that_cannot_act_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ppo(**{"final_kl_coef": 0.0, **fields})


# 4. Rewards are normalised with statistics that do not move with the rollout.


def test_rewards_are_standardised_with_the_statistics_of_their_model(tmp_path: Path) -> None:
    (tmp_path / STATISTICS).write_text(json.dumps({"mean": 3.0, "std": 0.5}))
    paths = PATHS | {"reward:reward_model": str(tmp_path)}
    found = credited(ppo(gamma=0, whiten_advantages=False, normalize_reward=True), paths=paths)
    last = [earned[-1] for earned in said(found, "returns")]
    assert last == pytest.approx([-6, -4, -2, 0, 2, 4, 6, 8])  # (i - 3) / 0.5
    clipped = credited(
        ppo(gamma=0, whiten_advantages=False, normalize_reward=True, reward_clip=5), paths=paths
    )
    assert [earned[-1] for earned in said(clipped, "returns")] == pytest.approx([-5, -4, -2, 0, 2, 4, 5, 5])
    assert [e[-1] for e in said(credited(ppo(gamma=0), paths=paths), "returns")] == pytest.approx(
        range(8), abs=1e-6
    )
    (tmp_path / STATISTICS).unlink()
    with pytest.raises(ValueError, match=r"has no score_statistics\.json: set `normalize`"):
        setup_of(ppo(normalize_reward=True), [], paths, [0], 0)


# 5. Linear warm-up, then a cosine, over all optimiser steps of the run.


def schedule(config: PPO, role: str, iterations: int) -> list[float]:
    return [
        rate
        for step in range(iterations)
        for rate in schedule_of(config, step, iterations, 0).rates.get(role, ())
    ]


def test_learning_rates_warm_up_linearly_and_then_follow_a_cosine() -> None:
    config = ppo(max_epochs=2, actor_learning_rate=1.0, warmup_ratio=0.25, min_lr_ratio=0.1)
    rates = schedule(config, "actor", 10)
    assert len(rates) == 40  # 2 batches x 2 epochs x 10 iterations
    assert rates[:10] == pytest.approx([(k + 1) / 10 for k in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[25] == pytest.approx(0.55)  # half way down from 1 to 0.1
    assert all(a > b for a, b in pairwise(rates[10:])) and 0.1 < rates[-1] < 0.11
    # both can be turned off
    assert set(schedule(ppo(warmup_ratio=0, min_lr_ratio=1.0, actor_learning_rate=1.0), "actor", 5)) == {1.0}


# 6. The critic starts as the reward model, head included.


def test_the_critic_starts_as_the_reward_model(models: Path, plain_engine: None) -> None:
    paths = model_paths(ppo(), {"sft": "a", "reward_model": "b"})
    assert paths == {"actor": "a", "critic": "b", "reference": "a", "reward:reward_model": "b"}
    assert model_paths(ppo(critic="sft"), {"sft": "a", "reward_model": "b"})["critic"] == "a", "by default"
    docs = documents(5)
    scores = dict(Reward(model(models / "rm")).scores(docs))
    longer = [Document([*d.tokens, 5], [*d.mask, True]) for d in docs]
    values = dict(critic(models).values(longer))
    for i in range(5):
        # V before a token is the score of what stands before it
        assert values[i][-1] == pytest.approx(scores[i][0], rel=1e-5, abs=1e-6)
    assert np.std([scores[i][0] for i in range(5)]) > 0.01


# 7. A low learning rate for the actor, a high one for the critic.


def test_the_critic_learns_faster_than_the_actor() -> None:
    config = PPO(prompts=Data(sources="prompts.jsonl"))
    assert config.critic_learning_rate >= 5 * config.actor_learning_rate
    rates = schedule_of(
        ppo(actor_learning_rate=1e-6, critic_learning_rate=9e-6, warmup_ratio=0), 0, 10, 0
    ).rates
    assert rates["actor"][0] == 1e-6 and rates["critic"][0] == 9e-6


# 8. The actor is frozen while the critic warms up.


def test_the_actor_is_frozen_for_exactly_the_requested_iterations() -> None:
    config = ppo(freezing_actor_steps=3, warmup_ratio=0, actor_learning_rate=1.0)
    roles_at = [set(schedule_of(config, step, 5, 0).rates) for step in range(5)]
    assert roles_at == [{"critic"}] * 3 + [{"critic", "actor"}] * 2
    assert schedule(config, "actor", 5)[0] == 1.0, "its schedule starts when it does"
    assert len(schedule(config, "actor", 5)) == 4 and len(schedule(config, "critic", 5)) == 10


# 9. GAE with advantages normalised over the whole rollout.


def test_advantages_have_mean_0_and_std_1_over_the_whole_rollout() -> None:
    white = np.concatenate(said(credited(ppo()), "advantages"))
    assert white.mean() == pytest.approx(0, abs=1e-6) and white.std() == pytest.approx(1, rel=1e-5)
    plain = credited(ppo(whiten_advantages=False))
    raw = np.concatenate(said(plain, "advantages"))
    assert white == pytest.approx((raw - raw.mean()) / raw.std(), abs=1e-5)
    # GAE with lambda 0.95 lies between one step (0) and the whole return (1)
    advantage = said(plain, "advantages")[7]
    values = said(plain, "values")[7]
    expected = []
    following = 0.0
    for t in reversed(range(len(values))):
        delta = (7.0 if t == len(values) - 1 else values[t + 1]) - values[t]
        following = delta + 0.95 * following
        expected.insert(0, following)
    assert advantage == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # returns are not whitened
    assert said(plain, "returns")[7] == pytest.approx(advantage + values, rel=1e-5)


# 10. Actor and critic are separate models.


def test_training_one_of_actor_and_critic_leaves_the_other_alone(models: Path, plain_engine: None) -> None:
    items = experience(models)
    one = actor(models)
    other = critic(models)
    before = flat(one), flat(other)
    other.train(items, [Update(list(range(8)), 1e-2, 0.0)])
    assert torch.equal(flat(one), before[0]) and not torch.equal(flat(other), before[1])
    moved = flat(other)
    one.train(items, [Update(list(range(8)), 1e-2, 0.0)])
    assert not torch.equal(flat(one), before[0]) and torch.equal(flat(other), moved)
    assert {"actor", "critic"} <= set(ppo().groups), "each has processes of its own"


# The family.


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_without_a_critic_there_is_no_process_and_no_rate_for_one(estimator: str) -> None:
    config = ppo(advantage_estimator=estimator)
    assert set(config.groups) == {"actor", "reference", "reward:reward_model"}
    assert set(model_paths(config, {"sft": "a", "reward_model": "b"})) == {
        "actor",
        "reference",
        "reward:reward_model",
    }
    assert set(schedule_of(config, 0, 5, 0).rates) == {"actor"}
    found = credited(config)
    assert len(found.usable) == 8 and all(np.isfinite(a).all() for a in said(found, "advantages"))


@pytest.mark.parametrize(
    ("estimator", "ratio", "expected"),
    [
        ("gae", "token", "token"),
        ("grpo", "token", "sequence"),
        ("dr_grpo", "token", "constant"),
        ("rloo", "token", "token"),
        ("grpo", "sequence", "sequence"),
    ],
)
def test_each_estimator_averages_its_loss_as_its_paper_does(
    estimator: str, ratio: str, expected: str
) -> None:
    assert ppo(advantage_estimator=estimator, ratio=ratio).aggregation == expected
    assert ppo(advantage_estimator=estimator, ratio=ratio, loss_aggregation="token").aggregation == "token"


def test_the_clip_is_symmetric_by_default() -> None:
    assert ppo(eps_clip=0.3).clips == (0.3, 0.3)
    assert ppo(eps_clip_high=0.28).clips == (0.2, 0.28)
