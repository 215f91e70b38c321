"""Rewards of an answer's steps: read, kept with their answers through batches and choices, and placed on
tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.data.chat import load_tokenizer
from rlhf_core.rewards.clients import Client, Rewards, join
from rlhf_core.rewards.reward_contract import LISTS, Reply, Sample, on_tokens, read_rewards
from rlhf_core.stages.ppo.rewards.texts import lengths_of


def test_steps_are_summed_and_placed_in_order() -> None:
    reply = read_rewards([[[5, 0.5], [2, -1.0]], 2.0, [], None, [[1, True]], ((3, 1),)], 6)
    assert (
        reply.rewards.tolist()[:3] == [-0.5, 2.0, 0.0]
        and np.isnan(reply.rewards[3])
        and reply.rewards.tolist()[4:] == [1.0, 1.0]
    )
    assert reply.steps == {0: [(2, -1.0), (5, 0.5)], 4: [(1, 1.0)], 5: [(3, 1.0)]}


@pytest.mark.parametrize(
    "wrong",
    [
        [1, 2],
        [[1]],
        [[1.5, 2]],
        [[-1, 2]],
        [[1, None]],
        [[1, math.nan]],
        [[1, math.inf]],
        [["1", 2]],
        [[True, 1]],
        {"1": 2},
    ],
)
def test_what_is_no_list_of_steps_is_a_failed_reward(wrong: Any) -> None:
    reply = read_rewards([wrong, 1.0], 2)
    assert np.isnan(reply.rewards[0]) and reply.rewards[1] == 1 and not reply.steps


def test_large_steps_are_bounded_each_and_in_their_sum() -> None:
    reply = read_rewards([[[1, 1e308], [2, 1e308], [3, 1e308]], [[1, 1e39], [2, -1e39]]], 2)
    assert reply.rewards.tolist() == [1e30, 0.0]
    assert reply.steps == {0: [(1, 1e30), (2, 1e30), (3, 1e30)], 1: [(1, 1e30), (2, -1e30)]}
    assert np.isfinite(on_tokens(reply.steps[0], [1, 9])).all()


def test_steps_of_batches_parts_and_choices_stay_with_their_answers() -> None:
    class Stepwise:
        wanted = LISTS

        def score(self, samples: Sequence[Sample]) -> Reply:
            numbers = [float(sample.response) for sample in samples]
            return read_rewards([[[1, number]] if number % 2 else 0.0 for number in numbers], len(samples))

        def close(self) -> None: ...

    samples = [Sample([], str(i), {}, True, "") for i in range(7)]
    given = Client("steps", Stepwise(), 3, 2, 1).score(samples, 0)
    assert given.steps == {i: [(1, float(i))] for i in (1, 3, 5)}
    rewards = Rewards({"steps": given.rewards}, {}, {"steps": given.steps})
    assert rewards.take([5, 0, 3]).steps == {"steps": {0: [(1, 5.0)], 2: [(1, 3.0)]}}
    assert join([rewards, rewards.take([3])]).steps == {"steps": {**given.steps, 7: [(1, 3.0)]}}


def test_a_step_is_at_the_token_that_completes_its_last_character() -> None:
    lengths = [2, 3, 3, 6, 6]  # "ab", "c", half a character, "def" with it, the end
    assert on_tokens([(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (6, 16.0), (99, 32.0)], lengths).tolist() == [
        3,
        4,
        0,
        24,
        32,
    ]
    assert on_tokens([(0, 1.0)], lengths).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("slow", [False, True])
def test_characters_of_several_tokens_count_when_they_are_whole(slow: bool, material: Path) -> None:
    tokenizer = load_tokenizer(str(material / "base"))
    tokens = [*tokenizer("ab 中文", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    given: Any = tokenizer
    if slow:
        given = SimpleNamespace(decode=tokenizer.decode)
    lengths = lengths_of(given)(tokens)
    assert lengths[-1] == lengths[-2] == 5 and lengths == sorted(lengths) and len(lengths) == len(tokens) > 6
    assert set(lengths) >= {3, 4, 5}, "each of the two is whole at its last byte"
