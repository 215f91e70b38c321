"""What a model's config.json tells of its layers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# `layer_types` that hand something along a row without regard to the borders of documents: a convolution, a recurrent state.
CARRYING = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
# Families all of whose models have such layers, as transformers' `_is_stateful` tells; their config.json need not list them.
STATEFUL = {
    *("bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid", "jamba", "kimi_linear", "mamba", "mamba2"),
    *("minicpmv4_6", "minicpmv4_7", "nemotron_h", "nemotron_h_omni", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
}


def carries_by_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model whose layers carry from one document of a row into the next."""
    text = config.get("text_config") or {}
    kinds = {*(config.get("layer_types") or ()), *(text.get("layer_types") or ())}
    families = {str(told.get("model_type")).removesuffix("_text") for told in (config, text)}
    return bool(kinds & CARRYING or families & STATEFUL)
