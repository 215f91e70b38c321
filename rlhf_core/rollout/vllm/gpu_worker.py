"""Defines the class of vLLM's worker processes on a GPU shared with other roles. vLLM imports it by name."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_worker

from rlhf_core.rollout.vllm.patches import qwen2_runner
from rlhf_core.rollout.vllm.patches.memory_share import memory_for_cache
from rlhf_core.rollout.vllm.patches.table import apply_patches, is_release
from rlhf_core.rollout.vllm.patches.warm_up import whole_distributions, without_requests_of_its_own

BASE: Any = gpu_worker.Worker


class GpuWorker(BASE):
    """Gives the KV cache the part of the worker's share of the GPU that its own process leaves unused; see
    `memory_for_cache`."""

    def __init__(self, *arguments: Any, **options: Any):
        if is_release("0.24."):
            qwen2_runner.apply()  # as in the scheduler's process, before the worker chooses
        super().__init__(*arguments, **options)

    def load_model(self, **options: Any) -> None:
        """Loads the model with the patches applied, counting each weight read as progress."""
        apply_patches()
        super().load_model(**options)

    def determine_available_memory(self) -> int:
        with whole_distributions(self.model_runner.sampler):
            return memory_for_cache(self, super().determine_available_memory)

    def compile_or_warm_up_model(self) -> Any:
        with whole_distributions(self.model_runner.sampler), without_requests_of_its_own():
            return super().compile_or_warm_up_model()
