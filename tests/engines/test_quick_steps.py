"""Steps in which every request decodes one token are scheduled by us: answers are those of vLLM's own scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Vllm
from rlhf_core.rollout.engine import Answer, Request, Sampler, Sampling

pytestmark = pytest.mark.slow
LONGEST = 96


@pytest.fixture(scope="module")
def sampler(material: Path) -> Iterator[Sampler]:
    # 14 blocks of 32 tokens: not all of the 12 answers below fit at once, so some are preempted and computed again.
    engine = {"max_num_seqs": 16, "block_size": 32, "num_gpu_blocks_override": 14}
    with closing(Sampler(str(material / "base"), seed=0, max_model_len=LONGEST, vllm=Vllm(kv_cache_gib=0.5, engine=engine))) as made:
        yield made


def scheduler(sampler: Sampler) -> Any:
    engine: Any = sampler.llm.llm_engine
    return engine.engine_core.engine_core.scheduler


def prompts(count: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(5, 60) for _ in range(numbers.randrange(3, 40))] for _ in range(count)]


def read(groups: list[list[Answer]]) -> list[Any]:
    return [(list(a.tokens), [round(value, 4) for value in a.logprobs], a.finished) for group in groups for a in group]


def both(sampler: Sampler, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, count: int = 6) -> tuple[list[Any], list[Any], int]:
    """Answers with quick steps and without, and the number of those steps."""
    found = []
    for quick in (True, False):
        monkeypatch.setattr(scheduler(sampler), "_plain", quick)
        before = scheduler(sampler).quick_steps
        found.append(
            (read(sampler.generate(prompts(count), range(0, 100 * count, 100), sampling)), scheduler(sampler).quick_steps - before)
        )
    (quickly, steps), (slowly, none) = found
    assert none == 0
    return quickly, slowly, steps


@pytest.mark.parametrize("stop", [[], [7, 11, 20, 21, 22, 23]])
def test_answers_are_those_of_vllms_scheduler(stop: list[int], sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end at a stop token, some at their limit, some at the model's, some are preempted."""
    quickly, slowly, steps = both(sampler, monkeypatch, Sampling(2, 1.0, 60, stop))
    assert quickly == slowly and steps > 20
    assert all(len(logprobs) == len(tokens) for tokens, logprobs, _ in quickly)
    assert {finished for *_, finished in quickly} == ({True, False} if stop else {False})


def test_more_answers_than_the_cache_holds_are_preempted(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = []
    own = type(scheduler(sampler))._preempt_request
    monkeypatch.setattr(type(scheduler(sampler)), "_preempt_request", lambda *a, **named: (preempted.append(1), own(*a, **named))[1])
    quickly, slowly, steps = both(sampler, monkeypatch, Sampling(2, 1.0, 60, []))
    assert quickly == slowly and steps > 20 and preempted


def test_without_log_probs_and_with_stop_texts(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    quickly, slowly, steps = both(sampler, monkeypatch, Sampling(2, 1.0, 20, [], logprobs=False), 3)
    assert quickly == slowly and steps > 10 and not quickly[0][1]
    quickly, slowly, _ = both(sampler, monkeypatch, Sampling(2, 1.0, 20, [], stop=["3"]), 3)
    assert quickly == slowly, "vLLM looks for stop texts in every token"


def test_requests_that_come_while_others_run(sampler: Sampler) -> None:
    """In `advance`; each answer is that of `generate`, and knows where new weights began."""
    how = Sampling(1, 1.0, 40, [])
    alone = [sampler.generate([prompt], [number], how)[0][0] for number, prompt in enumerate(prompts(4))]
    asked = [Request(number, prompt, number, how) for number, prompt in enumerate(prompts(4))]
    before = scheduler(sampler).quick_steps
    found = dict(sampler.advance(asked[:2], 0.05))
    while len(found) < 4:
        found |= dict(sampler.advance(asked[2:] if len(asked) == 4 else [], 0.05))
        asked = asked[:2]
    assert [list(found[number].tokens) for number in range(4)] == [list(answer.tokens) for answer in alone]
    assert scheduler(sampler).quick_steps > before


def test_what_nobody_waits_for_is_aborted(sampler: Sampler) -> None:
    """While it runs, and in the call that brings it; the others are answered as without it, and nothing of it is left."""
    how = Sampling(1, 1.0, 40, [])
    alone = [sampler.generate([prompt], [number], how)[0][0] for number, prompt in enumerate(prompts(4))]
    asked = [Request(number, prompt, number, how) for number, prompt in enumerate(prompts(4))]
    came = dict(sampler.advance(asked[:3], 0.02))
    assert not came and len(scheduler(sampler).requests) == 3
    came |= dict(sampler.advance(asked[3:], 0.0, [0, 2, 17]))
    assert len(scheduler(sampler).requests) == 2, "an unknown key is none of them"
    while len(came) < 2:
        came |= dict(sampler.advance([], 0.05))
    assert {number: list(answer.tokens) for number, answer in came.items()} == {i: list(alone[i].tokens) for i in (1, 3)}
    assert dict(sampler.advance([], 0.05, [1, 3])) == {}, "they are finished"
    assert not scheduler(sampler).requests and not sampler._begun and not sampler._sampled.begun
    blocks = scheduler(sampler).kv_cache_manager.block_pool
    assert blocks.get_num_free_blocks() == 13, "all but the one that vLLM keeps"
