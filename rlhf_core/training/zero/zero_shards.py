"""Shards a model over the ranks of a ZeRO-3 group as it is loaded (see `models/weights/shards.py`), using
DeepSpeed's own partitioning, and runs models that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.training.zero.zero_engine import join_group, library, prepared, rank_device, set_leaves


class ZeroShards:
    """Shards weights over the ranks of this process's group. Rank 0 reads each large weight, and every rank
    keeps its part of it, with `on_host` in (pinned) host memory."""

    def __init__(self, dtype: str, on_host: bool = False):
        self._zero = library().zero
        self._dtype = getattr(torch, dtype)
        self._place = {"remote_device": "cpu", "pin_memory": torch.cuda.is_available()} if on_host else {}
        join_group()
        self.reads = dist.get_rank() == 0

    def cut(self, weight: nn.Parameter) -> None:
        if weight.is_floating_point():
            # as DeepSpeed does for whole weights
            weight.data = weight.data.to(rank_device(), self._dtype).contiguous()
        holder = nn.Module()
        # bypasses the hooks for registering weights, one of which calls this method
        holder._parameters["weight"] = weight
        # Once the model's size is known, the engine decides whether products fetch weights again.
        self._zero.Init(module=holder, mem_efficient_linear=False, **self._place)

    def gathered(
        self, weights: Sequence[nn.Parameter], changed: bool = False
    ) -> AbstractContextManager[object]:
        return self._zero.GatheredParameters(list(weights), modifier_rank=0 if changed else None)


class FrozenZero:
    """One rank of a model that was loaded with `ZeroShards` and is not trained; it fetches each layer's
    weights when they are needed. All ranks must run the same number of passes, none with gradients."""

    def __init__(self, module: nn.Module, dtype: str):
        self.module = module.eval().requires_grad_(False)
        set_leaves(library(), module)
        zero = {"stage": 3} | prepared(module, dtype, keep=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16"},
            "zero_optimization": zero,
        }
        self._engine, *_ = library().initialize(model=module, config=config | {"steps_per_print": 10**9})
        self._engine.eval()

    def __call__(self, *inputs: Any) -> Any:
        return self._engine(*inputs)

    def release(self) -> None:
        """Frees weights that were fetched ahead."""
        self._engine.optimizer.empty_partition_cache()
