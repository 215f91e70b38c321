"""A checkpoint in each published layout goes through SFT and DPO, and vLLM and transformers read what comes
out alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_core.config import EngineConfig
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.support.layouts import LAYOUTS, make_layout
from tests.unit.models.test_lora import DOCUMENTS, config_of, run

pytestmark = pytest.mark.slow


def names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def as_transformers_reads(folder: Path, whole: bool) -> list[list[float]]:
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    found = []
    for tokens in DOCUMENTS:
        with torch.no_grad():
            table = model.eval()(input_ids=torch.tensor([tokens])).logits.log_softmax(-1)[0]
        found.append([0.0] + [float(table[t - 1, tokens[t]]) for t in range(1, len(tokens))])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sft_dpo_vllm_and_transformers(layout: str, material: Path, tmp_path: Path) -> None:
    base = make_layout(layout, material / "base", tmp_path / "base")
    run(config_of("sft", material, None), base, tmp_path / "sft")
    run(config_of("dpo", material, None), tmp_path / "sft" / "checkpoint", tmp_path / "dpo")
    made = tmp_path / "dpo" / "checkpoint"
    stored = {name.removesuffix("_blocks") for name in names(base) if not name.endswith("_scales")}
    assert names(made) == stored
    assert type(AutoConfig.from_pretrained(made)) is type(AutoConfig.from_pretrained(base))
    before = as_transformers_reads(base, layout == "wrapper")
    expected = as_transformers_reads(made, layout == "wrapper")
    moved = [
        abs(a - b) for then, now in zip(before, expected, strict=True) for a, b in zip(then, now, strict=True)
    ]
    assert sum(moved) > 0.01 * len(moved), "training changed nothing"
    sampler = VllmEngine(str(made), seed=0, max_model_len=96, config=EngineConfig(kv_cache_gib=0.5))
    try:
        for theirs, ours in zip(sampler.prompt_logprobs(DOCUMENTS), expected, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-3)
    finally:
        sampler.close()
