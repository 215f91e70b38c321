"""Attention inside each document of a packed row, on a GPU: flash-attn's varlen kernel, or PyTorch's own where that package is missing.

Both take the rows laid end to end with the borders of the documents, so that nothing is padded and no mask is built
(FlashAttention-2, Dao 2023). Without a GPU or in fp32 transformers' `sdpa` runs with a block-diagonal mask.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, PreTrainedModel

FLASH, PYTORCH = "flash_attention_2", "pytorch_varlen"
_ASKS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # not in PyTorch 2.11, which groups heads unasked
_GROUPED: dict[str, Any] = {"enable_gqa": True} if _ASKS else {}


def attention_for(dtype: str) -> str:
    """The `attn_implementation` to load a model with that computes in `dtype`."""
    if dtype != "bfloat16" or not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None:
        return "sdpa"
    return FLASH


def settled(model: PreTrainedModel) -> PreTrainedModel:
    """The loaded model, moved from `sdpa` to PyTorch's kernel where that runs, or to `eager` where `sdpa` drops a cap of the logits."""
    if model.config._attn_implementation == "sdpa":
        if getattr(model.config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")
        elif model.dtype == torch.bfloat16 and _has_kernel() and model._supports_attention_backend:
            model.set_attn_implementation(PYTORCH)
    return model


def _has_kernel() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def takes_borders(model: PreTrainedModel) -> bool:
    """Whether its attention wants one row and the borders of the documents in it, instead of a mask."""
    return model.config._attn_implementation in (FLASH, PYTORCH)


def borders(positions: Tensor) -> dict[str, Any]:
    """Of rows laid end to end, found once a pass: left to itself every layer would ask the device for them again.

    `positions` (any shape) restart at 0 with each document.
    """
    starts = (positions.flatten() == 0).cpu().nonzero().flatten()
    edges = torch.cat([starts, torch.tensor([positions.numel()])]).int()
    longest, on_device = int(edges.diff().max()), edges.to(positions.device, non_blocking=True)
    return {"cu_seq_lens_q": on_device, "cu_seq_lens_k": on_device, "max_length_q": longest, "max_length_k": longest}


def pytorch_varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers asks for it: `query` (1, heads, T, D), `key` and `value` (1, kv heads, T, D) -> (1, T, heads, D).

    A window counts the token itself: token t sees tokens > t - `sliding_window`. Adapters may hand over fp32, which the kernel
    does not take.
    """
    q, k, v = (part[0].transpose(0, 1).to(module.config.dtype) for part in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    edges, longest = cu_seq_lens_q, max_length_q
    attended: Any = varlen.varlen_attn(q, k, v, edges, edges, longest, longest, scale=scaling, window_size=window, **_GROUPED)
    return attended[None], None


AttentionInterface.register(PYTORCH, pytorch_varlen)
