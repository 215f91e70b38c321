"""Metrics of answers by the task of their question."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO, Data
from rlhf_core.config.kinds import metrics_of
from rlhf_core.config.rewarding.verifiers import MathReward, ReasoningGymReward
from rlhf_core.config.rewards import EnvironmentReward
from rlhf_core.rewards.named_rows import environment_metrics, task_metrics

NAN = float("nan")


def row(task: str) -> dict[str, Any]:
    return {"task": task, "reasoning_gym": "..."}


def test_reward_right_and_length_by_task() -> None:
    scores = {"reasoning_gym": np.array([1.0, 0.5, NAN, 0.0, 1.0]), "f": np.zeros(5)}
    rows = [row("gcd"), row("gcd"), row("gcd"), row("lcm"), {"task": "mine"}]
    assert task_metrics([ReasoningGymReward()], scores, rows, [1, 2, 6, 4, 100]) == {
        "task/gcd/reward": 0.75,
        "task/gcd/right": 0.5,
        "task/gcd/length": 3.0,
        "task/lcm/reward": 0.0,
        "task/lcm/right": 0.0,
        "task/lcm/length": 4.0,
    }


def test_a_task_without_a_reward_has_a_length_alone() -> None:
    sources = [ReasoningGymReward(name="gym")]
    found = task_metrics(sources, {"gym": np.array([NAN])}, [row("gcd")], [5])
    assert found == {"task/gcd/length": 5.0}


def test_other_rewards_have_no_tasks() -> None:
    assert task_metrics([MathReward()], {"math": np.ones(1)}, [row("gcd")], [5]) == {}


def test_reward_right_and_length_by_environment() -> None:
    rewards = {"environment": np.array([1.0, 3.0, NAN, 0.5]), "f": np.zeros(4)}
    names = ["game", "game", "tools", "tools"]
    found = environment_metrics([EnvironmentReward()], rewards, names, [1, 2, 3, 5])
    assert found == {
        "environment/game/reward": 2.0,
        "environment/game/right": 1.0,
        "environment/game/length": 1.5,
        "environment/tools/reward": 0.5,
        "environment/tools/right": 0.0,
        "environment/tools/length": 4.0,
    }
    other = environment_metrics([MathReward()], {"math": np.ones(4)}, names, [1, 2, 3, 5])
    assert other == {"environment/game/length": 1.5, "environment/tools/length": 4.0}


@pytest.mark.parametrize("reward", ["reasoning_gym", "math"])
def test_the_metrics_of_a_recipe_name_its_tasks(reward: str) -> None:
    prompts = {"sources": {"reasoning_gym": {"tasks": ["gcd", "lcm"]}}}
    config = PPO.model_validate(
        {"prompts": prompts, "reward": reward, "critic": "sft", "eval_prompts": prompts, "eval_right": 1}
    )
    found = metrics_of(config)
    of_tasks = {f"task/{task}/{name}" for task in ("gcd", "lcm") for name in ("reward", "right", "length")}
    assert of_tasks & set(found) == (of_tasks if reward == "reasoning_gym" else set())
    assert "eval/*/right/mean" in found
    assert Data.model_validate(prompts).num_parts == 2
