"""Lets new expert weights replace packed weights on a CPU."""

from __future__ import annotations

from typing import Any

import torch


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Drops the kernels of a model's experts. On a CPU vLLM packs experts when it creates their kernel, so
    the next load then packs the new weights."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
