"""Models that read more than text are refused in one sentence: not loaded as their language part, and exported without the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from rlhf_core.config import Lora
from rlhf_core.models.load import Policy, load_policy, load_scorer, trained_policy, trained_scorer
from rlhf_core.models.scoring import RewardScorer
from rlhf_core.preflight.inputs import check_inputs
from tests.unit.models.test_lora import config_of, run
from tests.unit.models.test_models import SHAPE
from tests.unit.preflight.test_check import Planned, planned

__all__ = ["planned"]

TEXT: dict[str, Any] = {**SHAPE, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 512}
HYBRID: dict[str, Any] = {
    **{**TEXT, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
WRAPPERS: dict[str, Callable[[], PreTrainedModel]] = {
    "Gemma3ForConditionalGeneration": lambda: Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION)),
    "Mistral3ForConditionalGeneration": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=TEXT | {"model_type": "mistral"}, vision_config=VISION | {"model_type": "pixtral", "head_dim": 8})
    ),
    "Qwen3_5ForConditionalGeneration": lambda: Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=HYBRID, vision_config=PATCHES)),
}


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request: pytest.FixtureRequest, material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(0)
    WRAPPERS[request.param]().save_pretrained(folder)
    AutoTokenizer.from_pretrained(material / "base").save_pretrained(folder)
    return folder


def sentence(folder: Path) -> str:
    return f"{folder} is {folder.name}, which reads more than text: name a text model, or a checkpoint of its language part alone"


def test_nothing_loads_it(wrapper: Path) -> None:
    place = str(wrapper)
    for load in (
        lambda: load_policy(place),
        lambda: load_scorer(place, 0),
        lambda: trained_policy(place, "float32", False, Lora(rank=2), seed=0),
        lambda: trained_scorer(place, 0, "float32", False, None, seed=0),
        lambda: RewardScorer(place, "auto", 2),
    ):
        with pytest.raises(ValueError) as refused:
            load()
        assert str(refused.value) == sentence(wrapper)


def test_an_adapter_of_it_is_refused_too(wrapper: Path, material: Path, tmp_path: Path) -> None:
    run(config_of("sft", material, Lora(rank=2, export="adapter")), material / "base", tmp_path)
    adapter = tmp_path / "checkpoint"
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(wrapper)}))
    with pytest.raises(ValueError, match="which reads more than text"):
        load_policy(str(adapter))


def test_a_policy_made_of_it_is_refused() -> None:
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration, which reads more than text"):
        Policy(WRAPPERS["Gemma3ForConditionalGeneration"]())


def test_it_is_told_before_work_beside_other_faults(planned: Planned, wrapper: Path, tmp_path: Path) -> None:
    config = (wrapper / "config.json").read_text()
    (tmp_path / "base" / "config.json").write_text(config)
    plan = planned("sft.packing=false", "reward_model.data={sources: none.jsonl}")
    problems = check_inputs(plan, plan.nodes)
    told = sentence(tmp_path / "base").replace(" is base,", f" is {wrapper.name},")
    assert problems == [
        f"base_model: {told}",
        f"stages.reward_model.data: none.jsonl: there is no such file at {Path.cwd()}/none.jsonl: correct the path of this data source",
    ]
    (tmp_path / "wrapped").mkdir()
    for file in (tmp_path / "base").iterdir():
        (tmp_path / "wrapped" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    plan = planned(f"ppo.reference={tmp_path / 'wrapped'}", f"evaluation.models=[loop, {tmp_path / 'wrapped'}]")
    problems = check_inputs(plan, plan.nodes)
    assert [problem.partition(" is ")[0] for problem in problems] == [f"stages.ppo.reference: {tmp_path / 'wrapped'}"], "vLLM answers"


def test_its_text_class_alone_is_a_text_model(planned: Planned, tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)).save_pretrained(tmp_path / "text")
    assert isinstance(load_policy(str(tmp_path / "text")).model, Qwen3_5ForCausalLM)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "base" / name).write_bytes((tmp_path / "text" / name).read_bytes())
    plan = planned("sft.packing=false")
    assert check_inputs(plan, plan.nodes) == []
