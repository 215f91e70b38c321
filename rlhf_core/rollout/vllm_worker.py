"""vLLM's worker on a GPU that it shares: other roles load and free their models there while it measures what it needs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_worker

from rlhf_core.rollout.vllm_patches import count_loaded_weights

BASE: Any = gpu_worker.Worker
BESIDES = 2 * 2**30  # bytes besides PyTorch's: CUDA's own, NCCL's, graphs


class Worker(BASE):
    """Leaves to the KV cache what its own process has not used of its share of the GPU.

    vLLM takes the GPU's free memory before and after a largest batch for its own doing, and stops when there is more of it
    afterwards: when another role has cut its model in shards or moved it to the host.
    """

    def load_model(self, **options: Any) -> None:
        """Loads the model; each weight that is read is progress."""
        count_loaded_weights()
        super().load_model(**options)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache. Raises ValueError when nothing is left for it."""
        weights, before = sum(weight.nbytes for weight in self.model_runner.get_model().parameters()), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.cache_config.kv_cache_memory_bytes = 1  # given a size, vLLM runs its largest batch and measures nothing
        super().determine_available_memory()
        peak = torch.cuda.max_memory_allocated()
        taken = max(peak, weights + peak - before) + BESIDES  # weights of an engine that can sleep may be outside PyTorch's count
        left = int(self.requested_memory) - taken
        if left <= 0:
            raise ValueError(
                f"weights, the largest batch and {BESIDES / 2**30:g} GiB for CUDA, NCCL and graphs take {taken / 2**30:.1f} GiB, and "
                f"vllm.gpu_memory_utilization grants {self.requested_memory / 2**30:.1f}: raise it"
            )
        self.cache_config.kv_cache_memory_bytes = left
        return left
