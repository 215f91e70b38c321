"""A small Qwen2 of random weights (seed 0) whose distributions are sharp enough to tell temperatures
apart."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 2048


def save_sharp_model(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """Writes the checkpoint in bf16; its end-of-sequence token is 0. Returns the folder."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    made = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=vocabulary, max_position_embeddings=512, eos_token_id=0, **sizes)
    )
    made.lm_head.weight.data *= 4
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder
