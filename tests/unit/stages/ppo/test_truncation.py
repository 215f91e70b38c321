"""Answers and episodes that a limit cut: what they are penalised by, that they may stay out of training, and
the critic's value there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Term
from rlhf_core.stages.ppo import fleet
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.rewards.credit import Credited, credit
from rlhf_core.stages.ppo.rewards.texts import samples, with_own_ends
from rlhf_core.stages.ppo.roles.trained import Critic
from rlhf_core.stages.ppo.rollout_records import Own, Rollout, Scores, join_scores, restored, stored
from tests.support.fleet_config import fleet_config, no_sources
from tests.support.tiny_roles import critic, models, plain_engine, ppo  # noqa: F401 - fixtures

TERMS = [Term("model", 1.0, "none", None)]
NO_KL: dict[str, Any] = {"init_kl_coef": 0.0, "whiten_advantages": False}


def answer(tokens: int, finished: bool, tool: int = 0) -> Rollout:
    """A prompt of one token and an answer; `tool`: masked tokens after the first one of the answer."""
    mask = [False, True, *[False] * tool, *[True] * (tokens - 1)]
    document = Document([7] * len(mask), mask)
    return Rollout(Prompt((), [7], {}, False), document, np.zeros(len(mask), np.float32), finished)


def credited(
    config: PPO, rollouts: Sequence[Rollout], rewards: Sequence[float], ends: Sequence[float] | None = None
) -> Credited:
    """Credits the answers, whose values are 0.5 everywhere; `ends`: values after their last tokens."""
    rows = [np.zeros(len(rollout.document), np.float32) for rollout in rollouts]
    values = [row + np.float32(0.5) for row in rows] if config.has_critic else None
    end_values = None if ends is None else np.array(ends, np.float32)
    scores = Scores(rows, None, values, Rewards({"model": np.array(rewards)}, {}), end_values=end_values)
    return credit(rollouts, scores, 0.0, {}, config, TERMS)


def test_the_overlong_penalty_counts_all_tokens_that_use_the_budget() -> None:
    """Three sampled tokens with nine of a tool between them fill 12 of 16; the last 8 are penalised."""
    config = ppo(**NO_KL, advantage_estimator="dr_grpo", overlong_buffer=8, overlong_penalty=2.0)
    found = credited(config, [answer(3, True, tool=9), answer(3, True)], [0.0, 0.0])
    assert found.metrics["reward/overlong"] == pytest.approx(-1.0 / 2)
    assert [e.advantages for e in found.experience] == pytest.approx([-0.5, 0.5])


def test_a_cut_answer_loses_the_penalty() -> None:
    config = ppo(**NO_KL, advantage_estimator="dr_grpo", truncated_penalty=3.0, reward_clip=1.0)
    found = credited(config, [answer(2, False), answer(2, True)], [5.0, 1.0])
    # after the clip, which both rewards meet
    assert [e.advantages for e in found.experience] == pytest.approx([-1.5, 1.5])
    assert found.metrics["reward/truncated"] == -1.5 and found.metrics["response/truncated"] == 0.5


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_pp", "gae"])
def test_cut_answers_are_not_trained_on_but_are_compared_with(estimator: str) -> None:
    answers = [answer(2, True), answer(5, False), answer(3, True), answer(2, True)]
    rewards = [3.0, 0.0, 1.0, 0.0]
    usual = credited(ppo(advantage_estimator=estimator, init_kl_coef=0.0), answers, rewards)
    masked = credited(
        ppo(advantage_estimator=estimator, init_kl_coef=0.0, mask_truncated=True), answers, rewards
    )
    assert usual.usable == [0, 1, 2, 3] and masked.usable == [0, 2, 3]
    assert masked.metrics["rollout/usable"] == 0.75 and masked.metrics["response/truncated"] == 0.25
    for i in masked.usable:
        assert np.array_equal(masked.experience[i].advantages, usual.experience[i].advantages)
    if estimator == "dr_grpo":  # returns 1.5, 0.5 and -0.5 of 2, 3 and 2 tokens
        assert masked.metrics["return/mean"] == pytest.approx((2 * 1.5 + 3 * 0.5 - 2 * 0.5) / 7)


@pytest.mark.parametrize("ended", [True, False])
def test_reward_sources_see_that_an_episode_was_cut(ended: bool) -> None:
    """A model that reads it in tokens of its own gets the end token where the last answer has it; resume
    states know that, too."""
    own = Own(1.0, None, "", 2, 1, 0.0, ended)
    episode = replace(answer(2, False), own=own, messages=({"role": "assistant", "content": "a"},))
    kept = restored(json.loads(json.dumps(stored(episode))), episode.prompt, None)
    plain = [answer(2, True), answer(2, False)]
    texts = samples([kept, *plain], lambda rows, skip: ["a"] * len(rows), {"responses"})
    assert [text.finished for text in texts] == [False, True, False]
    assert [text.finished for text in with_own_ends(texts, [kept, *plain])] == [ended, True, False]


def test_a_rollout_of_cut_answers_alone_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"a limit .* 2: raise generate_max_len, or leave out mask_truncated"
    ):
        credited(ppo(mask_truncated=True), [answer(2, False), answer(2, False)], [1.0, 2.0])


def test_a_cut_answer_gets_the_value_of_its_text_in_place_of_the_reward() -> None:
    """By hand, gamma 0.5, lambda 1, values 0.5: two tokens each; the first answer is cut where the critic
    says 4, with a penalty of 1."""
    config = ppo(**NO_KL, gamma=0.5, lambd=1.0, bootstrap_truncated=True, truncated_penalty=1.0)
    found = credited(config, [answer(2, False), answer(2, True)], [9.0, 3.0], [4.0, 0.0])
    # cut: last return 0.5 * 4 - 1 = 1, the one before 0.5 * 1; finished: 3 and 1.5
    assert found.experience[0].returns is not None
    assert found.experience[0].returns[1:].tolist() == pytest.approx([0.5, 1.0])
    assert found.experience[1].returns is not None
    assert found.experience[1].returns[1:].tolist() == pytest.approx([1.5, 3.0])
    assert found.metrics["reward/mean"] == 6.0, "what the sources said"


def test_a_cut_answer_keeps_the_rewards_of_its_steps_up_to_the_last_token() -> None:
    """By hand, gamma 0.5, lambda 1: steps of 2 and 3 at the two tokens, then the critic's 4 and no rest."""
    config = ppo(
        **NO_KL, gamma=0.5, lambd=1.0, bootstrap_truncated=True, reward="checks.py:steps", critic="sft"
    )
    rollouts = [answer(2, False), answer(2, True)]
    rows = [np.zeros(len(rollout.document), np.float32) for rollout in rollouts]
    steps = [(1, 2.0), (2, 3.0)]
    rewards = Rewards({"steps": np.array([5.0, 6.0])}, {}, {"steps": {0: steps, 1: steps}})
    scores = Scores(rows, None, rows, rewards, end_values=np.array([4.0, 0.0], np.float32))
    terms = [Term("steps", 1.0, "none", None)]
    found = credit(rollouts, scores, 0.0, {}, config, terms, lambda tokens: list(range(1, 1 + len(tokens))))
    cut, whole = (e.returns for e in found.experience)
    assert cut is not None and whole is not None
    assert cut[1:].tolist() == pytest.approx([2 + 0.5 * 5, 3 + 0.5 * 4])
    assert whole[1:].tolist() == pytest.approx([2 + 0.5 * 4, 3 + 1])


