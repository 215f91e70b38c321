"""The ten tricks that keep PPO stable, each with the test that fails when it is broken
(docs/explanation/ppo.md), and the family.

Actor and critic are the real roles, on tiny random models and the plain engine: one process, no Ray.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_core.config import PPO, Data
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.models.reward_scoring import STATISTICS
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.rewards.clients import Rewards
from rlhf_core.stages.ppo.iteration import actor_metrics, step_means
from rlhf_core.stages.ppo.iteration_loop import adapted
from rlhf_core.stages.ppo.ppo_setup import model_paths, schedule_of, setup_of
from rlhf_core.stages.ppo.rewards.credit import Credited, credit
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, on_tokens
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores
from rlhf_core.training.engine import AdamW, TorchEngine

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
PATHS = {"actor": "sft", "critic": "rm", "reference": "sft", "reward:reward_model": "rm"}


def ppo(**changes: object) -> PPO:
    small = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
        "generate_max_len": 16,
    }
    return PPO(prompts=Data(sources="prompts.jsonl"), **{**small, **changes})


def documents(count: int, seed: int = 0) -> list[Document]:
    """Ragged ones with a prompt of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3 + int(torch.randint(0, 6, (), generator=generator)) for _ in range(count)]
    return [
        Document(torch.randint(1, 31, (n,), generator=generator).tolist(), [False, False, *[True] * (n - 2)])
        for n in lengths
    ]


def drawn(docs: Sequence[Document]) -> list[list[np.ndarray]]:
    """Random log-probs, those of a reference, and values."""
    generator = np.random.default_rng(0)
    return [
        [generator.normal(size=len(d)).astype(np.float32) * np.array(d.mask, np.float32) for d in docs]
        for _ in range(3)
    ]


def credited(
    config: PPO, kl_coef: float = 0.0, rewards: Sequence[float] | None = None, paths: dict[str, str] = PATHS
) -> Credited:
    """Credit of eight random rollouts by the stage's own setup."""
    docs = documents(8)
    logprobs, ref_logprobs, values = drawn(docs)
    prompt = Prompt((), [1, 2], {}, False)
    rollouts = [Rollout(prompt, d, old, True) for d, old in zip(docs, logprobs, strict=True)]
    known = Rewards({"reward_model": np.array(rewards or [float(i) for i in range(8)])}, {})
    setup = setup_of(config, [prompt] * 8, paths, [0], 0)
    return credit(rollouts, Scores(logprobs, ref_logprobs, values, known), kl_coef, {}, config, setup.terms)


def said(found: Credited, name: str) -> list[np.ndarray]:
    """An array of each answer, on its own tokens."""
    return [on_tokens(getattr(e, name), e.document)[np.array(e.document.mask)] for e in found.experience]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, another one, and a reward model with a head that says something."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("sft", "other")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder / name)
    torch.manual_seed(2)
    reward = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1))
    torch.nn.init.normal_(reward.score.weight)
    reward.save_pretrained(folder / "rm")
    return folder


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lambda module, config, **_: TorchEngine(  # noqa: E731
        module, AdamW(config.betas, config.weight_decay, config.max_norm)
    )
    monkeypatch.setattr("rlhf_core.stages.ppo.roles.trained.make_engine", plain)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def model(folder: Path) -> ModelSpec:
    return ModelSpec(str(folder), "float32", 0, 8, False)


def actor(models: Path, micro: int = 8, max_norm: float = 1.0, **changes: object) -> Actor:
    config = ppo(**changes).model_copy(update={"micro_train_batch_size": micro, "max_norm": max_norm})
    return Actor(model(models / "sft"), config, 0)


def critic(models: Path) -> Critic:
    return Critic(model(models / "rm"), ppo(), 0)


def experience(models: Path, scale: float = 1.0) -> list[Experience]:
    """On-policy experience of the policy `sft`, with `other` as reference and random advantages."""
    docs = documents(8, seed=3)
    old = dict(ReferenceModel(model(models / "sft"), 1.0).logprobs(docs))
    reference = dict(ReferenceModel(model(models / "other"), 1.0).logprobs(docs))
    generator = np.random.default_rng(1)
    random = [scale * generator.normal(size=len(d)).astype(np.float32) for d in docs]
    return [
        Experience(d, old[i], old[i], reference[i], 0 * a, a, a)
        for i, (d, a) in enumerate(zip(docs, random, strict=True))
    ]


def flat(role: Actor | Critic) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in role.engine.module.parameters()])


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
    choices = {
        "sampler_is": "mask",
        "sampler_is_level": "geometric",
        "loss_aggregation": aggregation,
        "entropy_coef": 0.1,
    }
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
    with pytest.raises(ValueError, match="stop_kl limits the KL from the policy"):
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
    assert (
        ppo(**sizes, kl_in="loss", kl_estimator="k3").one_update and ppo(**sizes, init_kl_coef=0.0).one_update
    )
    assert not ppo(**sizes).one_update, "the KL is in the reward"
    assert not ppo(**sizes, init_kl_coef=0.0, sampler_is="mask").one_update, (
        "the denominator needs to know what is masked"
    )
    assert not ppo(**{**sizes, "train_batch_size": 4}, init_kl_coef=0.0).one_update
    assert not ppo(**{**sizes, "max_epochs": 2}, init_kl_coef=0.0).one_update
    frozen = {**sizes, "advantage_estimator": "gae", "freezing_actor_steps": 1}
    assert not ppo(**frozen, init_kl_coef=0.0).one_update, "nothing is trained then"


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
    assert adapted(start, ppo(kl_target=0.1), 1, 0.5).coef > 0.3
    with pytest.raises(ValueError, match="stays 0 with init_kl_coef 0: set init_kl_coef above 0"):
        ppo(kl_target=0.1, init_kl_coef=0.0)


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
    assert set(schedule(ppo(warmup_ratio=0, min_lr_ratio=1.0, actor_learning_rate=1.0), "actor", 5)) == {
        1.0
    }, "both can be turned off"


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
        assert values[i][-1] == pytest.approx(scores[i][0], rel=1e-5, abs=1e-6), (
            "V before a token is the score of what stands before it"
        )
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
    assert said(plain, "returns")[7] == pytest.approx(advantage + values, rel=1e-5), (
        "returns are not whitened"
    )


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


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_micro_batches_change_nothing(models: Path, plain_engine: None, aggregation: str, ratio: str) -> None:
    """One optimiser step in one forward pass or in eight: the same gradient, with every term of the loss
    on."""
    choices = {
        "loss_aggregation": aggregation,
        "ratio": ratio,
        "kl_in": "loss",
        "kl_estimator": "k2",
        "entropy_coef": 0.1,
    }
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
