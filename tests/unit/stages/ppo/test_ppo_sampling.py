"""The order of prompts, dynamic filtering, and a whole iteration against a fleet that only records its
calls."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from rlhf_core.cluster.work_log import GroupWork
from rlhf_core.config import PPO, Data
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, Term
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.stages.ppo.iteration import Carried, ppo_iteration
from rlhf_core.stages.ppo.iteration_loop import iteration_state, restore
from rlhf_core.stages.ppo.measured.probe import Probe
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.roles.trained import Steps, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores
from rlhf_core.stages.ppo.sampling.group_signal import with_signal
from rlhf_core.stages.ppo.sampling.rollout_group import SeededPrompt, rollout
from rlhf_core.stages.ppo.sampling.sample_in_turn import sample
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled, Setup

N = 2
PROMPTS = [Prompt(({"role": "user", "content": str(i)},), [i], {}, False) for i in range(10)]
HOW = Sampling(N, 1.0, 8, [0])
TERMS = [Term("reward_model", 1.0, "none", None)]


@dataclass
class Fleet:
    """Answers each prompt with its own number; the reward of an answer is `score(prompt, which of the
    answers)`."""

    score_of: Callable[[int, int], float]
    requested: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    trained: list[Mapping[str, Sequence[Update]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    sleeps: bool = False

    @property
    def engines(self) -> Fleet:
        return self

    def sleep(self, keep_weights: bool) -> None:
        self.said.append("sleep and keep" if keep_weights else "sleep")

    def wake_engines(self) -> None:
        self.said.append("wake")

    def start_rollouts(
        self, seeded: Sequence[SeededPrompt], sampling: Sampling
    ) -> Callable[[], list[Rollout]]:
        self.requested.append([prompt.tokens[0] for prompt, _ in seeded])
        self.seeds += [seed for _, seed in seeded]
        self.said.append("sample")
        rollouts = [
            rollout(prompt, SampledAnswer([prompt.tokens[0], j, 0], [-1.0, -1.0, -1.0], True))
            for prompt, _ in seeded
            for j in range(sampling.n)
        ]
        return lambda: rollouts

    def reward(self, rollouts: Sequence[Rollout], allowed: int) -> Rewards:
        values = [
            self.score_of(rollout.document.tokens[1], rollout.document.tokens[2]) for rollout in rollouts
        ]
        return Rewards(
            {"reward_model": np.array(values)},
            {"reward_model": "the last error"} if np.isnan(values).any() else {},
        )

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed: int
    ) -> Callable[[], Scores]:
        self.said.append("score" if rewards is None else "score models only")
        logprobs = [np.array([0.0, -1.0, -1.0, -1.0], np.float32) for _ in rollouts]
        values = [np.zeros(4, np.float32) for _ in rollouts]
        return lambda: Scores(logprobs, logprobs, values, rewards or self.reward(rollouts, allowed))

    def train(
        self,
        experience: Sequence[Experience],
        updates: Mapping[str, Sequence[Update]],
        beside: Callable[[], None],
        stored: Sequence[Any],
    ) -> Steps:
        beside()
        self.trained.append(updates)
        self.said.append("train")
        return Steps(
            [{"policy/ratio": 1.0, "policy/ratio_gap": 0.0} for _ in next(iter(updates.values()))], []
        )

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        return list(range(1, 1 + len(tokens)))

    @property
    def gpus(self) -> dict[str, list[str]]:
        return {}

    def take_work(self) -> dict[str, GroupWork]:
        return {}

    def iteration_metrics(self, *of: object) -> dict[str, float]:
        return {}

    def sync_weights(self, version: int = 0) -> None:
        self.said.append("publish")

    def probe(self, documents: Sequence[Document], synced: bool = True) -> Probe:
        self.said.append("probe")
        return Probe(0.0, 0.0)


def setup(
    order: PromptOrder, rounds: int = 0, allowed: int = 0, terms: Sequence[Term] = TERMS, **changes: Any
) -> Setup:
    """With dynamic filtering of at most `rounds`; 0: without."""
    filtering: dict[str, Any] = {"dynamic_filtering": True, "max_filter_rounds": rounds} if rounds else {}
    return Setup(config(**filtering, **changes), order, HOW, terms, [], allowed)


def prompts_of(sampled: Sampled) -> list[int]:
    return [rollout.prompt.tokens[0] for rollout in sampled.rollouts[::N]]


# The order.


def test_each_episode_is_another_shuffle_cut_to_whole_batches() -> None:
    order = PromptOrder(PROMPTS, batch=4, seed=1)
    episodes = [[prompt.tokens[0] for prompt, _ in order.take(start, 8)] for start in (0, 8, 16)]
    assert all(len(set(episode)) == 8 for episode in episodes) and episodes[0] != episodes[1] != episodes[2]
    assert order.take(0, 8) == [*order.take(0, 3), *order.take(3, 5)], "however it is cut"
    assert order.take(5, 6) == PromptOrder(PROMPTS, 4, 1).take(5, 6), "the same run, the same order"
    assert order.take(0, 8) != PromptOrder(PROMPTS, 4, 2).take(0, 8)


def test_no_two_places_share_a_prompt_and_a_seed() -> None:
    taken = [(prompt.tokens[0], seed) for prompt, seed in PromptOrder(PROMPTS, 4, 0).take(0, 80)]
    assert len(set(taken)) == 80


# Dynamic filtering.


def test_a_group_has_a_signal_when_its_rewards_differ() -> None:
    nan = float("nan")
    rewards = np.array([1, 1, 0, 1, nan, nan, 1, nan, 1, 1 + 1e-9, nan, nan])
    assert with_signal(rewards, 2, 1e-6) == [2, 3]
    assert with_signal(rewards, 3, 1e-6) == [0, 1, 2]
    assert with_signal(rewards, 4, 1e-6) == [0, 1, 2, 3]
    assert with_signal(np.array([0, 1, 0, 1]), 2, 1e-6, np.array([False, True, False, False])) == [
        0,
        1,
    ], "one that is trained on"


def test_without_filtering_a_batch_is_sampled_once_and_scored_with_the_others() -> None:
    fleet = Fleet(lambda prompt, j: 0.0)
    sampled = sample(fleet, fleet, setup(PromptOrder(PROMPTS, 4, 0)), 4, {})  # type: ignore[arg-type]
    assert sampled.rewards is None and sampled.position == 8 and len(sampled.rollouts) == 8
    assert fleet.requested == [[prompt.tokens[0] for prompt, _ in PromptOrder(PROMPTS, 4, 0).take(4, 4)]]


def test_groups_without_signal_are_replaced_until_the_batch_is_full() -> None:
    fleet = Fleet(lambda prompt, j: float(j) if prompt % 2 else 1.0)  # only odd prompts have a signal
    order = PromptOrder(PROMPTS, batch=4, seed=0)
    sampled = sample(fleet, fleet, setup(order, 10), 0, {})  # type: ignore[arg-type]
    assert len(prompts_of(sampled)) == 4 and all(prompt % 2 for prompt in prompts_of(sampled))
    assert sampled.rewards is not None and sampled.rewards.by_source["reward_model"].tolist() == [0, 1] * 4
    in_line = [prompt.tokens[0] for prompt, _ in order.take(0, sampled.position)]
    asked = [prompt for requested in fleet.requested for prompt in requested]
    assert asked[: len(in_line)] == in_line, "every prompt up to the new position"
    # and every accepted one of them is trained on
    assert prompts_of(sampled) == [prompt for prompt in in_line if prompt % 2]
    first = fleet.requested[0]
    missing = 4 - sum(prompt % 2 for prompt in first)
    share = sum(prompt % 2 for prompt in first) / 4
    assert len(fleet.requested[1]) == math.ceil(1.2 * missing / share), "as many as should suffice"
    assert sampled.metrics["filter/rounds"] == len(fleet.requested) > 1
    assert sampled.metrics["filter/groups"] == 4
    assert sampled.metrics["filter/accepted"] == sum(prompt % 2 for prompt in asked) / len(asked)


def test_two_rounds_fill_an_iteration_mostly() -> None:
    rounds = []
    prompts = [Prompt((), [i], {}, False) for i in range(4000)]
    position = 0
    order = PromptOrder(prompts, batch=64, seed=0)
    fleet = Fleet(lambda prompt, j: float(j) if prompt % 2 else 1.0)
    for _ in range(20):
        sampled = sample(fleet, fleet, setup(order, 10), position, {})  # type: ignore[arg-type]
        position = sampled.position
        rounds.append(sampled.metrics["filter/rounds"])
    assert sum(rounds) / len(rounds) < 2.3


def test_accepted_groups_survive_the_end_of_the_data() -> None:
    """The order has 8 prompts an episode, two of the ten have a signal: a batch of four needs several
    episodes and loses nothing."""
    fleet = Fleet(lambda prompt, j: float(j) if prompt in (3, 7) else 1.0)
    order = PromptOrder(PROMPTS, batch=4, seed=0)
    sampled = sample(fleet, fleet, setup(order, 100), 0, {})  # type: ignore[arg-type]
    assert sampled.position > 16
    accepted = [prompt for requested in fleet.requested for prompt in requested if prompt in (3, 7)]
    assert prompts_of(sampled) == accepted[:4] and len(accepted) >= 4
    assert len(set(fleet.seeds)) == len(fleet.seeds), "a prompt met again is answered anew"


def test_after_the_last_round_what_is_there_is_trained_on() -> None:
    fleet = Fleet(lambda prompt, j: float(j) if prompt == 3 else 1.0)
    sampled = sample(fleet, fleet, setup(PromptOrder(PROMPTS, 4, 0), 3), 0, {})  # type: ignore[arg-type]
    assert len(fleet.requested) == 3 and set(prompts_of(sampled)) == {3}
    fleet = Fleet(lambda prompt, j: 1.0)
    with pytest.raises(ValueError, match=r"dynamic_filtering: none of the 36 groups of 3 rounds"):
        sample(fleet, fleet, setup(PromptOrder(PROMPTS, 4, 0), 3), 0, {})  # type: ignore[arg-type]


def test_rewards_are_those_of_all_groups_beside_those_of_the_kept_ones() -> None:
    """Odd prompts give 0 and 1, even ones 5 and 5: the curve is of both, whatever is trained on."""
    fleet = Fleet(lambda prompt, j: float(j) if prompt % 2 else 5.0)
    done = iterate(fleet, config(advantage_estimator="grpo", dynamic_filtering=True))
    asked = [prompt for requested in fleet.requested for prompt in requested]
    assert done.metrics["reward/mean"] == pytest.approx(
        np.mean([0.5 if prompt % 2 else 5.0 for prompt in asked])
    )
    assert done.metrics["reward/reward_model/mean"] == done.metrics["reward/mean"] > 1
    assert done.metrics["filter/reward_mean"] == done.metrics["filter/reward_std"] == 0.5


def test_groups_are_compared_by_the_rewards_that_are_trained_on() -> None:
    order = PromptOrder(PROMPTS, batch=4, seed=0)
    # 20 and 21 are both clipped to 10
    fleet = Fleet(lambda prompt, j: 20.0 + j if prompt % 2 == 0 else float(j))
    sampled = sample(fleet, fleet, setup(order, 10), 0, {})  # type: ignore[arg-type]
    assert all(prompt % 2 for prompt in prompts_of(sampled))
    fleet = Fleet(lambda prompt, j: float(j))  # 0 and 1 over a deviation of 100: within filter_min_spread
    stored = [Term("reward_model", 1.0, "stored", (0.0, 100.0))]
    with pytest.raises(ValueError, match="none of the 20 groups"):
        sample(fleet, fleet, setup(order, 2, terms=stored, filter_min_spread=0.02), 0, {})  # type: ignore[arg-type]


def test_running_statistics_are_of_all_groups() -> None:
    running = [Term("reward_model", 1.0, "running", None)]
    fleet = Fleet(lambda prompt, j: float(j) if prompt % 2 else 5.0)
    sampled = sample(fleet, fleet, setup(PromptOrder(PROMPTS, 4, 0), 10, terms=running), 0, {})  # type: ignore[arg-type]
    asked = [prompt for requested in fleet.requested for prompt in requested]
    assert sampled.statistics is not None
    assert sampled.statistics["reward_model"].number == N * len(asked)
    assert sampled.statistics["reward_model"].mean == pytest.approx(
        np.mean([0.5 if prompt % 2 else 5.0 for prompt in asked])
    )


def test_failures_of_all_rounds_count_against_the_limit() -> None:
    def score(prompt: int, j: int) -> float:
        return float("nan") if j else 1.0

    fleet = Fleet(score)
    with pytest.raises(
        RewardsFailed,
        match=r"reward_model left 4 of 8 answers without a reward, more than the 3 .*the last error",
    ):
        sample(fleet, fleet, setup(PromptOrder(PROMPTS, 4, 0), 9, 3), 0, {})  # type: ignore[arg-type]
    # half of the answers may fail in each round: no group has two rewards
    with pytest.raises(ValueError, match="none of the 20 groups"):
        sample(fleet, fleet, setup(PromptOrder(PROMPTS, 4, 0), 2, 4), 0, {})  # type: ignore[arg-type]


# An iteration.


def config(**changes: object) -> PPO:
    fields = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": N,
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
        "max_epochs": 2,
    }
    return PPO(prompts=Data(sources="p.jsonl"), generate_max_len=8, **{**fields, **changes})


def iterate(fleet: Fleet, config: PPO, step: int = 0) -> Any:
    setup = setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    done = ppo_iteration(fleet, setup, Carried(0, {}), 0.3, schedule_of(config, step, 4, 0))  # type: ignore[arg-type]
    assert [name for name in done.metrics if not has_metric(config, name)] == []
    return done


def test_an_engine_that_sleeps_does_so_while_the_models_work() -> None:
    fleet = Fleet(lambda prompt, j: float(j), sleeps=True)
    done = iterate(fleet, config(engine={"gpus": 1, "sleep": True}))
    assert fleet.said == ["sample", "sleep", "score", "train", "wake", "publish", "probe"]
    assert {"phase/sleep", "phase/wake"} <= set(done.metrics)


def test_an_engine_that_sleeps_keeps_weights_that_nobody_will_send() -> None:
    fleet = Fleet(lambda prompt, j: float(j), sleeps=True)
    iterate(fleet, config(engine={"gpus": 1, "sleep": True}, freezing_actor_steps=1))
    assert fleet.said == ["sample", "sleep and keep", "score", "train", "wake"]


def test_an_iteration_is_the_papers() -> None:
    fleet = Fleet(lambda prompt, j: float(j))
    done = iterate(fleet, config())
    assert fleet.said == ["sample", "score", "train", "publish", "probe"]
    assert set(fleet.trained[0]) == {"actor", "critic"}
    assert [len(update.indices) for update in fleet.trained[0]["actor"]] == [4] * 4
    assert [update.indices for update in fleet.trained[0]["actor"]] == [
        update.indices for update in fleet.trained[0]["critic"]
    ]
    assert {update.kl_coef for update in fleet.trained[0]["actor"]} == {0.3}
    assert done.carried.position == 4 and done.metrics["reward/mean"] == 0.5
    assert {
        "phase/generate",
        "phase/score",
        "phase/credit",
        "phase/train",
        "phase/sync",
        "phase/probe",
    } <= set(done.metrics)


def test_a_frozen_actor_is_neither_trained_nor_published() -> None:
    fleet = Fleet(lambda prompt, j: float(j))
    iterate(fleet, config(freezing_actor_steps=2), step=1)
    assert fleet.said == ["sample", "score", "train"] and set(fleet.trained[0]) == {"critic"}
    iterate(fleet, config(freezing_actor_steps=2), step=2)
    assert set(fleet.trained[1]) == {"actor", "critic"} and fleet.said[-1] == "probe"


def test_filtered_rewards_are_computed_once_and_only_the_actor_trains() -> None:
    fleet = Fleet(lambda prompt, j: float(j) if prompt % 2 else 1.0)
    done = iterate(fleet, config(advantage_estimator="grpo", dynamic_filtering=True))
    assert "score models only" in fleet.said and set(fleet.trained[0]) == {"actor"}
    assert 4 < done.carried.position <= sum(map(len, fleet.requested))
    assert sorted({i for update in fleet.trained[0]["actor"] for i in update.indices}) == list(range(8))


def test_answers_without_reward_are_in_no_batch() -> None:
    fleet = Fleet(lambda prompt, j: float("nan") if (prompt, j) == (PROMPTS.index(first), 1) else float(j))
    first = PromptOrder(PROMPTS, 4, 0).take(0, 1)[0][0]
    done = iterate(fleet, config(max_failed_rewards=0.5))
    trained = [i for update in fleet.trained[0]["actor"] for i in update.indices]
    assert sorted(trained) == sorted([0, 2, 3, 4, 5, 6, 7] * 2) and len(fleet.trained[0]["actor"]) == 4
    assert done.metrics["reward/reward_model/failed"] == 1


def test_a_stored_loop_goes_on_where_it_was() -> None:
    carried = Carried(17, {"reward_model": Running(7, 0.1 + 0.2, 1 / 3)})
    for controller in (KLController(0.3, 0.1, 50), KLController(0.3)):
        stored = json.loads(json.dumps(iteration_state(controller, carried)))
        assert restore(replace(controller, coef=9.0), stored) == (controller, carried)


def test_running_statistics_go_on_from_the_iteration_before() -> None:
    fleet = Fleet(lambda prompt, j: float(j))
    running = config(reward={"model": "reward_model", "normalize": "running"})
    setup = setup_of(running, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    carried = Carried(0, {"reward_model": Running(8, 10.0, 0.0)})
    done = ppo_iteration(fleet, setup, carried, 0.0, schedule_of(running, 0, 4, 0))  # type: ignore[arg-type]
    assert done.carried.statistics["reward_model"].number == 16
    # eight 10s and four 0s and 1s each
    assert done.carried.statistics["reward_model"].mean == pytest.approx(5.25)
