"""`engine.adapters: alone`: what cannot be is refused, and what is sent is what the merged weights add."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO, Evaluation, Lora, Preferences
from rlhf_core.config.judging.judges import VllmJudge
from rlhf_core.forecast.by_phase import by_phase
from rlhf_core.forecast.hardware import GPUS
from rlhf_core.forecast.seconds import phases
from rlhf_core.hub.model_config import Size
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, scaled_adapters
from rlhf_core.models.load_model import trained_policy
from rlhf_core.models.lora import require_linear
from tests.support.families import make_family
from tests.support.text_rows import rows_of_text

GPU = {"gpus": 1}


def ppo(**fields: Any) -> PPO:
    roles = {f"{role}_ranks": GPU for role in ("actor", "critic", "reference", "reward")}
    return PPO.model_validate({"prompts": {"sources": "rows.jsonl"}, **roles, **fields})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *rows_of_text("""
    {} | engine.adapters: alone sends adapters, but there are none: set lora, or leave it out
    {lora: {quantize: nf4}} | lora.quantize=nf4 rounds weights that engines would not round: leave one of them out
    {lora: {}, engine: {adapters: alone, gpus: 1}} | needs dtype bfloat16 on GPUs, but dtype is float32: set it to bfloat16, or leave engine.a
    {lora: {rank: 513}} | engine.adapters: alone supports adapters up to rank 512, but lora.rank is 513: lower the rank, or leave engine.adapters out
    """),
        (
            {"lora": {}, "engine": {"adapters": "alone", "pipeline_parallel_size": 2}},
            "engine.adapters: alone does not work with pipeline_parallel_size: leave one of them out",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ppo(**{"engine": {"adapters": "alone"}, **fields})


def test_other_stages_have_no_use_for_it() -> None:
    judged = dict(models=["a"], baseline="b", questions={"path": "q.jsonl"}, judges=[{"kind": "rule"}])
    rows = {"prompts": {"sources": "rows.jsonl"}}
    for kind, fields in (
        (Evaluation, judged),
        (Preferences, rows),
        (VllmJudge, {"kind": "vllm", "model": "m"}),
    ):
        kind.model_validate(fields)
        with pytest.raises(
            ValidationError,
            match=r"engine\.adapters is only for ppo, which sends weights to its engines: leave it out",
        ):
            kind.model_validate({**fields, "engine": {"adapters": "alone"}})


def test_what_is_sent_is_what_merged_weights_add(material: Path, tmp_path: Path) -> None:
    model = trained_policy(
        str(make_family("qwen3", material / "base", tmp_path / "base")),
        "float32",
        False,
        Lora(rank=3, alpha=24),
        0,
    ).model
    start = {name: weight.clone() for name, weight in checkpoint_weights(model, lambda _: nullcontext())}
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            weight.data.normal_(generator=torch.Generator().manual_seed(0))
    require_linear(model)
    sent = {
        name.removeprefix("base_model.model."): weight
        for name, weight in scaled_adapters(model, lambda _: nullcontext())
    }
    layers = {name.partition(".lora_A.")[0] for name in sent if ".lora_A." in name}
    assert len(layers) == 7 * model.config.num_hidden_layers and len(sent) == 2 * len(layers)
    merged = dict(checkpoint_weights(model, lambda _: nullcontext()))
    for name, weight in merged.items():
        layer = name.removesuffix(".weight")
        added = (
            sent[f"{layer}.lora_B.weight"] @ sent[f"{layer}.lora_A.weight"]
            if layer in layers
            else torch.zeros(())
        )
        assert torch.allclose(weight, start[name] + added, atol=1e-5), name


def test_adapters_of_experts_are_named(material: Path, tmp_path: Path) -> None:
    model = trained_policy(
        str(make_family("mixtral", material / "base", tmp_path / "base")), "float32", False, Lora(rank=2), 0
    ).model
    with pytest.raises(
        ValueError,
        match=r"these are of other weights: model.layers.0.\S*experts.*: name linear layers in lora.targets",
    ):
        require_linear(model)


def test_the_forecast_sends_less_and_has_the_weights_of_sleeping_engines_on_the_host() -> None:
    """A fifth of a second for 7.6 billion merged weights, which adapters do not take."""
    size = Size(7.6e9, 7.6e9, 5.4e8, 28, 3584, 152064, 2.4e5, 1.5e5, 5.7e4)
    gpu = GPUS["h100"]
    found = []
    for adapters in ("merged", "alone"):
        vllm = {"gpus": 1, "sleep": True, "gpu_memory_utilization": 0.4, "adapters": adapters}
        config = ppo(
            engine=vllm, lora={}, dtype="bfloat16", colocate_all=True, zero_stage=0, micro_train_tokens=8192
        )
        layout = arrange(config.placed, config.together)
        sizes = dict.fromkeys(config.groups, size)
        seconds = phases(config, layout, sizes, gpu)
        memory = by_phase(config, layout, sizes, gpu)
        found.append((seconds["sync"], memory["train"].host))
    merged, alone = found
    assert alone[0] == pytest.approx(0.1)
    assert alone[0] < merged[0] - 0.1
    assert alone[1] - merged[1] == pytest.approx(2 * size.parameters)
