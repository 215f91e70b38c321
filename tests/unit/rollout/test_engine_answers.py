"""Answers of engines: what they hold, and how they travel to the training."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.data.documents import Document, Prompt, answered, compact
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import answer_of
from rlhf_core.rollout.vllm.patches.packed_experts import forget_packed_experts
from rlhf_core.rollout.vllm.patches.token_ranks import token_ranks
from rlhf_core.rollout.vllm.vllm_answers import sampled_logprobs
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.rollout.vllm.weight_receiver import WeightReceiver
from rlhf_core.stages.ppo.sampling.rollout_group import rollout


def flat_logprobs() -> Any:
    # not at the top: vLLM reads its environment when it is first imported
    from vllm.logprobs import FlatLogprobs

    return FlatLogprobs()


def test_log_probs_of_sampled_tokens_are_read() -> None:
    """vLLM puts the sampled token first, the likeliest ones after it."""
    plain = flat_logprobs()
    plain.append_fast([5, 3], [-0.5, -0.25], iter([2, 1]), [None, None])
    plain.append_fast([7], [-1.0], iter([1]), [None])
    assert sampled_logprobs(plain, [5, 7]) == [-0.5, -1.0]
    with pytest.raises(RuntimeError, match="log-probs of other tokens"):
        sampled_logprobs(plain, [3, 7])
    with pytest.raises(RuntimeError, match="log-probs of other tokens"):
        sampled_logprobs(flat_logprobs(), [5])
    assert sampled_logprobs(flat_logprobs(), []) == []


def test_experts_that_vllm_packed_are_packed_anew() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    model[0].quant_method = SimpleNamespace()
    model[1].quant_method = SimpleNamespace(moe_kernel="packed")
    forget_packed_experts(model)
    assert model[1].quant_method.moe_kernel is None and not vars(model[0].quant_method)


def test_ranks_of_tokens_are_those_that_vllm_computes_without_compilation() -> None:
    """The most probable token has rank 1; equal log-probs count too, also those of tokens left out."""
    from vllm.v1.sample.ops import logprobs as operations

    rows = torch.tensor([[-0.1, -2.0, -3.0], [-1.0, -1.0, -4.0], [-torch.inf, 0.0, -torch.inf]])
    chosen = torch.tensor([[-3.0], [-1.0], [-torch.inf]])
    found = token_ranks(rows, chosen)
    assert found.tolist() == [3, 2, 3] and token_ranks(rows[:0], chosen[:0]).tolist() == []
    assert found.equal(inspect.unwrap(operations.batched_count_greater_than)(rows, chosen))


def test_a_seed_is_that_of_both_of_vllms_model_runners() -> None:
    """Answers without seeds of their own draw from PyTorch in one and from numpy in the other."""
    receiver = WeightReceiver()

    def drawn(seed: int) -> tuple[float, int]:
        receiver.seed(seed)
        return float(torch.rand(())), int(np.random.randint(2**31))

    first = drawn(2**47 + 5)
    other = drawn(2**47 + 6)
    again = drawn(2**47 + 5)
    assert first == again and first[0] != other[0] and first[1] != other[1]


def test_drafts_are_counted_by_vllms_metrics() -> None:
    """Three answers of 10 tokens in all, 4 of which were drafts: 6 steps."""
    from vllm.v1.metrics.reader import Counter, Gauge

    counted = {"vllm:generation_tokens": 10, "vllm:spec_decode_num_accepted_tokens": 4}
    running = Gauge(name="vllm:num_requests_running", labels={}, value=0.0)
    sampler = VllmEngine.__new__(VllmEngine)
    sampler._counted = (0, 0)
    metrics = lambda: [  # noqa: E731
        running,
        *(Counter(name=name, labels={}, value=value) for name, value in counted.items()),
    ]
    sampler.llm = SimpleNamespace(get_metrics=metrics)
    assert sampler.sampled() == (10, 6) and sampler.sampled() == (0, 0)
    counted["vllm:generation_tokens"] = 13
    assert sampler.sampled() == (3, 3), "no draft was right"


PROMPT = [7, 8]
TOKENS = [3, 4, 5]
LOGPROBS = [-1.0, -0.5, 0.0]


def travelled(value: Any) -> tuple[Any, list[bytes]]:
    """The value as another process of the node has it, and the buffers that Ray stores, which nobody may
    write to."""
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    stored = [buffer.raw().tobytes() for buffer in buffers]
    return pickle.loads(rest, buffers=stored), stored


def test_arrays_are_not_copied() -> None:
    answer, of_answer = travelled(answer_of(TOKENS, LOGPROBS, True))
    document, of_document = travelled(compact(PROMPT, TOKENS))
    assert [len(buffer) for buffer in of_answer] == [12, 12] and [len(buffer) for buffer in of_document] == [
        20,
        5,
    ]
    for values, buffer in zip(
        (answer.tokens, answer.logprobs, document.tokens, document.mask), of_answer + of_document, strict=True
    ):
        assert np.shares_memory(np.asarray(values), np.frombuffer(buffer, np.uint8))
    assert np.shares_memory(document.mask_array, np.frombuffer(of_document[1], np.uint8)), "nor is the mask"


def test_an_answer_means_the_same_where_it_arrives() -> None:
    before = answer_of(TOKENS, LOGPROBS, False)
    answer, _ = travelled(before)
    assert json.dumps([list(answer.tokens), list(answer.logprobs), answer.finished]) == json.dumps(
        [TOKENS, LOGPROBS, False]
    )
    prompt = Prompt((), PROMPT, {}, False)
    here = rollout(prompt, before)
    there = rollout(prompt, answer)
    assert here.document == there.document == answered(PROMPT, TOKENS) and there.answer == TOKENS
    assert here.sampler_logprobs.tolist() == there.sampler_logprobs.tolist() == [0, 0, *LOGPROBS]
    there.sampler_logprobs[0] = 1.0  # its own array: the stored one is free
    assert rollout(prompt, travelled(answer_of(TOKENS, [], True))[0]).sampler_logprobs.tolist() == [0] * 5


@pytest.mark.parametrize("of", [answered, compact])
def test_a_document_means_the_same_where_it_arrives(of: Any) -> None:
    plain = answered(PROMPT, TOKENS)
    other = answered(PROMPT, [9])
    found, second = (travelled(of(PROMPT, d.tokens[2:]))[0] for d in (plain, other))
    assert found == plain and plain == found and found.answer_start == 2 and found.cut(3) == plain.cut(3)
    assert second.after(found) == other.after(plain) and second.after(found).shared == 2
    assert travelled(Document([1], [False]))[0].answer_start == 1
    assert found.mask_array.dtype == bool and found.mask_array.tolist() == plain.mask_array.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of arrays that cannot be written to
        here, there = (collate([[d, e]], 0) for d, e in ((plain, other), (found, second)))
    for name in ("tokens", "positions", "documents", "mask"):
        assert getattr(here, name).equal(getattr(there, name))
        assert getattr(here, name).dtype == getattr(there, name).dtype
