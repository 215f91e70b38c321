"""Makes a checkpoint with random weights (seed 0) of a published model's shape, in bf16, with a tokenizer of one token per letter.

python tests/benchmarks/shapes.py qwen3.5-2b FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

QWEN = {"max_position_embeddings": 32768, "head_dim": 128, "vocab_size": 151936}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "intermediate_size": 6144}
PATCHES = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 2048}
# The class, and its sizes; 30b-a3b has 4 of its 48 layers; qwen3.5-2b is published with what reads images, which is small here.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-2b": (
        "Qwen3_5",
        {
            **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
            **{"head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 32768, "tie_word_embeddings": True},
            **{"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        },
    ),
    "30b-a3b": (
        "Qwen3Moe",
        {**QWEN, **EXPERTS, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    family, sizes = SHAPES[arguments.shape]
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    wrapped = family == "Qwen3_5"
    model_class = getattr(transformers, f"{family}ForConditionalGeneration" if wrapped else f"{family}ForCausalLM")
    config = model_class.config_class(**({"text_config": sizes, "vision_config": PATCHES} if wrapped else sizes))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = model_class(config)
    model.save_pretrained(arguments.out)
    letters(sizes["vocab_size"]).save_pretrained(arguments.out)
    (arguments.out / "preprocessor_config.json").write_text('{"size": 28}')
    print(f"{arguments.shape}: {model.num_parameters() / 1e9:.2f}B parameters")


def letters(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of single bytes; the other tokens have no text in data."""
    known = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known += [f"w{i}" for i in range(len(known), vocabulary)]
    found = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    main()
