"""`ema`: the formula, in fp32 also for bf16 weights; resumed bit for bit; exported as a further model."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_core.config import KINDS, Evaluation, Recipe
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.config.training.optimiser_fields import Freeze
from rlhf_core.forecast.memory import Training, trained
from rlhf_core.models.weights.frozen_weights import freeze_weights
from rlhf_core.recipe.expand import expand
from rlhf_core.runs.resume_state import Cadence
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.moving_average import MovingAverage
from tests.support.measured import LARGE_MODEL
from tests.support.text_rows import rows_of_text
from tests.unit.training.test_frozen_weights import policy, step
from tests.unit.training.test_training import config_of, run

DECAY = 0.75


def engine(dtype: torch.dtype = torch.float32, frozen: bool = False, average: float = DECAY) -> TorchEngine:
    module = policy(dtype=dtype)
    if frozen:
        freeze_weights(module.model, Freeze(embeddings=True, layers=1))
    return TorchEngine(module, AdamW((0.9, 0.95), 0.1, 1.0, average=average))


def weights(of: TorchEngine) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in of.module.named_parameters()}


def averages(of: TorchEngine) -> dict[str, Tensor]:
    """Returns the module's weights while they are averaged."""
    before = weights(of)
    with of.averaged():
        found = weights(of)
    for name, weight in weights(of).items():
        assert torch.equal(weight, before[name]), "they come back bit for bit"
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_average_is_that_of_its_formula(dtype: torch.dtype, frozen: bool) -> None:
    """Recomputed in fp64 from the fp32 weights after each step."""
    trained = engine(dtype, frozen)
    expected = {name: weight.double() for name, weight in trained._optimised.items()}
    first = averages(trained)
    assert all(torch.equal(first[name], weight) for name, weight in weights(trained).items())
    for number in range(5):
        step(trained, number)
        for name, weight in trained._optimised.items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight.detach().double()
    found = averages(trained)
    untouched = weights(trained)
    for name, weight in found.items():
        assert weight.dtype == dtype
        wanted = expected[name].to(dtype) if name in expected else untouched[name]
        close = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(weight, wanted, rtol=close, atol=1e-6)
    moved = [name for name in expected if not torch.equal(found[name], untouched[name])]
    assert len(moved) > len(expected) / 2, "the average lags behind"


def test_small_steps_are_not_lost_in_rounding() -> None:
    """With 1 - decay of each, all of these would be below half of the distance between fp32 numbers."""
    weight = torch.ones(1)
    average = MovingAverage([weight], 0.999)
    exact = 1.0
    for number in range(1, 51):
        weight.fill_(1 + 1e-6 * number)
        average.update()
        exact = 0.999 * exact + 0.001 * float(weight)
    assert float(average.values[0]) - 1 == pytest.approx(exact - 1, abs=5e-7) and exact - 1 > 1e-6


def test_the_average_of_weights_that_stay_becomes_these() -> None:
    weight = torch.ones(1)
    average = MovingAverage([weight], 0.9999)
    weight.fill_(1.001)
    for _ in range(100_000):
        average.update()
    assert float(average.values[0]) == pytest.approx(1.001, abs=1e-5)


@pytest.mark.parametrize(("decay", "every"), [(1e-7, 1), (0.99, 1), (0.995, 2), (0.999, 10), (0.9999, 100)])
def test_an_average_with_a_long_memory_takes_every_kth_step(decay: float, every: int) -> None:
    weight = torch.zeros(1)
    average = MovingAverage([weight], decay)
    weight.fill_(1.0)
    for _ in range(every):
        assert float(average.values[0]) == 0
        average.update()
    assert float(average.values[0]) == pytest.approx(1 - decay**every, rel=1e-5)


def test_weights_are_exchanged_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.training.moving_average.SLICE", 4)
    kept: list[int] = []
    whole = Tensor.clone

    def clone(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return whole(tensor)

    weights = [torch.rand(10), torch.rand(3, 3), torch.rand(2, 2).T, torch.rand(())]
    average = MovingAverage(weights, 0.5)
    before = [whole(weight) for weight in weights]
    for weight in weights:
        weight += 1
    monkeypatch.setattr(Tensor, "clone", clone)
    average.swap()
    assert max(kept) == 4 and sum(kept) == 10 + 9 + 4 + 1
    for weight, value, old in zip(weights, average.values, before, strict=True):
        assert torch.equal(weight, old) and torch.equal(value, old + 1)


def test_the_space_that_a_resume_state_needs_counts_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=14_000))
    for averages in (False, True):
        cadence = Cadence(0, 1e-9, tmp_path, 1000, averages)
        assert cadence.due(1) is not averages


@pytest.mark.parametrize("decay", [DECAY, 0.997])
def test_an_average_is_resumed_bit_for_bit(decay: float, tmp_path: Path) -> None:
    whole = engine(average=decay)
    for number in range(3):
        step(whole, number)
    whole.save_state(tmp_path)
    whole.finish_saving()
    resumed = engine(average=decay)
    resumed.load_state(tmp_path)
    for number in (3, 4, 5):
        step(whole, number)
        step(resumed, number)
        assert resumed._average and whole._average and resumed._average.steps == whole._average.steps
    found = averages(resumed)
    assert all(torch.equal(found[name], weight) for name, weight in averages(whole).items())


def test_a_refused_step_is_not_in_the_average() -> None:
    trained = engine()
    step(trained, 0)
    before = averages(trained)
    for weight in trained.module.parameters():
        weight.grad = torch.full_like(weight, math.inf)
    with pytest.raises(FloatingPointError):
        trained.step(1e-2)
    assert all(torch.equal(weight, before[name]) for name, weight in averages(trained).items())


