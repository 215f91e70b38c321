"""Log-probs read out of the arrays that vLLM's steps left; the engines' own tests compare them with the trainer's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_core.rollout.fast_logprobs import gather_sampled_alone, sampled_logprobs


def answer(*steps: tuple[list[list[int]], list[list[float]]]) -> SimpleNamespace:
    """What is kept of an answer: token ids and log-probs of each step, (tokens of the step, 1)."""
    tokens, logprobs = zip(*steps, strict=True)
    return SimpleNamespace(step_tokens=[np.array(part) for part in tokens], step_logprobs=[np.array(part) for part in logprobs])


def test_steps_of_one_and_of_several_tokens_follow_each_other() -> None:
    kept = answer(([[5]], [[-0.5]]), ([[7], [9]], [[-1.0], [-2.0]]))
    assert sampled_logprobs(kept, [5, 7, 9]) == [-0.5, -1.0, -2.0]
    assert sampled_logprobs(SimpleNamespace(), []) == []


@pytest.mark.parametrize("tokens", [[5, 8], [5], []])
def test_arrays_that_speak_of_other_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(RuntimeError, match="do not speak of the tokens"):
        sampled_logprobs(answer(([[5]], [[-0.5]]), ([[7]], [[-1.0]])), tokens)
    with pytest.raises(RuntimeError, match="do not speak of the tokens"):
        sampled_logprobs(SimpleNamespace(), [5])


def test_a_sampler_with_ways_of_its_own_is_left_alone() -> None:
    """That of vLLM's second model runner has no such method."""
    sampler = SimpleNamespace()
    gather_sampled_alone(sampler)
    assert not vars(sampler)
