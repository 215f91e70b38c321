"""Multimodal checkpoints: their language model trains like a text model, and what they hold beside it stays
as it was, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
)

from rlhf_core.config import Lora
from rlhf_core.hub.model_files import weight_files
from rlhf_core.models.load_model import load_policy, load_scorer
from rlhf_core.models.multimodal.wrapper import link_language_model
from rlhf_core.models.policy import Policy
from rlhf_core.preflight.inputs import check_inputs
from tests.support.families import PATCHES, SHAPE, VISION, WRAPPERS, make_family
from tests.unit.models.test_lora import DOCUMENTS, config_of, logprobs, run, scores
from tests.unit.preflight.test_check import Planned, planned

__all__ = ["planned"]


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request: pytest.FixtureRequest, material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(
        request.param, material / "base", tmp_path_factory.mktemp("models") / request.param, torch.bfloat16
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_its_language_model_computes_what_the_whole_does(wrapper: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(wrapper, dtype=torch.float32).eval()
    ours = logprobs(load_policy(str(wrapper)).eval())
    for row, tokens in zip(ours, DOCUMENTS, strict=True):
        table = whole(input_ids=torch.tensor([tokens])).logits.log_softmax(-1)[0]
        expected = [float(table[t - 1, tokens[t]]) for t in range(1, len(tokens))]
        torch.testing.assert_close(row[1 : len(tokens)], torch.tensor(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_training_leaves_all_else_as_it_was(
    wrapper: Path, lora: Lora | None, material: Path, tmp_path: Path
) -> None:
    """SFT, DPO from what it makes, and the whole by transformers."""
    run(config_of("sft", material, lora), wrapper, tmp_path / "sft")
    run(config_of("dpo", material, lora), tmp_path / "sft" / "checkpoint", tmp_path / "dpo")
    before = tensors(wrapper)
    for stage in ("sft", "dpo"):
        made = tmp_path / stage / "checkpoint"
        after = tensors(made)
        assert {name: (value.shape, value.dtype) for name, value in after.items()} == {
            name: (value.shape, value.dtype) for name, value in before.items()
        }
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert changed and all("language_model." in name or name.startswith("lm_head.") for name in changed)
        for name in ("config.json", "preprocessor_config.json", "model.safetensors.index.json"):
            assert (made / name).read_bytes() == (wrapper / name).read_bytes()
        loaded, info = AutoModelForImageTextToText.from_pretrained(made, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert type(loaded).__name__.endswith("ForConditionalGeneration")
        before = after


def test_a_second_copy_of_the_weights_is_left_behind(wrapper: Path, material: Path, tmp_path: Path) -> None:
    """vLLM would load Mistral's own files in place of what was trained."""
    release = tmp_path / "release"
    shutil.copytree(wrapper, release)
    files = sorted(file.name for file in release.glob("*.safetensors"))
    shutil.copyfile(release / files[0], release / "consolidated.safetensors")
    run(config_of("sft", material, None), release, tmp_path / "sft")
    made = sorted(file.name for file in (tmp_path / "sft" / "checkpoint").glob("*.safetensors"))
    assert made == files == [file.name for file in weight_files(release)]
    (tmp_path / "linked").mkdir()
    assert link_language_model(str(release), tmp_path / "linked", False)
    assert not (tmp_path / "linked" / "consolidated.safetensors").exists()


def test_a_reward_model_of_it_is_a_text_model(wrapper: Path, material: Path, tmp_path: Path) -> None:
    run(config_of("reward_model", material, None), wrapper, tmp_path / "rm")
    made = tmp_path / "rm" / "checkpoint"
    assert json.loads((made / "config.json").read_text())["architectures"][0].endswith(
        "ForSequenceClassification"
    )
    _, info = AutoModelForSequenceClassification.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(scores(made), scores(made)) and load_scorer(str(made), 0).model.score.weight.any()


def test_a_policy_made_of_the_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration, which reads more than text"):
        Policy(Gemma3ForConditionalGeneration(Gemma3Config(text_config=SHAPE, vision_config=VISION)))


def test_a_language_model_without_a_class_of_its_own_is_told_before_work(
    planned: Planned, tmp_path: Path
) -> None:
    shape = Glm4vConfig(
        text_config={
            **SHAPE,
            "vocab_size": 300,
            "max_position_embeddings": 512,
            "partial_rotary_factor": 0.5,
        },
        vision_config=PATCHES,
    )
    whole = Glm4vForConditionalGeneration(shape)
    whole.save_pretrained(tmp_path / "base")
    told = (
        f"{tmp_path / 'base'} is Glm4vForConditionalGeneration, which reads more than text: name a text model"
    )
    with pytest.raises(ValueError, match=told):
        load_policy(str(tmp_path / "base"))
    plan = planned()
    assert [problem.partition(", or a")[0] for problem in check_inputs(plan, plan.nodes)] == [
        f"base_model: {told}"
    ]


def test_others_have_no_problems_before_work(planned: Planned, wrapper: Path, tmp_path: Path) -> None:
    for weights in (tmp_path / "base").glob("*.safetensors*"):
        weights.unlink()
    for file in (*wrapper.glob("*.safetensors*"), wrapper / "config.json"):
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    plan = planned()
    assert check_inputs(plan, plan.nodes) == []
