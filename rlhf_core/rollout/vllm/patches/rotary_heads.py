"""Computes rotary embeddings on a CPU where heads are a separate dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def apply() -> None:
    """Makes the rotary embeddings of multi-head latent attention and LFM2 run in PyTorch, because vLLM's CPU
    kernel expects (tokens, heads x size) and computes other shapes wrongly."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    own = RotaryEmbedding.forward_cpu

    def of_separate_heads(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.dim() == 2:
            return own(self, positions, query, key)
        return RotaryEmbedding.forward_native(self, positions, query, key)

    RotaryEmbedding.forward_cpu = of_separate_heads
