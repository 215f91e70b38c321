"""Exports of a model are its checkpoint but for the trained weights: keys of config.json, weights that its
class leaves out, dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.checkpoint.save import save_model
from rlhf_core.models.load_model import load_policy, trained_policy, trained_scorer
from tests.support.families import make_family
from tests.support.layouts import change_config, quantise_experts

Make = Callable[..., Path]


@pytest.fixture
def make(material: Path, tmp_path: Path) -> Make:
    return lambda family, **config: make_family(family, material / "base", tmp_path / "base", larger=config)


def exported(model: Any, base: Path, folder: Path) -> Path:
    save_model(model, checkpoint_weights(model, lambda parameters: nullcontext()), str(base), folder)
    return folder


def test_config_is_that_of_the_checkpoint(make: Make, tmp_path: Path) -> None:
    base = make("granite-hybrid")
    before = change_config(
        base, layer_types=["mamba", "attention"], torch_dtype="bfloat16", of_another_tool={"a": 1}
    )
    after = json.loads(
        (exported(load_policy(str(base)).model, base, tmp_path / "out") / "config.json").read_text()
    )
    assert after["dtype"] == "float32" and "torch_dtype" not in after
    described = {"torch_dtype", "dtype", "transformers_version"}
    assert {key: value for key, value in after.items() if key not in described} == {
        key: value for key, value in before.items() if key not in described
    }
    load_policy(str(tmp_path / "out"))


def test_config_of_a_reward_model_has_its_one_label(make: Make, tmp_path: Path) -> None:
    base = make("llama")
    change_config(base, of_another_tool=1)
    scorer = trained_scorer(str(base), 3, "float32", False, None, 0)
    after = json.loads((exported(scorer.model, base, tmp_path / "out") / "config.json").read_text())
    assert after["architectures"] == ["LlamaForSequenceClassification"] and after["of_another_tool"] == 1
    assert len(after["id2label"]) == 1 and after["pad_token_id"] == 3


def test_heads_of_further_tokens_stay_byte_for_byte(make: Make, tmp_path: Path) -> None:
    base = make("deepseek-v3")
    file = base / "model.safetensors"
    further = {
        "model.layers.61.eh_proj.weight": torch.randn(4, 8).bfloat16(),
        "model.layers.61.enorm.weight": torch.randn(4),
    }
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    policy = load_policy(str(base))
    after = load_file(exported(policy.model, base, tmp_path / "policy") / "model.safetensors")
    assert after.keys() == load_file(file).keys()
    assert all(
        torch.equal(after[name], value) and after[name].dtype == value.dtype
        for name, value in further.items()
    )
    scorer = trained_scorer(str(base), 0, "float32", False, None, 0)
    assert (
        not further.keys()
        & load_file(exported(scorer.model, base, tmp_path / "scorer") / "model.safetensors").keys()
    )


@pytest.mark.parametrize("renamed", [False, True])
def test_a_trained_weight_that_the_class_names_as_left_out_is_exported(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """GLM-4 MoE's pattern for a head of its small model fits a layer of its large one."""
    base = make("llama")
    monkeypatch.setattr(
        LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1.*", r"old\."]
    )
    policy = load_policy(str(base))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1
    if renamed:  # a checkpoint in a format that the class converts
        file = base / "model.safetensors"
        save_file(
            {f"old.{name}": value for name, value in load_file(file).items()}, file, metadata={"format": "pt"}
        )
    after = load_file(exported(policy.model, base, tmp_path / "out") / "model.safetensors")
    assert after.keys() == dict(checkpoint_weights(policy.model, lambda parameters: nullcontext())).keys()
    assert all(torch.equal(after[name], parameter) for name, parameter in policy.model.named_parameters())


def test_fp8_is_refused_with_a_release_of_transformers_that_was_not_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make("deepseek-v3")
    change_config(base, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    monkeypatch.setattr("transformers.__version__", "6.0.0")
    with pytest.raises(ValueError, match=r"in FP8, which .* 6\.0\.0 may scale wrongly: name its checkpoint"):
        load_policy(str(base))


def test_experts_in_mxfp4_are_trained_and_exported_in_the_dtype_of_training(
    make: Make, tmp_path: Path
) -> None:
    base = make("gpt-oss", intermediate_size=64)
    meant = quantise_experts(base)
    policy = trained_policy(str(base), "float32", False, None, 0)
    parameters = dict(policy.model.named_parameters())
    assert meant and all(torch.equal(parameters[name], value) for name, value in meant.items())
    folder = exported(policy.model, base, tmp_path / "out")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    again = dict(load_policy(str(folder)).model.named_parameters())
    assert all(torch.equal(again[name], value) for name, value in parameters.items())


def test_weights_in_fp8_are_trained_and_exported_under_their_names(make: Make, tmp_path: Path) -> None:
    base = make("deepseek-v3", intermediate_size=192)
    file = base / "model.safetensors"
    names = load_file(file).keys()
    stored = {}
    for name, value in load_file(file).items():
        quantised = value.dim() == 2 and "_proj" in name
        stored[name] = value.to(torch.float8_e4m3fn) if quantised else value
        if quantised:  # the scale of a block is 1, 2, 3, ...
            grid = [-(-size // 128) for size in value.shape]
            stored[f"{name}_scale_inv"] = torch.arange(1.0, 1 + grid[0] * grid[1]).view(*grid)
    save_file(stored, file, metadata={"format": "pt"})
    change_config(
        base,
        quantization_config=dict(
            quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic", fmt="e4m3"
        ),
    )
    policy = trained_policy(str(base), "float32", False, None, 0)
    out = load_file(exported(policy.model, base, tmp_path / "out") / "model.safetensors")
    assert out.keys() == names
    for name, value in out.items():
        meant = stored[name].float()
        if f"{name}_scale_inv" in stored:
            rows, columns = (torch.arange(size) // 128 for size in value.shape)
            meant = meant * stored[f"{name}_scale_inv"][rows][:, columns]
        assert value.dtype == torch.float32 and torch.equal(value, meant), name


def test_weights_in_another_format_are_refused(make: Make) -> None:
    base = make("llama")
    change_config(base, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(
        ValueError,
        match=r"has weights quantised as awq, which cannot be trained so: name its checkpoint in bfloat16",
    ):
        load_policy(str(base))
