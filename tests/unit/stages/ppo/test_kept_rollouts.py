"""Rollouts that a run keeps for one without engines: what is read is what was written, and what does not fit is
refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt, compact
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running
from rlhf_core.stages.ppo.iteration import Carried, ppo_iteration, sampled_of
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.rollout_records import Own, Rollout
from rlhf_core.stages.ppo.sampling.kept_answers import KeptAnswers
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder
from rlhf_core.stages.ppo.sampling.stored import kept_iterations, read_kept, write_kept
from tests.unit.stages.ppo.test_ppo_sampling import PROMPTS, Fleet

ORDER = PromptOrder(PROMPTS, 4, 0)


def ppo(**fields: Any) -> PPO:
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8}
    given = {"prompts": {"sources": "p.jsonl"}, "advantage_estimator": "grpo", **sizes, **fields}
    return PPO.model_validate(given)


def answers() -> tuple[list[Rollout], Rewards]:
    """Two answers each to prompts 7 and 2; one is an episode, one has experts, one no reward."""
    rollouts = []
    for number in (7, 2):
        for j in range(2):
            experts = np.full((3, 2, 1), j, np.int16) if number == 2 else None
            document = compact([number], [5 + j, 6, 7], experts)
            logprobs = np.array([0, -0.1, -0.2, -1 / 3], np.float32)
            rollouts.append(Rollout(PROMPTS[number], document, logprobs, bool(j), versions=[(1, 4)]))
    episode_prompt = Prompt(({"role": "user", "content": "7 and tools"},), [7, 8], PROMPTS[7].row, True)
    document = Document([7, 8, 1, 2, 3], [False, False, True, False, True])
    own = Own(0.5, np.array([0, 0, 0.25, 0, 0], np.float32), "", 2, 1, 0.1, ended_by="turns")
    talk = ({"role": "user", "content": "x"},)
    rollouts[1] = Rollout(episode_prompt, document, np.zeros(5, np.float32), False, talk, own)
    return rollouts, Rewards(
        {"reward_model": np.array([0.1 + 0.2, 1.0, math.nan, -2.0])}, {"reward_model": "e"}
    )


def test_kept_rollouts_are_read_bit_for_bit(tmp_path: Path) -> None:
    rollouts, rewards = answers()
    statistics = {"reward_model": Running(4, 0.1, 1 / 3)}
    write_kept(tmp_path / "kept", 3, ORDER, rollouts, rewards, statistics)
    found = read_kept(tmp_path / "kept", 3, ORDER, 2)
    assert (found.position, found.statistics) == (3, statistics)
    assert found.rewards is not None and found.rewards.errors == rewards.errors
    np.testing.assert_array_equal(found.rewards.by_source["reward_model"], rewards.by_source["reward_model"])
    for one, other in zip(found.rollouts, rollouts, strict=True):
        assert (one.prompt, one.finished, list(one.versions)) == (
            other.prompt,
            other.finished,
            list(other.versions),
        )
        assert list(one.document.tokens) == list(other.document.tokens)
        np.testing.assert_array_equal(one.document.mask_array, other.document.mask_array)
        np.testing.assert_array_equal(one.sampler_logprobs, other.sampler_logprobs)
        if other.document.experts is not None:
            np.testing.assert_array_equal(one.document.experts, other.document.experts)
    assert found.rollouts[1].own is not None and found.rollouts[1].own.ended_by == "turns"


def test_rollouts_of_another_recipe_are_refused(tmp_path: Path) -> None:
    rollouts, rewards = answers()
    write_kept(tmp_path, 1, ORDER, rollouts, rewards, {})
    others = PromptOrder([Prompt((), [i + 50], {}, False) for i in range(10)], 4, 0)
    for order, n in ((others, 2), (PromptOrder(PROMPTS[:5], 4, 0), 2), (ORDER, 3)):
        with pytest.raises(ValueError, match="was kept by a run with other prompts or n_samples_per_prompt"):
            read_kept(tmp_path, 1, order, n)


def test_iterations_are_counted_from_the_first_without_a_gap(tmp_path: Path) -> None:
    config = ppo(train_only=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no iteration1\.jsonl: name the folder kept_rollouts"):
        kept_iterations(config, 9)
    for number in (1, 2, 4):
        (tmp_path / f"iteration{number}.jsonl").touch()
    assert [kept_iterations(config, most) for most in (1, 9)] == [1, 2]


def test_without_engines_only_what_trains_is_placed() -> None:
    config = ppo(advantage_estimator="gae", train_only="kept")
    assert list(config.placed) == ["actor", "critic", "reference"]
    assert list(ppo(advantage_estimator="gae").placed)[-2:] == ["reward:reward_model", "sampler"]
    assert ppo(train_only="kept", colocate_all=True).together == [["actor", "reference"]]
    with pytest.raises(ValueError, match="leave one of them out"):
        ppo(train_only="kept", rollouts_only=True)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_iteration_trains_on_kept_rollouts_alone(staleness: int, tmp_path: Path) -> None:
    config = ppo(train_only=str(tmp_path), max_staleness=staleness)
    setup = setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    writer: Any = Fleet(lambda prompt, j: float(j * prompt))
    rollouts = writer.start_rollouts(setup.order.take(0, 4), setup.sampling)()
    rewards = writer.reward(rollouts, 0)
    write_kept(tmp_path, 1, setup.order, rollouts, rewards, {"reward_model": Running(8, 1.0, 2.0)})
    group: Any = SimpleNamespace()
    kept = KeptAnswers(config, group, group, folder=tmp_path)

    class Trains(Fleet):
        engines = kept  # type: ignore[assignment]

    fleet: Any = Trains(lambda prompt, j: math.nan)
    done = ppo_iteration(fleet, setup, Carried(0, {}), 0.1, schedule_of(config, 0, 2, 0))
    assert fleet.said == ["score models only", "train"]
    assert done.carried == Carried(1, {"reward_model": Running(8, 1.0, 2.0)})
    assert done.metrics["reward/mean"] == pytest.approx(np.mean(rewards.by_source["reward_model"]))
    assert sampled_of(fleet, setup, Carried(0, {}), None).position == 1


def test_an_iteration_may_train_nothing() -> None:
    config = ppo(rollouts_only=True)
    setup = setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    fleet: Any = Fleet(lambda prompt, j: float(j))
    schedule = schedule_of(config, 0, 2, 0)._replace(rates={})
    done = ppo_iteration(fleet, setup, Carried(0, {}), 0.1, schedule)
    assert fleet.said == ["sample", "score"] and done.metrics["reward/mean"] == 0.5
    assert config.scores_actor and "kl/mean" in done.metrics
