"""Adapters are merged into bf16 weights without bias: on average the whole of a small update arrives, the
same way every time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config import Lora
from rlhf_core.config.metrics.shared_metrics import SURVIVES
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.load_model import load_policy, trained_policy
from rlhf_core.models.lora import ADAPTER_WEIGHTS, lora_layers, merged_weight
from rlhf_core.models.weights.unbiased_rounding import Survival, round_unbiased
from rlhf_core.runs.run_dir import Outcome
from tests.unit.models.test_lora import config_of, run

WIDE = 512


class Layer:
    """As much of a layer with an adapter as merging reads."""

    def __init__(self, update: torch.Tensor):
        self.update = update

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return self.update


def weight_and_update(share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a bf16 weight, and an update of rank 8 whose root mean square is this share of the weight's."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDE, WIDE, generator=generator).bfloat16()
    update = torch.randn(WIDE, 8, generator=generator) @ torch.randn(8, WIDE, generator=generator)
    return weight, update * share / update.square().mean().sqrt()


@pytest.mark.parametrize("share", [1e-4, 3e-4, 1e-3, 1e-2])
def test_the_whole_update_arrives_on_average(share: float) -> None:
    weight, update = weight_and_update(share)
    survival = Survival()
    merged = merged_weight(weight, [Layer(update)], "layer.weight", survival)
    left = merged.float() - weight.float()
    # Rounding moves a number by less than a 128th of it, up to the next bf16 number.
    noise = (update.square() * left.sub(update).square()).sum().sqrt() / update.square().sum()
    assert merged.dtype == torch.bfloat16 and noise < 0.2
    assert survival.share() == pytest.approx(1.0, abs=4 * float(noise))
    assert survival.share() == pytest.approx(float((left * update).sum() / update.square().sum()), rel=1e-3)
    assert (left - update).mean().abs() < 4 * (left - update).std() / WIDE
    nearest = (weight.float() + update).bfloat16().float() - weight.float()
    if share <= 3e-4:
        # to the nearest number most of it is lost
        assert (nearest * update).sum() / update.square().sum() < 0.5


def test_each_number_is_one_of_its_neighbours_as_often_as_it_is_near() -> None:
    exact = torch.full((400, 1000), 1 + 2**-7 * 0.3)  # between 1 and the next bf16 number
    rounded = round_unbiased(exact, torch.bfloat16, "a").float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.3, abs=0.005)
    assert torch.equal(round_unbiased(-exact, torch.bfloat16, "a").float(), -rounded)


@pytest.mark.parametrize("low", [1.0, 1000.0, 2.0**-14, 2.0**-20, 0.0, 65504.0 - 32])
def test_float16_rounds_to_each_neighbour_as_often_as_it_is_near(low: float) -> None:
    high = float(torch.nextafter(torch.tensor(low).half(), torch.tensor(torch.inf).half()))
    exact = torch.full((400, 1000), low + (high - low) * 0.25)
    rounded = round_unbiased(exact, torch.float16, "a")
    assert rounded.dtype == torch.float16 and set(rounded.float().unique().tolist()) == {low, high}
    assert float((rounded > low).float().mean()) == pytest.approx(0.25, abs=0.005)
    assert torch.equal(round_unbiased(-exact, torch.float16, "a"), -rounded)


def test_all_numbers_that_float16_has_stay_as_they_are() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    rounded = round_unbiased(every.float(), torch.float16, "a")
    assert torch.equal(rounded.nan_to_num(nan=7.0), every.nan_to_num(nan=7.0))
    assert torch.equal(rounded.isnan(), every.isnan())


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3])
def test_the_whole_update_arrives_in_float16(share: float) -> None:
    weight, update = weight_and_update(share)
    survival = Survival()
    merged = merged_weight(weight.half(), [Layer(update)], "layer.weight", survival)
    assert merged.dtype == torch.float16
    assert survival.share() == pytest.approx(1.0, abs=0.1)


def test_numbers_that_bf16_has_stay_as_they_are() -> None:
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0e38, 1e-40, torch.inf, -torch.inf]).bfloat16()
    assert torch.equal(round_unbiased(exact.float(), torch.bfloat16, "a"), exact)
    assert round_unbiased(torch.tensor([torch.nan]), torch.bfloat16, "a").isnan().all()


def test_a_name_decides_the_random_numbers() -> None:
    exact = torch.rand(100, 100, generator=torch.Generator().manual_seed(0))
    one, again, other = (round_unbiased(exact, torch.bfloat16, name) for name in ("a", "a", "b"))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_float32_is_exact() -> None:
    weight, update = weight_and_update(3e-4)
    survival = Survival()
    merged = merged_weight(weight.float(), [Layer(update)], "layer.weight", survival)
    assert torch.equal(merged, weight.float() + update) and survival.share() == pytest.approx(1.0, abs=1e-5)
    assert Survival().share() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merged_checkpoint_has_what_survives_and_the_adapter_beside_it(
    dtype: str, material: Path, tmp_path: Path
) -> None:
    """The adapter's later merge, as of a stage that starts from it, gives the same weights."""
    lora = Lora(rank=4, alpha=8)

    def trained(name: str, **fields: str) -> Outcome:
        config = config_of("sft", material, lora.model_copy(update=fields), dtype=dtype, learning_rate=1e-4)
        return run(config, material / "base", tmp_path / name)

    outcome = trained("merged")
    alone = trained("alone", export="adapter")
    checkpoint = tmp_path / "merged" / "checkpoint"
    assert outcome.metrics[SURVIVES] == pytest.approx(1.0, abs=0.15 if dtype == "bfloat16" else 1e-3)
    assert SURVIVES not in alone.metrics
    beside, only = (
        load_file(place / ADAPTER_WEIGHTS)
        for place in (checkpoint / "adapter", tmp_path / "alone" / "checkpoint")
    )
    assert beside.keys() == only.keys()
    assert all(torch.equal(weight, only[name]) for name, weight in beside.items())
    whole = load_policy(str(checkpoint), dtype).model.state_dict()
    for adapter in (checkpoint / "adapter", tmp_path / "alone" / "checkpoint"):
        merged = load_policy(str(adapter), dtype).model.state_dict()
        assert all(torch.equal(weight, merged[name]) for name, weight in whole.items())


def test_what_is_sent_to_engines_is_what_is_exported(material: Path) -> None:
    policy = trained_policy(str(material / "base"), "bfloat16", False, Lora(rank=4), 0)
    for layer in lora_layers(policy.model).values():
        torch.nn.init.normal_(
            layer.lora_B["default"].weight, std=1e-3, generator=torch.Generator().manual_seed(1)
        )
    survival = Survival()
    one, again = (
        {n: w.clone() for n, w in checkpoint_weights(policy.model, lambda _: nullcontext(), survival)}
        for _ in range(2)
    )
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    assert survival.share() == pytest.approx(1.0, abs=0.1)


def test_what_is_not_finite_stays_so() -> None:
    # NaNs, inf, -inf
    patterns = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    exact = patterns.view(torch.float32).repeat(100)
    rounded = round_unbiased(exact, torch.bfloat16, "w")
    assert rounded.isnan().equal(exact.isnan())
    assert rounded.isinf().equal(exact.isinf())
