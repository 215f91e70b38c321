"""State layers that restart with each document of a row, computed in PyTorch, as kernels do on a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.kernels import state_layers
from rlhf_core.models.kernels.state_layers import causal_conv1d


def take_edges(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the convolution, and the gated delta rule in families that have one."""
    code = state_layers._code_of(model)

    def rule(
        *parts: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        lengths = cu_seqlens.diff().tolist()
        split = zip(*(part.split(lengths, 1) for part in (*parts, g, beta)), strict=True)
        return (
            torch.cat([plain(*qkv, g=decay, beta=rate, **options)[0] for *qkv, decay, rate in split], 1),
            None,
        )

    if model.config.model_type in state_layers.DELTA:
        plain = inspect.unwrap(code.torch_chunk_gated_delta_rule)
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", rule)
    monkeypatch.setattr(
        code, "causal_conv1d_fn", lambda *given, cu_seq_lens_q=None, **named: causal_conv1d(*given, **named)
    )
    monkeypatch.setattr(state_layers, "takes_edges", lambda model: True)
