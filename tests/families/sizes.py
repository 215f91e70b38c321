"""Sizes of heads, states and vocabulary as families publish them, with few layers and a hidden size of 1,024:
for one GPU."""

from __future__ import annotations

from typing import Any

LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
EXPERTS = {"moe_intermediate_size": 512}
DELTA = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 256,
}
LATENT = {
    **{
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
    },
    **{"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, **EXPERTS},
}
GEMMA = {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 512}
# What a family has beside LARGE.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "ministral3": {},
    "olmo3": {"sliding_window": 512},
    "qwen3-moe": {"num_experts": 8, **EXPERTS},
    "gemma3": GEMMA,
    "gemma4": {
        **GEMMA,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "gpt-oss": {"head_dim": 64, "num_attention_heads": 16, "sliding_window": 128, "intermediate_size": 1024},
    "glm4-moe-lite": LATENT,
    "deepseek-v3": LATENT,
    "granite-hybrid": {
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_chunk_size": 256,
        "shared_intermediate_size": 2048,
    },
    "nemotron-h": dict(mamba_num_heads=32, mamba_head_dim=64, ssm_state_size=128, n_groups=8, chunk_size=128),
    "lfm2": {"conv_dim": 1024, "block_dim": 1024, "head_dim": 64, "num_attention_heads": 16},
    "qwen3_5": DELTA,
    "qwen3_5-moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 512, "num_experts": 8},
    "glm4-moe": {"n_routed_experts": 8, **EXPERTS},
    "gemma2": GEMMA,
    "gemma3-wrapper": GEMMA,
    "qwen3-next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 512, "num_experts": 8},
    "qwen3_5-wrapper": DELTA,
    "qwen3_5-moe-wrapper": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 512, "num_experts": 8},
    "gemma4-wrapper": {
        **GEMMA,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "mistral3-wrapper": {},
}


VOCABULARIES = {
    **{
        "llama": 128256,
        "ministral3": 131072,
        "mistral3-wrapper": 131072,
        "olmo3": 100278,
        "deepseek-v3": 129280,
        "nemotron-h": 131072,
    },
    **dict.fromkeys(("qwen2", "qwen3", "qwen3-moe", "qwen3-next"), 151936),
    **dict.fromkeys(("qwen3_5", "qwen3_5-moe", "qwen3_5-wrapper", "qwen3_5-moe-wrapper"), 248320),
    **dict.fromkeys(("gemma2", "gemma3", "gemma4", "gemma3-wrapper", "gemma4-wrapper"), 262144),
    **dict.fromkeys(("glm4", "glm4-moe"), 151552),
    **{
        "glm4-moe-lite": 154880,
        "gpt-oss": 201088,
        "granite": 100352,
        "granite-hybrid": 100352,
        "lfm2": 65536,
        "phi3": 100352,
    },
}


def larger(family: str) -> dict[str, Any]:
    return {**LARGE, "vocab_size": VOCABULARIES.get(family, 32768), **SIZES.get(family, {})}
