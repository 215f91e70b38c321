"""Checkpoints in the layouts in which models are published: small random ones (seed 0) in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.families import make_family

# The family of each: names of a wrapper in several files, a head that is the embedding, a head of its own in
# several files, MXFP4.
LAYOUTS = {"wrapper": "gemma3-wrapper", "tied": "qwen3", "sharded": "llama", "mxfp4": "gpt-oss"}


def make_layout(layout: str, tokenizer_of: Path, folder: Path) -> Path:
    family = LAYOUTS[layout]
    make_family(family, tokenizer_of, folder, larger={"intermediate_size": 64} if layout == "mxfp4" else {})
    if layout == "sharded":
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="100KB")
    if layout == "mxfp4":
        quantise_experts(folder)
    return folder


def quantise_experts(folder: Path) -> dict[str, Tensor]:
    """Stores a gpt-oss checkpoint's experts in MXFP4, as it is published. Returns the values that they stand
    for."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    meant = {}
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stored[f"{name}_blocks"], stored[f"{name}_scales"], meant[name] = to_mxfp4(stored.pop(name))
    save_file(stored, file, metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    return meant


def change_config(folder: Path, **changes: object) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(E, I, O) -> blocks (E, O, I / 32, 16), scales (E, O, I / 32) and the values they stand for (OCP
    Microscaling 1.0, section 5.3.3)."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([values, -values])
    rows = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = rows.abs().amax(-1, keepdim=True).log2().floor() - 2
    codes = ((rows / 2**exponent)[..., None] - table).abs().argmin(-1)
    low = codes[..., 0::2]
    high = codes[..., 1::2]
    meant = (table[codes] * 2**exponent).flatten(2).transpose(1, 2)
    return (low | high << 4).to(torch.uint8), (exponent[..., 0] + 127).to(torch.uint8), meant
