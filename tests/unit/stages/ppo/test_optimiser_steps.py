"""Optimiser steps of actor and critic: what is masked, skipped or split changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_core.config.kinds import has_metric
from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.iteration import actor_metrics, step_means
from rlhf_core.stages.ppo.roles.role_passes import on_tokens
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.training.engine import TorchEngine
from tests.support.tiny_roles import (
    actor,
    critic,
    experience,
    flat,
    model,
    models,
    plain_engine,
    ppo,
)

__all__ = ["models", "plain_engine"]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_one_update_of_an_iteration_needs_no_scoring_pass(
    models: Path, plain_engine: None, level: str
) -> None:
    """Log-probs of the training pass itself: the same gradient as with those of a scoring pass, and they come
    back by document."""
    choices = {
        "advantage_estimator": "grpo",
        "kl_in": "loss",
        "kl_estimator": "k3",
        "sampler_is_level": level,
        "sampler_is_cap": 1.5,
    }
    noise = np.random.default_rng(2)
    items = [
        replace(e, sampler_logprobs=e.sampler_logprobs + 0.1 * noise.normal(size=len(e.document)))
        for e in experience(models)
    ]
    update = Update([6, 2, 7, 1, 0, 4, 3], 1e-2, 0.3)
    scored = actor(models, **choices)
    unscored = actor(models, **choices, micro=3)
    expected, none = scored.train(items, [update])
    found, logprobs = unscored.train([replace(e, old_logprobs=None) for e in items], [update])
    assert none == [] and sorted(i for i, _ in logprobs) == sorted(update.indices)
    for i, values in logprobs:
        mask = np.array(items[i].document.mask)
        np.testing.assert_allclose(values[mask], items[i].old_logprobs[mask], atol=1e-5)
    assert found[0] == pytest.approx(expected[0], rel=1e-3, abs=1e-5) and found[0]["policy/ratio"] == 1
    torch.testing.assert_close(flat(unscored), flat(scored), atol=2e-4, rtol=0)


@pytest.mark.usefixtures("plain_engine")
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_masked_answers_train_as_if_they_were_not_there(models: Path, aggregation: str) -> None:
    """Half of the answers come from a sampler that is far off: the others have the gradient of a step of
    their own."""
    items = experience(models)
    far = [replace(e, sampler_logprobs=e.sampler_logprobs - 2.0 * (i % 2)) for i, e in enumerate(items)]
    choices = dict(
        sampler_is="mask", sampler_is_level="geometric", loss_aggregation=aggregation, entropy_coef=0.1
    )
    choices |= {"kl_in": "loss", "kl_estimator": "k2"}
    whole = actor(models, **choices)
    alone = actor(models, **choices)
    found = whole.train(far, [Update(list(range(8)), 1e-2, 0.3)]).metrics[0]
    expected = alone.train(far, [Update([0, 2, 4, 6], 1e-2, 0.3)]).metrics[0]
    assert found == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(flat(whole), flat(alone), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("plain_engine")
def test_a_step_of_masked_answers_alone_is_not_taken(models: Path) -> None:
    """After a step with a gradient, whose momentum would go on, and with weight decay."""
    items = experience(models)
    far = [replace(e, sampler_logprobs=e.sampler_logprobs - 2.0 * (i % 2)) for i, e in enumerate(items)]
    role = actor(models, sampler_is="mask", sampler_is_level="geometric", weight_decay=0.1)
    taken = role.train(far, [Update([0, 2], 1e-2, 0.0)]).metrics[0]
    before = flat(role)
    left_out = role.train(far, [Update([1, 3], 1e-2, 0.0)]).metrics[0]
    assert flat(role).equal(before)
    assert left_out == {"policy/learning_rate": 1e-2}, "a ratio of 0 would be that of no token"
    means = step_means([left_out, taken])
    assert means == taken
    first = {"policy/first_ratio": taken["policy/ratio"], "policy/first_ratio_gap": taken["policy/ratio_gap"]}
    assert actor_metrics([left_out, taken], role.config) == first | {"policy/empty_steps": 1.0}
    assert actor_metrics([left_out], role.config) == {"policy/empty_steps": 1.0}
    assert all(has_metric(role.config, name) for name in ("policy/empty_steps", *first))


@pytest.mark.usefixtures("plain_engine")
def test_the_actor_takes_no_step_after_one_that_is_beyond_stop_kl(models: Path) -> None:
    """The step that is beyond the limit is taken itself; the critic goes on."""
    items = experience(models)
    updates = [Update(list(range(8)), 1e-2, 0.0)] * 4
    free = actor(models)
    whole = free.train(items, updates).metrics
    kls = [step["policy/kl_old"] for step in whole]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[1] < kls[2]
    limited = actor(models, stop_kl=(kls[1] + kls[2]) / 2)
    assert limited.train(items, updates).metrics == [*whole[:3], {}]
    three = actor(models)
    three.train(items, updates[:3])
    assert flat(limited).equal(flat(three)) and not flat(limited).equal(flat(free))
    steps = [*whole[:3], {}]
    assert actor_metrics(steps, limited.config)["policy/skipped_steps"] == 1.0
    assert step_means(steps) == step_means(whole[:3])
    assert actor_metrics(whole, limited.config)["policy/skipped_steps"] == 0.0
    assert "policy/skipped_steps" not in actor_metrics(whole, free.config)
    assert has_metric(limited.config, "policy/skipped_steps")
    assert not has_metric(free.config, "policy/skipped_steps")
    # the next iteration begins anew
    assert actor(models, stop_kl=1e9).train(items, updates).metrics == whole
    assert "value/loss" in critic(models).train(items, updates).metrics[3]


def test_stop_kl_is_refused_where_the_kl_is_from_the_sampler() -> None:
    ppo(sampler_is="in_ratio")
    with pytest.raises(ValueError, match="stop_kl limits the KL to the policy"):
        ppo(sampler_is="in_ratio", stop_kl=0.1)


@pytest.mark.usefixtures("plain_engine")
def test_masked_steps_are_not_counted_as_skipped(models: Path) -> None:
    config = ppo(sampler_is="mask", sampler_is_level="geometric", stop_kl=0.1)
    masked = {"policy/learning_rate": 1e-2}
    taken = masked | {"policy/ratio": 1.0, "policy/ratio_gap": 0.0}
    found = actor_metrics([taken, masked, {}, {}], config)
    assert (found["policy/empty_steps"], found["policy/skipped_steps"]) == (1.0, 2.0)


@pytest.mark.usefixtures("plain_engine")
def test_one_advantage_is_that_of_all_response_tokens(models: Path) -> None:
    items = experience(models)
    spread = [
        replace(e, advantages=np.where(e.document.mask_array, np.float32(0.1 * i), 0))
        for i, e in enumerate(items)
    ]
    numbers = [replace(e, advantages=float(np.float32(0.1 * i))) for i, e in enumerate(items)]
    by_token = actor(models)
    by_answer = actor(models)
    update = Update(list(range(8)), 1e-2, 0.0)
    assert by_token.train(spread, [update]).metrics == by_answer.train(numbers, [update]).metrics
    assert flat(by_token).equal(flat(by_answer)) and not flat(by_token).equal(flat(actor(models)))
    holes = Document([1, 2, 3, 4], [False, True, False, True])
    assert on_tokens(2.0, holes).tolist() == [0, 2, 0, 2] and on_tokens(2.0, holes).dtype == np.float32


def test_log_probs_are_scored_only_where_the_training_pass_comes_too_late() -> None:
    sizes = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "max_epochs": 1,
        "advantage_estimator": "grpo",
    }
    assert ppo(**sizes, kl_in="loss", kl_estimator="k3").one_update
    assert ppo(**sizes, init_kl_coef=0.0).one_update
    assert not ppo(**sizes).one_update, "the KL is in the reward"
    # the denominator needs to know what is masked
    assert not ppo(**sizes, init_kl_coef=0.0, sampler_is="mask").one_update
    assert not ppo(**{**sizes, "train_batch_size": 4}, init_kl_coef=0.0).one_update
    assert not ppo(**{**sizes, "max_epochs": 2}, init_kl_coef=0.0).one_update
    frozen = {**sizes, "advantage_estimator": "gae", "freezing_actor_steps": 1}
    assert not ppo(**frozen, init_kl_coef=0.0).one_update, "nothing is trained then"


@pytest.mark.usefixtures("plain_engine")
def test_the_range_of_values_is_that_of_the_step_in_any_micro_batches(models: Path) -> None:
    """Returns of up to 10: the range comes with the step, so no split changes it. Without one a critic that
    lags behind moves further."""
    items = [replace(e, returns=e.returns * 10, values=e.values + 1) for e in experience(models)]

    def trained(micro: int, clip: float | None) -> tuple[dict[str, float], torch.Tensor]:
        role = Critic(model(models / "rm"), ppo().model_copy(update={"micro_train_batch_size": micro}), 0)
        return role.train(items, [Update(list(range(8)), 1e-2, 0.0, clip)]).metrics[0], flat(role)

    (whole, moved), (split, same) = trained(8, 2.0), trained(3, 2.0)
    assert split == pytest.approx(whole, rel=1e-4) and 0 < whole["value/clip_share"] < 1
    torch.testing.assert_close(same, moved, atol=1e-4, rtol=0)
    narrow = trained(8, 0.2)[0]
    free = trained(8, None)[0]
    assert free["value/clip_share"] == 0 < whole["value/clip_share"] < narrow["value/clip_share"]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_micro_batches_change_nothing(models: Path, plain_engine: None, aggregation: str, ratio: str) -> None:
    """One optimiser step in one forward pass or in eight: the same gradient, with every term of the loss
    on."""
    choices = dict(
        loss_aggregation=aggregation, ratio=ratio, kl_in="loss", kl_estimator="k2", entropy_coef=0.1
    )
    items = experience(models)
    gradients = []
    metrics = []

    class Watched(TorchEngine):
        def step(self, learning_rate: float) -> float:
            gradients.append(
                torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])
            )
            return super().step(learning_rate)

    for micro, tokens in ((8, None), (3, None), (1, None), (8, 60)):
        role = actor(models, micro, **choices)
        role.passes = role.passes._replace(tokens=tokens)
        role.engine = Watched(role.engine.module, role.engine._adamw)
        metrics.append(role.train(items, [Update(list(range(8)), 1e-3, 0.2)]).metrics[0])
    assert gradients[0].abs().max() > 1e-3
    for gradient, found in zip(gradients[1:], metrics[1:], strict=True):
        torch.testing.assert_close(gradient, gradients[0])
        assert found == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


def test_the_entropy_bonus_raises_the_entropy(models: Path, plain_engine: None) -> None:
    items = experience(models, scale=0.0)
    steps = actor(models, entropy_coef=1.0).train(items, [Update(list(range(8)), 1e-2, 0.0)] * 5).metrics
    assert steps[-1]["policy/entropy"] > steps[0]["policy/entropy"] + 1e-3


def test_the_first_step_is_on_policy(models: Path, plain_engine: None) -> None:
    for aggregation in ("token", "sequence", "constant"):
        metrics = (
            actor(models, loss_aggregation=aggregation)
            .train(experience(models), [Update(list(range(8)), 1e-3, 0.0)])
            .metrics[0]
        )
        assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and metrics["policy/clip_share"] == 0


@pytest.mark.parametrize("micro", [8, 3])
def test_percentiles_of_the_entropy_are_those_of_all_tokens(
    models: Path, plain_engine: None, micro: int
) -> None:
    role = actor(models, micro=micro)
    with torch.no_grad():
        role.engine.module.model.lm_head.weight *= 20  # so that tokens differ
    items = experience(models)
    values: list[float] = []
    for item in items:
        logits = role.module.model(torch.tensor([[*item.document.tokens]])).logits[0].detach()
        spread = torch.distributions.Categorical(logits=logits).entropy()  # at t: of the token at t + 1
        values += [float(spread[at - 1]) for at in np.flatnonzero(item.document.mask)]
    metrics = role.train(items, [Update(list(range(8)), 1e-9, 0.0)]).metrics[0]
    expected = np.percentile(values, [10, 50, 90], method="inverted_cdf")
    assert expected[2] > 1.2 * expected[0]
    names = [f"policy/entropy_p{at}" for at in (10, 50, 90)]
    np.testing.assert_allclose([metrics[name] for name in names], expected, rtol=0.018)
    assert metrics["policy/entropy"] == pytest.approx(np.mean(values), rel=1e-3)
    assert all(has_metric(role.config, name) for name in names)
