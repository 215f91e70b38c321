"""Dynamic filtering while engines answer: the groups are those of filtering after each round, and scores begin
early."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Term
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.stages.ppo.iteration import Carried, ppo_iteration
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores
from rlhf_core.stages.ppo.sampling.rollout_group import SeededPrompt, rollout
from rlhf_core.stages.ppo.sampling.sample_in_turn import sample
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled
from tests.unit.stages.ppo.test_ppo_sampling import PROMPTS, Fleet, N, config, prompts_of, setup

ORDER = PromptOrder(PROMPTS, batch=4, seed=0)
RUNNING = [Term("reward_model", 1.0, "running", None)]


@dataclass
class Streaming(Fleet):
    """Finishes prompts in an order of its own."""

    order_seed: int = 0

    def stream_rollouts(
        self, seeded: Sequence[SeededPrompt], sampling: Sampling
    ) -> Iterator[tuple[int, list[Rollout]]]:
        self.requested.append([prompt.tokens[0] for prompt, _ in seeded])
        places = list(range(len(seeded)))
        random.Random(self.order_seed).shuffle(places)
        for place in places:
            self.said.append("answers")
            prompt, _ = seeded[place]
            answers = [SampledAnswer([prompt.tokens[0], j, 0], [-1.0] * 3, True) for j in range(sampling.n)]
            yield place, [rollout(prompt, answer) for answer in answers]

    def start_reward(self, rollouts: Sequence[Rollout], allowed: int) -> Callable[[], Rewards]:
        self.said.append("reward")
        rewards = self.reward(rollouts, allowed)
        return lambda: rewards

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed: int
    ) -> Callable[[], Scores]:
        wait = super().start_score(rollouts, rewards, allowed)

        def of_these() -> Scores:
            scores = wait()
            assert scores.values is not None
            tagged = [np.full(4, rollout.document.tokens[1], np.float32) for rollout in rollouts]
            return Scores(tagged, tagged, scores.values, scores.rewards)

        return of_these


def odd(prompt: int, j: int) -> float:
    return float(j) if prompt % 2 else 1.0


def sampled_of(fleet: Any, part: int | None, rounds: int = 10, **how: Any) -> Sampled:
    return sample(fleet, fleet, setup(ORDER, rounds, stream_batch_size=part, **how), 0, {})


@pytest.mark.parametrize("part", [1, 3, 4, 100])
@pytest.mark.parametrize("order_seed", [0, 1])
def test_the_groups_are_those_of_filtering_in_turn(part: int, order_seed: int) -> None:
    in_turn = sampled_of(Fleet(odd), None, terms=RUNNING)
    fleet = Streaming(odd, order_seed=order_seed)
    streamed = sampled_of(fleet, part, terms=RUNNING)
    assert prompts_of(streamed) == prompts_of(in_turn) and len(fleet.requested) > 1
    assert (streamed.position, streamed.statistics) == (in_turn.position, in_turn.statistics)
    assert streamed.metrics == in_turn.metrics
    assert in_turn.scores is None and streamed.scores is not None
    scores = streamed.scores()
    assert scores.logprobs is not None and in_turn.rewards is not None and streamed.rewards is not None
    assert [int(row[0]) for row in scores.logprobs] == [p for p in prompts_of(in_turn) for _ in range(N)]
    for rewards in (scores.rewards, streamed.rewards):
        assert rewards.by_source["reward_model"].tolist() == (
            in_turn.rewards.by_source["reward_model"].tolist()
        )


def test_rewards_and_scores_begin_while_engines_answer() -> None:
    fleet = Streaming(odd)
    sampled_of(fleet, 1)
    first, second, *_ = [i for i, said in enumerate(fleet.said) if said == "score models only"]
    assert fleet.said[:4] == ["answers", "reward"] * 2, "of each part as soon as it is finished"
    assert "answers" in fleet.said[first:second], "kept answers of a round, while the next one is answered"


def test_the_limit_is_the_same() -> None:
    streamed = sampled_of(Streaming(lambda prompt, j: float(j) if prompt == 3 else 1.0), 2, rounds=3)
    assert set(prompts_of(streamed)) == {3} and streamed.metrics["filter/rounds"] == 3
    with pytest.raises(ValueError, match=r"dynamic_filtering: none of the 36 groups of 3 rounds"):
        sampled_of(Streaming(lambda prompt, j: 1.0), 2, rounds=3)


def test_a_batch_that_is_full_at_once_is_one_round() -> None:
    streamed = sampled_of(Streaming(lambda prompt, j: float(j)), 3)
    assert streamed.metrics["filter/rounds"] == 1 and streamed.metrics["filter/accepted"] == 1
    assert streamed.scores is not None and len(streamed.scores().rewards) == 4 * N


def test_failures_of_all_rounds_count_against_the_limit() -> None:
    def score(prompt: int, j: int) -> float:
        return float("nan") if j else 1.0

    with pytest.raises(RewardsFailed, match="left 4 of 8 answers without a reward, more than the 3"):
        sampled_of(Streaming(score), 2, allowed=3)


def test_an_iteration_trains_on_the_scores_under_way() -> None:
    fleet: Any = Streaming(odd)
    requested = config(advantage_estimator="grpo", dynamic_filtering=True, stream_batch_size=3)
    of_run = setup_of(requested, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    done = ppo_iteration(fleet, of_run, Carried(0, {}), 0.0, schedule_of(requested, 0, 4, 0))
    assert done.metrics["filter/groups"] == 4 and done.metrics["filter/reward_mean"] == 0.5
    assert sorted({i for update in fleet.trained[0]["actor"] for i in update.indices}) == list(range(8))
    assert "score" not in fleet.said, "rewards are known"