def test_the_critic_values_the_whole_text(models: Path, plain_engine: None) -> None:  # noqa: F811
    """As it values the text before one more token."""
    role = critic(models)
    texts = [[5, 6, 7, 8], [5, 9]]
    ends = dict(role.end_values([Document(tokens, [False, *[True] * (len(tokens) - 1)]) for tokens in texts]))
    longer = dict(role.values([Document([*tokens, 3], [False, *[True] * len(tokens)]) for tokens in texts]))
    assert [ends[i].tolist() for i in range(2)] == [
        pytest.approx(longer[i][-1:].tolist(), abs=1e-6) for i in range(2)
    ]
    assert abs(ends[0][0] - ends[1][0]) > 1e-4


@pytest.mark.parametrize("bootstraps", [True, False])
def test_only_cut_answers_are_valued_again(bootstraps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training reads has no such values; parts of a stream are joined."""
    asked: list[int] = []

    class Models:
        name = "critic"

        def call(self, phase: str, method: Any, documents: Sequence[Document]) -> Any:
            if method is Critic.end_values:
                asked.append(len(documents))
                found = [(i, np.array([len(d)], np.float32)) for i, d in enumerate(documents)]
            else:
                found = [(i, np.zeros(len(d), np.float32)) for i, d in enumerate(documents)]
            return SimpleNamespace(refs=[found], wait=lambda timeout: [found])

    monkeypatch.setattr(fleet, "put_on_nodes", lambda value: value)
    role: Any = Models()
    made: Any = Fleet(fleet_config(bootstrap_truncated=bootstraps), role, role, None, no_sources(None), None)  # type: ignore[arg-type]
    answers = [answer(2, True), answer(4, False), answer(1, True), answer(3, False)]
    scores = made.start_score(answers, Rewards({"model": np.zeros(4)}, {}), 0)()
    assert asked == [2] * bootstraps and "end_values" not in {column.field for column in scores.stored}
    assert scores.end_values is None if not bootstraps else scores.end_values.tolist() == [0, 5, 0, 4]
    whole = made.start_score(answers[:1], Rewards({"model": np.zeros(1)}, {}), 0)()
    assert asked == [2] * bootstraps, "an answer that is finished needs none"
    joined = join_scores([scores, whole], 0)
    assert joined.end_values is None if not bootstraps else joined.end_values.tolist() == [0, 5, 0, 4, 0]
