"""Fields of environments and of asynchronous training that contradict each other, or have an older name: one
sentence each."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import PPO
from tests.support.text_rows import rows_of_text

BASE: dict[str, Any] = dict(
    prompts={"sources": "p.jsonl"}, advantage_estimator="grpo", n_samples_per_prompt=2
)


@pytest.mark.parametrize(
    ("fields", "told"),
    rows_of_text("""
    {environment: chess} | 'chess' is no environment: name a class as path.py:Class, or one of guess, tools
    {environment: {path: guess, options: {day: !!set {1: null}}}} | options must be what JSON can hold
    {environment: {path: guess, answer_max_len: 5000}} | answer_max_len=5000 must be at most generate_max_len=1024
    {environment: guess, stream_batch_size: 4} | stream_batch_size scores answers as they are finished
    {environment: guess, environments: {game: guess}} | environment and environments exclude each other
    {environments: {game: {path: guess, answer_max_len: 5000}}} | environments.game.answer_max_len=5000 must be at most generate_max_len=1024
    {environments: {a/b: guess}} | environments.a/b
    {reward: environment} | reward names the environment, and there is none
    {one_step_off_policy: true} | one_step_off_policy is called max_staleness
    {max_staleness: 4, sampler_is: 'off'} | max_staleness trains on answers of older weights
    {policy_loss: cispo, dual_clip: 3.0} | cispo weighs each token's log-prob: leave out dual_clip
    """),
)
def test_one_sentence_each(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as raised:
        PPO.model_validate(BASE | fields)
    assert told in str(raised.value)


def test_an_environment_gives_the_reward_unless_others_are_named() -> None:
    assert [source.title for source in PPO.model_validate(BASE | {"environment": "guess"}).reward] == [
        "environment"
    ]
    several = PPO.model_validate(BASE | {"environments": {"a": "guess", "b": {"path": "tools"}}})
    assert [source.title for source in several.reward] == ["environment"]
    assert {place: each.path for place, each in several.talks_to.items()} == {
        "environments.a": "guess",
        "environments.b": "tools",
    }
    both = PPO.model_validate(BASE | {"environment": "guess", "reward": ["environment", "rm"]})
    assert [source.title for source in both.reward] == ["environment", "rm"]
