"""Counts the ranks of sampled tokens on a CPU without a compiler."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.system.machine import num_gpus


def apply() -> None:
    """Makes PyTorch compute the ranks that vLLM returns with log-probs. vLLM compiles this comparison at each
    engine's first log-probs: on a CPU by a C++ compiler, which takes longer than the whole start."""
    if num_gpus():
        return
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = token_ranks


def token_ranks(logprobs: Tensor, of_tokens: Tensor) -> Tensor:
    """Returns how many log-probs of each row are at least the token's, which is 1 for the most probable
    token. logprobs: (N, V). of_tokens: (N, 1). Returns (N,)."""
    return (logprobs >= of_tokens).sum(-1)
