"""Counts the ranks of sampled tokens on a CPU without a compiler."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.system.machine import num_gpus


def apply() -> None:
    """Makes PyTorch compute the ranks that vLLM returns with log-probs. vLLM compiles this comparison when
    each engine first returns log-probs; on a CPU this uses a C++ compiler and takes longer than the rest of
    the start."""
    if num_gpus():
        return
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = token_ranks


def token_ranks(logprobs: Tensor, of_tokens: Tensor) -> Tensor:
    """Returns how many log-probs in each row are at least as large as the token's, which is 1 for the most
    probable token. logprobs: (N, V). of_tokens: (N, 1). Returns (N,)."""
    return (logprobs >= of_tokens).sum(-1)
