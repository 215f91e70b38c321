"""Separates packed documents in layers that carry state along a row: passes the starts of documents to the
layers' convolution and recurrence.

For gated delta rules (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next, Qwen3.5) transformers uses the kernels
of flash-linear-attention if it is installed; they accept document bounds. The convolution that transformers
falls back to does not, so it is replaced. Other recurrences (Mamba) accept bounds only through packages that
are built for one type of GPU, so their models get one document per row (see `document_leak.py`).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from rlhf_core.models.kernels.state_test import rejection_reason

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
CONVOLUTION = ("lfm2", "lfm2_moe")


def takes_edges(model: PreTrainedModel) -> bool:
    """Returns whether the state layers of a bf16 model on a GPU restart with each document of a row."""
    config = model.config.get_text_config()
    if (
        model.dtype != torch.bfloat16
        or not torch.cuda.is_available()
        or not hasattr(_code_of(model), "causal_conv1d_fn")
    ):
        return False
    if config.model_type in DELTA:
        return _delta_rule_works(config.linear_key_head_dim, config.linear_value_head_dim)
    return config.model_type in CONVOLUTION


def set_state_layers(model: PreTrainedModel) -> None:
    """Sets up the loaded model's state layers: a convolution that accepts document bounds, if the package
    causal-conv1d is missing; transformers' own gated delta rule, if the rule of flash-linear-attention is
    wrong; and the limits on Mamba's time steps from the config, which transformers' Nemotron-H does not
    read."""
    config = model.config.get_text_config()
    code = _code_of(model)
    if takes_edges(model) and importlib.util.find_spec("causal_conv1d") is None:
        code.causal_conv1d_fn = causal_conv1d
    elif config.model_type in DELTA and torch.cuda.is_available() and model.dtype == torch.bfloat16:
        code.torch_chunk_gated_delta_rule = inspect.unwrap(code.torch_chunk_gated_delta_rule)
    for part in model.modules():
        if hasattr(part, "time_step_limit") and hasattr(config, "time_step_limit"):
            part.time_step_limit = tuple(config.time_step_limit)


def _code_of(model: PreTrainedModel) -> Any:
    """Returns transformers' module for the backbone. A class with a scalar head may be our own
    (`score_classes`)."""
    return sys.modules[type(model.base_model).__module__]


@cache
def _delta_rule_works(key_size: int, value_size: int) -> bool:
    """Returns whether flash-linear-attention is installed and passes its test."""
    if importlib.util.find_spec("fla") is None:
        return False
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    reason = rejection_reason(
        chunk_gated_delta_rule, key_size, value_size, torch.device("cuda", torch.cuda.current_device())
    )
    if reason:
        print(
            f"flash-linear-attention's gated delta rule {reason}: plain PyTorch, which is slow, and one"
            " document a row",
            flush=True,
        )
    return reason is None


def document_numbers(positions: Tensor) -> Tensor:
    """Returns the index of each token's document, (1, T) int32. positions: (T,), 0 at the start of each
    document."""
    return (F.pad(positions.diff() != 1, (1, 0))).cumsum(0).int()[None]


def causal_conv1d(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolves each channel over the last K tokens up to each token: (B, D, T), (D, K) -> (B, D, T).

    With `seq_idx` (1, T), the index of each token's document, or `cu_seq_lens_q` (documents + 1), it covers
    only tokens of the same document.
    """
    if cu_seq_lens_q is not None and rows.is_cuda and activation in (None, "silu", "swish"):
        from fla.modules.causal_conv1d import causal_conv1d as kernel

        found, _state = kernel(
            rows.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q
        )
        return found.transpose(1, 2)
    size = weight.shape[-1]
    found = F.conv1d(F.pad(rows, (size - 1, 0)).to(weight.dtype), weight[:, None], bias, groups=len(weight))
    if seq_idx is not None:
        found = _restarted(found, rows.to(weight.dtype), weight, bias, seq_idx[0])
    return (found if activation is None else ACT2FN[activation](found)).to(rows.dtype)


def _restarted(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor) -> Tensor:
    """Recomputes the first tokens of each document, whose convolution had read tokens of another document."""
    size = weight.shape[-1]
    tokens = torch.arange(len(numbers), device=rows.device)
    crossing = (numbers != numbers[(tokens - size + 1).clamp(0)]).nonzero()
    read = crossing + torch.arange(1 - size, 1, device=rows.device)  # (n, K), the tokens read for each one
    places = read.clamp(0)
    own = (numbers[places] == numbers[crossing]) & (read >= 0)
    products = (rows[0][:, places] * own * weight[:, None]).sum(-1)
    return found.index_copy(2, crossing[:, 0], (products if bias is None else products + bias[:, None])[None])
