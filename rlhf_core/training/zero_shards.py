"""Cuts a model over the ranks of a ZeRO-3 group while it is loaded (`models/shards.py`), with DeepSpeed's own partitions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from rlhf_core.training.zero_engine import join_group, library, rank_device


class ZeroShards:
    """The ranks of this process's group. Every rank reads each weight, and keeps its part of what rank 0 has read; with `on_host` in
    (pinned) host memory."""

    def __init__(self, dtype: str, on_host: bool = False):
        self._zero, self._dtype = library().zero, getattr(torch, dtype)
        self._place = {"remote_device": "cpu", "pin_memory": torch.cuda.is_available()} if on_host else {}
        join_group()

    def cut(self, weight: nn.Parameter) -> None:
        if weight.is_floating_point():
            weight.data = weight.data.to(rank_device(), self._dtype)  # what DeepSpeed does with weights that come to it whole
        holder = nn.Module()
        holder._parameters["weight"] = weight  # without the hooks that see a weight that is registered, one of which calls this
        # Whether products take weights that are fetched again is decided by the engine, once the model's size is known.
        self._zero.Init(module=holder, mem_efficient_linear=False, **self._place)

    def gathered(self, weights: Sequence[nn.Parameter], changed: bool = False) -> AbstractContextManager[object]:
        return self._zero.GatheredParameters(list(weights), modifier_rank=0 if changed else None)
