"""A model that is only read, cut over its ranks (ZeRO-3): each fetches a layer's weights while it computes."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlhf_core.training.zero_engine import library, prepared, set_leaves


class FrozenZero:
    """One rank of a model that was loaded with `ZeroShards`. All ranks run equally many passes, none with a gradient."""

    def __init__(self, module: nn.Module, dtype: str):
        self.module = module.eval().requires_grad_(False)
        set_leaves(library(), module, layers=False)
        zero = {"stage": 3} | prepared(module, dtype, keep=False)
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == "bfloat16"}, "zero_optimization": zero}
        self._engine, *_ = library().initialize(model=module, config=config | {"steps_per_print": 10**9})
        self._engine.eval()

    def __call__(self, *inputs: Any) -> Any:
        return self._engine(*inputs)

    def release(self) -> None:
        """Gives back weights that were fetched ahead."""
        self._engine.optimizer.empty_partition_cache()
