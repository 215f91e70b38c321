"""Checkpoints written a file for each layer load as the model of their config."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

shapes = importlib.import_module("shapes")
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


@pytest.mark.parametrize(("family", "more"), [("Qwen2", {}), ("Qwen3Moe", EXPERTS)])
def test_layers_are_written_under_published_names(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    model_class = getattr(transformers, f"{family}ForCausalLM")
    count = shapes.write_layers(model_class, model_class.config_class(**TINY, **more), tmp_path)
    model, told = model_class.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert count == model.num_parameters()
    first, last = (
        {name.partition(f".layers.{layer}.")[2]: weight for name, weight in model.named_parameters()
         if f".layers.{layer}." in name}
        for layer in (0, 2)
    )  # fmt: skip
    assert first and all(torch.equal(weight, last[name]) for name, weight in first.items())
    assert not [file for file in tmp_path.iterdir() if file.is_dir()], "nothing is left beside the checkpoint"
    if more:
        names = (tmp_path / "model.safetensors.index.json").read_text()
        assert "model.layers.2.mlp.experts.3.gate_proj.weight" in names


def test_every_shape_that_is_written_by_layer_exists() -> None:
    assert set(shapes.BY_LAYER) <= set(shapes.SHAPES)
