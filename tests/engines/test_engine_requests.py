"""Requests of an engine: more than its cache holds, some that come while others run, and some that nobody
waits for any more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import EngineConfig
from rlhf_core.rollout.engine_contract import Request, Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine

pytestmark = pytest.mark.slow
LONGEST = 96


@pytest.fixture(scope="module")
def sampler(material: Path) -> Iterator[VllmEngine]:
    # 14 blocks of 32 tokens: not all of the 12 answers below fit at once, so some are preempted and computed
    # again.
    engine = {"max_num_seqs": 16, "block_size": 32, "num_gpu_blocks_override": 14}
    with closing(
        VllmEngine(
            str(material / "base"),
            seed=0,
            max_model_len=LONGEST,
            config=EngineConfig(kv_cache_gib=0.5, options=engine),
        )
    ) as made:
        yield made


def scheduler(sampler: VllmEngine) -> Any:
    engine: Any = sampler.llm.llm_engine
    return engine.engine_core.engine_core.scheduler


def prompts(count: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(5, 60) for _ in range(numbers.randrange(3, 40))] for _ in range(count)]


def test_more_answers_than_the_cache_holds_are_those_of_one_at_a_time(sampler: VllmEngine) -> None:
    """Some end at a stop token, some at their limit, some at the model's; some are preempted and computed
    again."""
    how = Sampling(2, 1.0, 60, [7, 11, 20, 21, 22, 23])
    together = sampler.generate(prompts(6), range(0, 600, 100), how)
    alone = [sampler.generate([prompt], [100 * number], how)[0] for number, prompt in enumerate(prompts(6))]
    assert [[list(a.tokens) for a in group] for group in together] == [
        [list(a.tokens) for a in group] for group in alone
    ]
    assert {answer.finished for group in together for answer in group} == {True, False}
    for group, expected in zip(together, alone, strict=True):
        for answer, other in zip(group, expected, strict=True):
            assert len(answer.logprobs) == len(answer.tokens)
            assert list(answer.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)


def test_answers_without_log_probs(sampler: VllmEngine) -> None:
    groups = sampler.generate(prompts(3), range(3), Sampling(2, 1.0, 20, [], logprobs=False))
    assert all(answer.tokens and not answer.logprobs for group in groups for answer in group)


def test_requests_that_come_while_others_run(sampler: VllmEngine) -> None:
    """In `advance`; each answer is that of `generate`, and knows where new weights began."""
    how = Sampling(1, 1.0, 40, [])
    alone = [sampler.generate([prompt], [number], how)[0][0] for number, prompt in enumerate(prompts(4))]
    asked = [Request(number, prompt, number, how) for number, prompt in enumerate(prompts(4))]
    found = dict(sampler.advance(asked[:2], 0.05))
    while len(found) < 4:
        found |= dict(sampler.advance(asked[2:] if len(asked) == 4 else [], 0.05))
        asked = asked[:2]
    assert [list(found[number].tokens) for number in range(4)] == [list(answer.tokens) for answer in alone]


def test_what_nobody_waits_for_is_aborted(sampler: VllmEngine) -> None:
    """While it runs, and in the call that brings it; the others are answered as without it, and nothing of it
    is left."""
    how = Sampling(1, 1.0, 40, [])
    alone = [sampler.generate([prompt], [number], how)[0][0] for number, prompt in enumerate(prompts(4))]
    asked = [Request(number, prompt, number, how) for number, prompt in enumerate(prompts(4))]
    came = dict(sampler.advance(asked[:3], 0.02))
    assert not came and len(scheduler(sampler).requests) == 3
    came |= dict(sampler.advance(asked[3:], 0.0, [0, 2, 17]))
    assert len(scheduler(sampler).requests) == 2, "an unknown key is none of them"
    while len(came) < 2:
        came |= dict(sampler.advance([], 0.05))
    assert {number: list(answer.tokens) for number, answer in came.items()} == {
        i: list(alone[i].tokens) for i in (1, 3)
    }
    assert dict(sampler.advance([], 0.05, [1, 3])) == {}, "they are finished"
    assert not scheduler(sampler).requests and not sampler._begun
    blocks = scheduler(sampler).kv_cache_manager.block_pool
    assert blocks.get_num_free_blocks() == 13, "all but the one that vLLM keeps"
