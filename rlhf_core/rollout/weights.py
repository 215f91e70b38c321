"""Weights on their way into an engine: as tensors in memory, or as CUDA IPC handles when both sides sit on one card.

A handle costs no copy and no host memory; the sender keeps its tensors until the receiver is done. vLLM imports
`WeightReceiver` into its workers by name. Left out: NCCL between cards; there, weights pass through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Handle(NamedTuple):
    """A CUDA tensor of another process: `rebuild(*arguments)` maps it into this one."""

    rebuild: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


Weight = torch.Tensor | Handle


def device_id() -> str | None:
    """The card this process computes on, the same in every process on it; None on CPU."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None


def handle(tensor: torch.Tensor) -> Handle:
    """A handle of a CUDA tensor, which must outlive the receiver's use of it."""
    from torch.multiprocessing.reductions import reduce_tensor

    return Handle(*reduce_tensor(tensor))


class WeightReceiver:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def receive_weights(self, named: Sequence[tuple[str, Weight]]) -> None:
        """Loads weights under checkpoint names; `load_weights` alone fails after start, since CPU linears are repacked."""
        if not torch.cuda.is_available():
            _forget_packed_experts(self.model_runner.get_model())
        opened = ((name, weight.rebuild(*weight.arguments) if isinstance(weight, Handle) else weight) for name, weight in named)
        self.model_runner.reload_weights(weights_iterator=opened)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """On CPU vLLM packs experts once, when their kernel is made: without the kernel, the next load packs the new weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]
