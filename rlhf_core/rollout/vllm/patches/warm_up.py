"""Shortens the start of an engine on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.v1.worker import gpu_worker

from rlhf_core.rollout.vllm.patches.table import is_release


@contextmanager
def whole_distributions(sampler: Any) -> Iterator[None]:
    """Makes `sampler` ignore top-k and top-p within the block. vLLM's largest batch requests them, but their
    kernel takes ten seconds to compile at every start, and few runs use it. Runs that do use it compile it at
    its first use."""
    if not hasattr(sampler, "topk_topp_sampler"):
        yield
        return
    as_before = sampler.forward

    def forward(logits: Tensor, sampling_metadata: Any, *others: Any, **named: Any) -> Any:
        return as_before(logits, replace(sampling_metadata, top_k=None, top_p=None), *others, **named)

    sampler.forward = forward
    try:
        yield
    finally:
        del sampler.forward


@contextmanager
def without_requests_of_its_own() -> Iterator[None]:
    """Keeps vLLM 0.24 from sending warm-up requests to its second model runner within the block, which take 4
    s (for a 1.5B model on an H200). The first answers compile the kernels they need in less time; vLLM's
    warnings about this are silenced."""
    if not is_release("0.24."):
        yield
        return
    logging.getLogger("vllm.triton_utils.jit_monitor").setLevel(logging.ERROR)
    as_before = gpu_worker.warmup_kernels
    gpu_worker.warmup_kernels = lambda *_: None
    try:
        yield
    finally:
        gpu_worker.warmup_kernels = as_before
