"""Infinity and NaN: refused in a recipe, and a loss, gradient norm or weight that is not finite ends
training, named."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

import rlhf_core.__main__
from rlhf_core.config import PPO, SFT, Gate, Recipe
from rlhf_core.data.documents import Document
from rlhf_core.recipe.sentences import models_in
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.training.engine import TorchEngine
from tests.support.stage_request import stage_request
from tests.unit.training.test_training import WORK, config_of

SHAPE = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SHAPE |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
TOO_LARGE = 1e37  # the first step makes weights whose products overflow float32


def classes(of: type[BaseModel] = Recipe) -> Iterator[type[BaseModel]]:
    """All config classes of a recipe."""
    yield of
    for field in of.model_fields.values():
        for inner in models_in(field.annotation):
            yield from classes(inner)


def holds(annotation: Any, kind: type) -> bool:
    parts = typing.get_args(annotation)
    return annotation is kind or (
        typing.get_origin(annotation) is not typing.Literal and any(holds(part, kind) for part in parts)
    )


# a mapping whose values are checked as those of the fields that they replace; a number or a switch
OTHERS = ("sweep", "side_by_side")
FIELDS = sorted({(of, name) for of in classes() for name in of.model_fields if name not in OTHERS}, key=str)
NUMBERS = [(of, name) for of, name in FIELDS if holds(of.model_fields[name].annotation, float)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "1e400", "nan"])
def test_no_field_takes_infinity(value: object) -> None:
    assert len(NUMBERS) > 60
    for of, name in NUMBERS:
        if of is Gate:  # has a check of its own
            continue
        several = "tuple" in str(of.model_fields[name].annotation)
        with pytest.raises(ValidationError) as refused:
            of.model_validate({name: [value, value] if several else value})
        assert any(
            error["loc"][0] == name and error["type"] == "finite_number" for error in refused.value.errors()
        ), (of, name)


@pytest.mark.parametrize("value", ["1e400", True, math.nan])
def test_a_sweep_takes_what_its_field_takes(value: object) -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        SFT.model_validate({"data": {"sources": "a.jsonl"}, "sweep": {"learning_rate": [1e-5, value]}})


def test_no_number_is_a_switch() -> None:
    whole = [
        (of, name)
        for of, name in FIELDS
        if holds(of.model_fields[name].annotation, int) and (of, name) not in NUMBERS
    ]
    assert len(whole) > 60
    for of, name in NUMBERS + whole:
        if name == "gradient_checkpointing":  # true: all layers
            continue
        with pytest.raises(ValidationError) as refused:
            of.model_validate(
                {name: [True, True] if "tuple" in str(of.model_fields[name].annotation) else True}
            )
        assert any(error["loc"][0] == name for error in refused.value.errors()), (of, name)


def request_of(kind: str, material: Path, **more: object) -> StageRequest:
    config = config_of(kind, material, **more)
    return stage_request(config, material / "base", name=kind, seed=3)


def code_of(kind: str, material: Path, folder: Path, **more: object) -> int:
    """Exit code of the stage's command, without a process of its own."""
    RunDir(folder).prepare(request_of(kind, material, **more))
    return rlhf_core.__main__.main([str(folder)])


@pytest.mark.parametrize("kind", WORK)
def test_a_loss_that_is_not_finite_ends_the_stage(
    kind: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(kind, material, tmp_path / "run", learning_rate=TOO_LARGE) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("step 2 of ")
    assert ": the loss is nan, and training ends here: lower the learning rate" in message
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_weights_of_the_last_step_are_checked(
    value: float,
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No later step has a loss that would show it."""
    step = TorchEngine.step

    def spoils(self: TorchEngine, rate: float) -> float:
        norm = step(self, rate)
        self.module.get_parameter("model.model.norm.weight").data[3] = value
        return norm

    monkeypatch.setattr(TorchEngine, "step", spoils)
    assert code_of("dpo", material, tmp_path / "run", samples=8) == 1
    told = capsys.readouterr().err
    assert f"the largest value of the trained weight model.norm.weight is {value}, and training" in told
    assert not (tmp_path / "run" / "result.json").exists() and not (tmp_path / "run" / "checkpoint").exists()


def test_a_held_out_loss_is_checked(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("sft", material, tmp_path / "run", learning_rate=TOO_LARGE, samples=8) == 1
    assert "after step 1 of 1 the loss on eval_data is nan" in capsys.readouterr().err


def test_nothing_is_trained_on_a_gradient_that_is_not_finite(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = TorchEngine.backward
    weight = []

    def spoiled(self: TorchEngine, loss: torch.Tensor, last: bool) -> None:
        backward(self, loss, last)
        weight[:] = [next(self.module.parameters())]
        weight[0].grad = torch.full_like(weight[0], math.inf)

    monkeypatch.setattr(TorchEngine, "backward", spoiled)
    run = RunDir(tmp_path)
    with pytest.raises(
        FloatingPointError, match=r"^step 1 of 5: the gradient norm is (inf|nan), and training ends here"
    ):
        WORK["sft"](request_of("sft", material), run)
    assert weight[0].isfinite().all()


def test_a_result_holds_finite_numbers_alone(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    request = request_of("sft", material)
    run.prepare(request)
    run.finish(
        request, Outcome({"loss": 1.0, "value/explained_variance": math.nan, "ratio": math.inf}, {}), 1.0
    )
    found = json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found["metrics"] == {"loss": 1.0}
    assert (
        "not in result.json, as they are not finite numbers: value/explained_variance (nan), ratio (inf)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_roles_of_ppo(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    torch.manual_seed(0)
    kind = Qwen2ForCausalLM if role == "actor" else Qwen2ForSequenceClassification
    kind(Qwen2Config(**SHAPE, num_labels=1)).save_pretrained(tmp_path)
    model = ModelSpec(str(tmp_path), "float32", 0, 8, False)
    config = PPO.model_validate({"prompts": {"sources": "p.jsonl"}, "zero_stage": 0})
    made = Actor(model, config, 0) if role == "actor" else Critic(model, config, 0)
    tokens = [1, 2, 3, 4]
    ones = np.ones(4, np.float32)
    good = Experience(Document(tokens, [False, False, True, True]), -ones, -ones, -ones, ones, ones, ones)
    bad = replace(good, advantages=ones * math.inf, returns=ones * math.inf)
    before = [weight.clone() for weight in made.module.parameters()]
    with pytest.raises(
        FloatingPointError,
        match=r"^optimiser step 2 of 2: the loss is (inf|-inf|nan), and training ends here",
    ):
        made.train([good, bad], [Update([0], 0.0, 0.0), Update([0, 1], 1e-3, 0.0)])
    assert all(torch.equal(*pair) for pair in zip(before, made.module.parameters(), strict=True))
