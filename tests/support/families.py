"""Small random models of each family (seed 0) with the demo's tokenizer, saved as checkpoints.

Heads have 32 dimensions: vLLM's CPU engine takes no smaller ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
# A layer with a state (Mamba 2) and one with attention; as many state heads as make up `mamba_expand` times the hidden size.
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
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "granite-hybrid": (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, {**HYBRID, "tie_word_embeddings": False}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**QWEN_MOE, "tie_word_embeddings": False}),
}
MOE = ("mixtral", "qwen3-moe")


def make_family(name: str, tokenizer_of: Path, folder: Path) -> Path:
    """Saves a random model of the family to `folder`, with the tokenizer of the checkpoint `tokenizer_of`."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    model_class, config_class, more = FAMILIES[name]
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=len(tokenizer), initializer_range=0.2, **SHAPE, **ids, **more))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
