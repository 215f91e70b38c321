"""Loads gpt-oss in bf16 with vLLM 0.24."""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Makes vLLM's loader use the names that vllm#41184 gave to expert parameters."""
    from vllm.model_executor.models.gpt_oss import GptOssModel

    load = GptOssModel._load_weights_other

    def load_moved(self: Any, *arguments: Any) -> Any:
        *before, weights, stacked = arguments
        moved = (
            (name.replace(".mlp.experts.", ".mlp.experts.routed_experts."), weight)
            for name, weight in weights
        )
        return load(self, *before, moved, stacked)

    GptOssModel._load_weights_other = load_moved
