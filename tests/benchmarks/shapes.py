"""Makes a checkpoint with random weights (seed 0) of a published model's shape, in bf16, with a tokenizer of
one token per letter.

python tests/benchmarks/shapes.py qwen3.5-2b FOLDER

The layers of a model that is written whole hold the same numbers, so that tens of gigabytes are written in
the time that the disk takes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from safetensors.torch import save as in_safetensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

QWEN = {"max_position_embeddings": 32768, "head_dim": 128, "vocab_size": 151936}
EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "intermediate_size": 6144,
}
PATCHES = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 2048}
WIDE = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
LONG = {"max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False}
MIXTURE = {
    **QWEN,
    **EXPERTS,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
# The class, and its sizes; 30b-a3b has 4 of its 48 layers, 30b-a3b-whole all; qwen3.5-2b is published with what
# reads images, which is small here.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-2b": (
        "Qwen3_5",
        {
            **{
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
            },
            **dict(head_dim=256, vocab_size=248320, max_position_embeddings=32768, tie_word_embeddings=True),
            **{
                "linear_num_value_heads": 16,
                "linear_num_key_heads": 16,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
            },
        },
    ),
    "30b-a3b": ("Qwen3Moe", {**MIXTURE, "num_hidden_layers": 4}),
    "30b-a3b-whole": ("Qwen3Moe", {**MIXTURE, "num_hidden_layers": 48}),
    "7.6b": (
        "Qwen2",
        {
            **LONG,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "27b": ("Qwen2", {**WIDE, **LONG, "num_hidden_layers": 52}),
    "34b": ("Qwen2", {**WIDE, **LONG, "num_hidden_layers": 68}),
    "72b": (
        "Qwen2",
        {
            **LONG,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
        },
    ),
}
BY_LAYER = ("7.6b", "27b", "34b", "72b", "30b-a3b-whole")  # written a file for each layer
PROMPTS = 4096  # of 256 letters, for peers that read them from the model's folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    family, sizes = SHAPES[arguments.shape]
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    wrapped = family == "Qwen3_5"
    model_class = getattr(
        transformers, f"{family}ForConditionalGeneration" if wrapped else f"{family}ForCausalLM"
    )
    config = model_class.config_class(
        **({"text_config": sizes, "vision_config": PATCHES} if wrapped else sizes)
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.shape in BY_LAYER:
        count = write_layers(model_class, config, arguments.out)
    else:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = model_class(config)
        model.save_pretrained(arguments.out)
        count = model.num_parameters()
        (arguments.out / "preprocessor_config.json").write_text('{"size": 28}')
    letters(sizes["vocab_size"]).save_pretrained(arguments.out)
    rng = random.Random(0)
    rows = [
        json.dumps({"input": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=256))})
        for _ in range(PROMPTS)
    ]
    (arguments.out / "prompts.jsonl").write_text("\n".join(rows))
    print(f"{arguments.shape}: {count / 1e9:.2f}B parameters")


def write_layers(model_class: Any, config: Any, out: Path) -> int:
    """Writes a checkpoint of a file for each layer, all with the weights of one; returns the number of its
    parameters."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = 1
    if kinds is not None:
        config.layer_types = kinds[:1]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = model_class(config)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        model.save_pretrained(folder, max_shard_size="1TB")  # under the names of published checkpoints
        weights = load_file(Path(folder) / "model.safetensors")
    config.num_hidden_layers = layers
    if kinds is not None:
        config.layer_types = kinds
    config.architectures = [model_class.__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(out)
    first = {
        name.partition(".layers.0.")[2]: weight for name, weight in weights.items() if ".layers.0." in name
    }
    others = {name: weight for name, weight in weights.items() if ".layers.0." not in name}
    placeholder = "model.layers.00"  # as long as the name of any layer
    stored = in_safetensors(
        {f"{placeholder}.{name}": weight for name, weight in first.items()}, metadata={"format": "pt"}
    )
    head = 8 + int.from_bytes(stored[:8], "little")

    def write(layer: int) -> dict[str, str]:
        name = f"model.layers.{layer}"
        with (out / f"layer-{layer}.safetensors").open("wb") as file:
            file.write(
                stored[:head].replace(
                    b'"' + placeholder.encode(), b" " * (len(placeholder) - len(name)) + b'"' + name.encode()
                )
            )
            file.write(memoryview(stored)[head:])
        return dict.fromkeys((f"{name}.{rest}" for rest in first), f"layer-{layer}.safetensors")

    (out / "others.safetensors").write_bytes(in_safetensors(others, metadata={"format": "pt"}))
    places = dict.fromkeys(others, "others.safetensors")
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(write, range(layers)):
            places |= found
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(weight.numel() for weight in others.values()) + layers * sum(
        weight.numel() for weight in first.values()
    )


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
