"""The generation config of an export generates as that of its base does, and is one that transformers
writes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.checkpoint.generation import ignored_values
from rlhf_core.models.checkpoint.save import save_model
from rlhf_core.models.load_model import load_policy
from tests.support.families import make_family

KEPT = dict(
    eos_token_id=[1, 2], bos_token_id=5, max_new_tokens=7, repetition_penalty=1.3, of_another_tool={"a": 1}
)


@pytest.mark.parametrize(
    ("base_has", "left_out"),
    [
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.8}, ["temperature", "top_p"]),
        ({"temperature": 0.9, "top_k": 0}, ["temperature", "top_k"]),
        ({"do_sample": False, "min_p": 0.1, "typical_p": 0.9}, ["min_p", "typical_p"]),
        (
            {"pad_token_id": -1, "length_penalty": 2.0, "early_stopping": True},
            ["early_stopping", "length_penalty", "pad_token_id"],
        ),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, []),
        ({"num_beams": 2, "length_penalty": 2.0, "early_stopping": True, "max_new_tokens": 3}, []),
    ],
)
def test_an_export_leaves_out_what_transformers_ignores_and_nothing_else(
    material: Path, tmp_path: Path, base_has: dict[str, Any], left_out: list[str]
) -> None:
    base = make_family("llama", material / "base", tmp_path / "base")
    out = tmp_path / "out"
    (base / "generation_config.json").write_text(json.dumps(KEPT | base_has))
    model = load_policy(str(base)).model
    assert sorted(ignored_values(model.generation_config)) == left_out
    save_model(model, checkpoint_weights(model, lambda parameters: nullcontext()), str(base), out)

    written = json.loads((out / "generation_config.json").read_text())
    del written["transformers_version"]
    kept = {key: value for key, value in (KEPT | base_has).items() if key not in left_out}
    assert written == kept
    GenerationConfig.from_pretrained(out).validate(strict=True)
    assert torch.equal(generated(out), generated(base))


def generated(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    return model.generate(torch.tensor([[3, 4, 5, 6]]), attention_mask=torch.ones(1, 4, dtype=torch.long))


def test_a_config_that_cannot_be_mended_is_not_called_valid() -> None:
    wrong = GenerationConfig(do_sample=True)
    wrong.max_new_tokens = 0
    assert ignored_values(wrong) == []
    with pytest.raises(ValueError, match="max_new_tokens"):
        wrong.validate(strict=True)
