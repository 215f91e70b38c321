"""Answers that are scored while engines still work on others: what goes together, when it begins, that the
order of arrival is not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlhf_core.cluster.work_log import GroupWork
from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.stages.ppo.iteration import Carried, ppo_iteration
from rlhf_core.stages.ppo.measured.probe import Probe
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.roles.trained import Steps
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores, StoredColumn
from rlhf_core.stages.ppo.sampling.rollout_group import SeededPrompt, rollout
from rlhf_core.stages.ppo.sampling.sample_in_turn import sample
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Setup
from tests.support.text_rows import rows_of_text

PROMPTS = [Prompt(({"role": "user", "content": str(i)},), [i], {}, False) for i in range(7)]
ORDER = PromptOrder(PROMPTS, 7, seed=1)
HOW = Sampling(2, 1.0, 8, [0])
FORWARD = tuple(range(7))
BACKWARD = tuple(range(6, -1, -1))
MIXED = (3, 0, 6, 2, 1, 4, 5)


class Fleet:
    """Finishes prompts in the requested order. A score is the answer's own and that of what it was scored
    with; `fails`: prompts."""

    sleeps = False

    def __init__(self, order: Sequence[int], fails: Sequence[int] = ()):
        self.order = order
        self.fails = fails
        self.said: list[str] = []

    @property
    def engines(self) -> Fleet:
        return self

    def stream_rollouts(
        self, seeded: Sequence[SeededPrompt], sampling: Sampling
    ) -> Iterator[tuple[int, list[Rollout]]]:
        for place in self.order:
            self.said.append(f"answers {place}")
            prompt, _ = seeded[place]
            answers = [SampledAnswer([prompt.tokens[0], j, 0], [-1.0] * 3, True) for j in range(sampling.n)]
            yield place, [rollout(prompt, answer) for answer in answers]

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed: int
    ) -> Callable[[], Scores]:
        requested = [rollout.prompt.tokens[0] for rollout in rollouts]
        self.said.append(f"score {len(requested) // 2}")
        together = float(sum(requested) * len(requested))

        def wait() -> Scores:
            self.said.append("scores")
            values = [
                np.array([together, prompt, j % 2, 0], np.float32) for j, prompt in enumerate(requested)
            ]
            found = np.array(
                [np.nan if prompt in self.fails else j for j, prompt in enumerate(requested)], dtype=float
            )
            rewards = Rewards({"reward_model": found}, {"reward_model": "refused"} if self.fails else {})
            return Scores(
                values,
                values,
                values,
                rewards,
                [StoredColumn("document", 0, False, [r.document for r in rollouts])],
            )

        return wait

    def train(
        self,
        experience: Sequence[Any],
        updates: object,
        beside: Callable[[], None],
        stored: Sequence[StoredColumn],
    ) -> Steps:
        assert [id(document) for column in stored for document in column.reference] == [
            id(one.document) for one in experience
        ]
        assert [column.start for column in stored] == [0, *accumulate(len(c.reference) for c in stored[:-1])]
        beside()
        return Steps([{"policy/ratio": 1.0, "policy/ratio_gap": 0.0}], [])

    def sync_weights(self, version: int = 0) -> None: ...

    def probe(self, documents: object, synced: bool = True) -> Probe:
        return Probe(0.0, 0.0)

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        return list(range(1, 1 + len(tokens)))

    @property
    def gpus(self) -> dict[str, list[str]]:
        return {}

    def take_work(self) -> dict[str, GroupWork]:
        return {}

    def iteration_metrics(self, *of: object) -> dict[str, float]:
        return {}


def streamed(fleet: Any, part: int, allowed: int = 0) -> tuple[list[Rollout], Scores]:
    setup = Setup(config(stream_batch_size=part), ORDER, HOW, [], [], allowed)
    sampled = sample(fleet, fleet, setup, 0, {})
    assert sampled.scores is not None and sampled.position == 7 and sampled.rewards is None
    return sampled.rollouts, sampled.scores()


def test_a_part_is_scored_as_soon_as_it_is_whole() -> None:
    fleet = Fleet(MIXED)
    streamed(fleet, 3)
    answers = [f"answers {place}" for place in MIXED]
    assert fleet.said == [
        *answers[:3],
        "score 1",
        *answers[3:5],
        "score 3",
        *answers[5:],
        "score 3",
        *["scores"] * 3,
    ]


@pytest.mark.parametrize("part", [1, 3, 7, 100])
def test_the_order_of_arrival_changes_nothing(part: int) -> None:
    found = [streamed(Fleet(order), part) for order in (FORWARD, BACKWARD, MIXED)]
    in_line = [prompt.tokens[0] for prompt, _ in ORDER.take(0, 7)]
    for rollouts, scores in found:
        assert [rollout.prompt.tokens[0] for rollout in rollouts] == [
            prompt for prompt in in_line for _ in range(2)
        ]
        assert [rollout.document.tokens[2] for rollout in rollouts] == [0, 1] * 7
        assert [int(values[1]) for values in scores.logprobs] == [
            prompt for prompt in in_line for _ in range(2)
        ]
        for name in ("logprobs", "ref_logprobs", "values"):
            # also what was scored together
            assert np.array_equal(getattr(scores, name), getattr(found[0][1], name))
        assert (
            scores.rewards.by_source["reward_model"].tolist()
            == found[0][1].rewards.by_source["reward_model"].tolist()
        )


def test_failures_of_all_parts_count_against_the_limit() -> None:
    streamed(Fleet(MIXED, fails=(1, 5)), 1, allowed=4)
    with pytest.raises(RewardsFailed, match=r"left 4 of 14 .* without a reward, more than the 3 .*refused"):
        streamed(Fleet(MIXED, fails=(1, 5)), 1, allowed=3)


def config(**fields: Any) -> PPO:
    sizes = dict(rollout_batch_size=7, n_samples_per_prompt=2, train_batch_size=14, micro_train_batch_size=14)
    return PPO(prompts=Data(sources="p.jsonl"), **{**sizes, **fields})


def test_an_iteration_waits_for_the_scores_that_are_under_way() -> None:
    requested = config(stream_batch_size=3)
    setup = setup_of(requested, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    fleet: Any = Fleet(BACKWARD)
    done = ppo_iteration(fleet, setup, Carried(0, {}), 0.3, schedule_of(requested, 0, 4, 0))
    assert fleet.said.index("score 1") < fleet.said.index("answers 0")
    assert fleet.said[-3:] == ["scores"] * 3
    assert fleet.said.count("scores") == 3
    assert done.metrics["reward/mean"] == pytest.approx((2 * sum(range(6)) + 1) / 14)
    assert {"phase/generate", "phase/score"} <= set(done.metrics)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    rows_of_text("""
    {colocate_all: true} | stream_batch_size scores while engines generate, so they need GPUs of their own
    {engine: {gpus: 1, sleep: true}} | stream_batch_size scores while engines generate, so they need GPUs of their own
    """),
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], sentence: str) -> None:
    config(**fields)
    with pytest.raises(ValidationError, match=sentence):
        config(stream_batch_size=3, **fields)
