"""What is read from vLLM's answers and set in its workers; the engines' own tests compare log-probs with the
trainer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.rollout.vllm.patches.packed_experts import forget_packed_experts
from rlhf_core.rollout.vllm.vllm_answers import sampled_logprobs
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.rollout.vllm.weight_receiver import WeightReceiver


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