@pytest.mark.parametrize(
    ("kind", "more"), [("sft", {}), ("dpo", {}), ("kto", {}), ("sft", {"lora": {"rank": 2}})]
)
def test_a_stage_exports_its_average_beside_its_checkpoint(
    kind: str, more: dict[str, Any], material: Path, tmp_path: Path
) -> None:
    trained = {}
    for decay in (1e-7, 0.9):
        folder = tmp_path / str(decay)
        outcome = run(config_of(kind, material, samples=16, ema=decay, **more), material, folder)
        assert outcome.outputs["exports"] == "exports"
        trained[decay] = [
            load_file(folder / place / "model.safetensors") for place in ("checkpoint", "exports/ema")
        ]
    last, nothing_kept = trained[1e-7]
    same, average = trained[0.9]
    assert set(last) == set(nothing_kept) == set(average)
    start = load_file(material / "base" / "model.safetensors")
    for name, weight in last.items():
        assert torch.equal(weight, same[name]), "the average does not change the training"
        torch.testing.assert_close(nothing_kept[name], weight, rtol=1e-5, atol=1e-6)
    apart = {name: float((average[name] - start[name]).norm()) for name in start}
    whole = {name: float((last[name] - start[name]).norm()) for name in start}
    assert sum(apart.values()) < 0.5 * sum(whole.values()), "it has few steps, each of a tenth"
    assert sum(apart.values()) > 0


def test_other_stages_name_the_average_and_evaluations_its_stage() -> None:
    data = {"sources": "rows.jsonl"}
    stages = {
        "sft": {"data": data, "ema": 0.9},
        "dpo": {"policy": "sft.ema", "data": data, "ema": 0.9},
        "evaluation": {
            "models": ["sft.ema", "sft", "dpo", "dpo.ema"],
            "baseline": "base",
            "questions": {"path": "q.jsonl"},
            "judges": [{"kind": "openai", "model": "m"}],
        },
    }
    found = expand(Recipe.model_validate({"name": "r", "base_model": "org/base", "stages": stages}))
    assert {name: found.aliases[name] for name in ("sft.ema", "dpo.ema")} == {
        "sft.ema": "sft",
        "dpo.ema": "dpo",
    }
    assert found.stages["evaluation"].parents == {"dpo": "sft.ema", "dpo.ema": "sft.ema"}


@pytest.mark.parametrize(
    ("baseline", "parents", "gate"),
    [
        ("base", {"dpo": "sft.ema"}, "win_rate_vs_parent/dpo"),
        ("sft", {"dpo": "sft.ema"}, "win_rate_vs_parent/dpo"),
        ("sft.ema", {}, "win_rate/dpo"),
    ],
)
def test_a_model_from_an_average_is_judged_against_the_average(
    baseline: str, parents: dict[str, str], gate: str
) -> None:
    data = {"sources": "rows.jsonl"}
    stages = {
        "sft": {"data": data, "ema": 0.9},
        "dpo": {"policy": "sft.ema", "data": data},
        "evaluation": {
            "models": ["dpo"],
            "baseline": baseline,
            "questions": {"path": "q.jsonl"},
            "judges": [{"kind": "openai", "model": "m"}],
            "gates": [{"metric": "win_rate_vs_parent/dpo", "min": 0.5}],
        },
    }
    found = expand(Recipe.model_validate({"name": "r", "base_model": "org/base", "stages": stages}))
    evaluation = found.stages["evaluation"]
    assert isinstance(evaluation, Evaluation) and evaluation.parents == parents
    assert [each.metric for each in evaluation.gates] == [gate]


def test_other_stages_name_the_averages_of_a_sweep_over_ema() -> None:
    data = {"sources": "rows.jsonl"}
    stages = {"sft": {"data": data, "sweep": {"ema": [0.9, 0.99]}}}
    found = expand(Recipe.model_validate({"name": "r", "base_model": "org/base", "stages": stages}))
    assert {name: stage for name, stage in found.aliases.items() if name.endswith(".ema")} == {
        "sft.ema=0.9.ema": "sft.ema=0.9",
        "sft.ema=0.99.ema": "sft.ema=0.99",
    }


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    rows_of_text("""
    reward_model | {data: {sources: p.jsonl}} | ema works only for policies
    iterative_dpo | {prompts: {sources: p.jsonl}, reward: org/r} | ema: each round of a loop exports only
    sft | {data: {sources: p.jsonl}, zero_hpz: true, ranks: {num_nodes: 2}} | zero_hpz keeps
    """),
)
def test_an_average_that_cannot_be_made_is_refused(kind: str, fields: dict[str, Any], told: str) -> None:
    KINDS[kind].config.model_validate(fields)
    with pytest.raises(ValueError, match=told):
        KINDS[kind].config.model_validate(fields | {"ema": 0.9})


@pytest.mark.parametrize(("zero_stage", "ranks"), [(0, 1), (1, 4), (2, 4), (3, 4)])
def test_the_forecast_counts_four_bytes_a_weight(zero_stage: int, ranks: int) -> None:
    how = Training(ranks, SHARDINGS[zero_stage], 1.0, 4096)
    without = trained(LARGE_MODEL, how, True, 4096).still
    averaged = how._replace(averages=True)
    assert trained(LARGE_MODEL, averaged, True, 4096).still == without + 4 * LARGE_MODEL.parameters / ranks
    on_host = averaged._replace(offload=True)
    assert trained(LARGE_MODEL, on_host, True, 4096) == trained(
        LARGE_MODEL, how._replace(offload=True), True, 4096
    )
