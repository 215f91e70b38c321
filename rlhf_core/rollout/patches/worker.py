"""Defines the class of vLLM's worker processes on a GPU that other roles share. vLLM imports it by its name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker import gpu_worker

from rlhf_core.rollout.patches.engine import applies, memory_for_cache
from rlhf_core.rollout.patches.models import patch_models, run_qwen2_by_the_second_runner
from rlhf_core.rollout.patches.sampling import whole_distributions

BASE: Any = gpu_worker.Worker


class Worker(BASE):
    """Gives the KV cache what its own process has not used of its share of the GPU (`memory_for_cache`)."""

    def __init__(self, *arguments: Any, **options: Any):
        run_qwen2_by_the_second_runner()  # as in the scheduler's process, before the worker chooses
        super().__init__(*arguments, **options)

    def load_model(self, **options: Any) -> None:
        """Loads the model; each weight that is read is progress."""
        patch_models()
        super().load_model(**options)

    def determine_available_memory(self) -> int:
        with whole_distributions(self.model_runner.sampler):
            return memory_for_cache(self, super().determine_available_memory)

    def compile_or_warm_up_model(self) -> Any:
        with whole_distributions(self.model_runner.sampler), without_requests_of_its_own():
            return super().compile_or_warm_up_model()


@contextmanager
def without_requests_of_its_own() -> Iterator[None]:
    """Within the block vLLM 0.24 asks its second model runner nothing at the end of its start, which takes 4 s (1.5B, H200): the first
    answers compile the kernels that they need in a part of that. vLLM would warn of each."""
    if not applies(("0.24.",)):
        yield
        return
    logging.getLogger("vllm.triton_utils.jit_monitor").setLevel(logging.ERROR)
    as_before, gpu_worker.warmup_kernels = gpu_worker.warmup_kernels, lambda *_: None
    try:
        yield
    finally:
        gpu_worker.warmup_kernels = as_before
