"""Measures how much memory an engine on a shared GPU has left for its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BESIDES = 2 * 2**30  # bytes outside PyTorch's count: CUDA's own, NCCL's, graphs


def memory_for_cache(worker: Any, run_largest_batch: Callable[[], object]) -> int:
    """Returns the bytes for the KV cache: the part of the worker's share of the GPU that its own process does
    not use.

    vLLM compares the GPU's free memory before and after a largest batch, and fails when more is free
    afterwards, which happens if another role meanwhile shards its model or moves it to the host. Raises
    ValueError when nothing is left.
    """
    weights = sum(weight.nbytes for weight in worker.model_runner.get_model().parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    # when given a size, vLLM runs its largest batch but measures nothing
    worker.cache_config.kv_cache_memory_bytes = 1
    run_largest_batch()
    peak = torch.cuda.max_memory_allocated()
    # PyTorch may not count the weights of an engine that can sleep
    taken = max(peak, weights + peak - before) + BESIDES
    left = int(worker.requested_memory) - taken
    if left <= 0:
        raise ValueError(
            f"weights, the largest batch and {BESIDES / 2**30:g} GiB for CUDA, NCCL and graphs take"
            f" {taken / 2**30:.1f} GiB, and engine.gpu_memory_utilization grants"
            f" {worker.requested_memory / 2**30:.1f}: raise it"
        )
    worker.cache_config.kv_cache_memory_bytes = left
    return left
