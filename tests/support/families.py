"""Small random models of each family (seed 0) with the demo's tokenizer, saved as checkpoints.

Heads have 32 dimensions: vLLM's CPU engine takes no smaller ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
# A layer with a state (Mamba 2) and one with attention; as many state heads as make up `mamba_expand` times
# the hidden size.
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SHARED_EXPERT = {**QWEN_MOE, "shared_expert_intermediate_size": 64}
LATENT = {  # multi-head latent attention
    **{
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1),
}
MAMBA = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 8,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
GEMMA = {**WINDOW, "tie_word_embeddings": True}
GEMMA4 = {
    **GEMMA,
    **dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=64),
    **{"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0},
}
# What each has beside SHAPE, by the name that the classes of transformers begin with.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "ministral3": ("Ministral3", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "tie_word_embeddings": False}),
    "qwen3-next": ("Qwen3Next", {**SHARED_EXPERT, **DELTA}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5-moe": ("Qwen3_5Moe", {**SHARED_EXPERT, **DELTA}),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
    ),
    "gemma3": ("Gemma3", GEMMA),
    "gemma4": ("Gemma4", GEMMA4),
    "gpt-oss": ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "glm4-moe": (
        "Glm4Moe",
        {
            key: LATENT[key]
            for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group")
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**LATENT, "mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "olmo3": ("Olmo3", WINDOW),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    ),
    "granite-hybrid": ("GraniteMoeHybrid", {**HYBRID, "tie_word_embeddings": False}),
    "nemotron-h": ("NemotronH", MAMBA),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "conv_dim": 64, "block_dim": 64},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
MOE = ("mixtral", "qwen3-moe")
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)
# Multimodal checkpoints: the class, what their language models have beside SHAPE, and what reads images.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3-wrapper": ("Gemma3", {}, VISION),
    "mistral3-wrapper": (
        "Mistral3",
        {"model_type": "ministral3"},
        VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "qwen3_5-wrapper": ("Qwen3_5", DELTA, PATCHES),
    "qwen3_5-moe-wrapper": ("Qwen3_5Moe", {**SHARED_EXPERT, **DELTA}, PATCHES),
    "gemma4-wrapper": ("Gemma4", GEMMA4, {**VISION, "head_dim": 8, "num_key_value_heads": 2}),
}


def model_class(name: str) -> Any:
    return getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")


def config_class(name: str) -> Any:
    return model_class(name).config_class


def make_family(
    name: str,
    tokenizer_of: Path,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    larger: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Saves a random model of the family to `folder`, with the tokenizer of the checkpoint `tokenizer_of`.
    One of `WRAPPERS` is in several files, with a processor's file. `larger`: sizes in place of the small
    ones."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    shape = {"vocab_size": len(tokenizer), "initializer_range": 0.2, **SHAPE, **ids}
    torch.manual_seed(0)
    if name in WRAPPERS:
        family, more, vision = WRAPPERS[name]
        config = getattr(transformers, f"{family}Config")(
            text_config={**shape, **more, "max_position_embeddings": 512, **larger}, vision_config=vision
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).to(dtype)
        model.save_pretrained(folder, max_shard_size="100KB")
        (folder / "preprocessor_config.json").write_text('{"size": 28}')
    else:
        model_class(name)(config_class(name)(**{**shape, **FAMILIES[name][1], **larger})).to(
            dtype
        ).save_pretrained(folder)
    if name == "granite-hybrid":  # as published, and as vLLM 0.24 reads it
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            config.replace('"linear_attention"', '"mamba"').replace('"full_attention"', '"attention"')
        )
    if name.startswith("gemma4"):
        add_shared_keys(folder)
    tokenizer.save_pretrained(folder)
    return folder


def add_shared_keys(folder: Path) -> None:
    """Adds keys and values of the layers that take those of an earlier one: Gemma 4's checkpoints have them,
    transformers drops them."""
    file = max(folder.glob("*.safetensors"))
    stored = {
        name: tensor for part in folder.glob("*.safetensors") for name, tensor in load_file(part).items()
    }
    parts = ("k_proj", "v_proj", "k_norm")
    names = {
        name: re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + 2}", name)
        for name in stored
        if name.split(".")[-2] in parts
    }
    added = {
        there: stored[name].clone()
        for name, there in names.items()
        if ".self_attn." in name and ".vision" not in name
    }
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        found = json.loads(index.read_text())
        found["weight_map"] |= dict.fromkeys(added, file.name)
        index.write_text(json.dumps(found))
