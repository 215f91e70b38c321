"""`optimizer: muon`: the formula, which weights it trains, fp32 masters, states, skipped steps, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rlhf_core.config import KINDS
from rlhf_core.config.training.optimiser_fields import Decayed, Freeze
from rlhf_core.config.training.sharding import TORCH
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.weights.frozen_weights import freeze_weights
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.muon import hidden_matrices
from tests.unit.training.test_frozen_weights import SHAPE, policy, step
from tests.unit.training.test_training import config_of, run, weights

RATE = 1e-2
DECAY = 0.5
MATRICES = {f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")} | {
    f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")
}
HIDDEN = {f"model.layers.{layer}.{name}" for layer in range(3) for name in MATRICES}


def muon(module: Policy | Scorer, decay: Decayed = "matrices", average: float | None = None) -> TorchEngine:
    return TorchEngine(module, AdamW((0.9, 0.95), DECAY, 1.0, decay, average, muon=True))


def names_of(module: Policy | Scorer, found: set[nn.Parameter]) -> set[str]:
    return {name for name, weight in module.model.named_parameters() if weight in found}


def copies(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def drawn(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns a gradient for each weight, whose norm is below the clip."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1e-3 * torch.randn(weight.shape, generator=generator)
        for name, weight in module.named_parameters()
    }


def give(module: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, weight in module.named_parameters():
        weight.grad = gradients[name].to(weight.dtype, copy=True)


@pytest.mark.parametrize("tied", [False, True])
def test_the_matrices_of_layers_are_hidden(tied: bool) -> None:
    module = policy(tied=tied)
    assert names_of(module, hidden_matrices(module)) == HIDDEN
    freeze_weights(module.model, Freeze(layers=2, names=("*.mlp.*",)))
    assert names_of(module, hidden_matrices(module)) == {
        name for name in HIDDEN if ".layers.2.self_attn." in name
    }
    freeze_weights(module.model, Freeze(layers=3))
    with pytest.raises(ValueError, match="optimizer=muon trains the matrices of a model's layers"):
        muon(module)
    scorer = Scorer(Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0)))
    assert names_of(scorer, hidden_matrices(scorer)) == HIDDEN


def test_the_experts_of_a_layer_in_one_tensor_are_no_matrix() -> None:
    module = policy()
    mlp = module.model.model.layers[0].mlp
    mlp.experts = nn.Module()
    mlp.experts.weight = nn.Parameter(torch.zeros(2, 16, 24))
    assert names_of(module, hidden_matrices(module)) == HIDDEN
    muon(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_steps_are_those_of_pytorchs_muon_and_adamw(dtype: torch.dtype, scale: float) -> None:
    """Two steps on the same gradients, of which the larger are clipped; the rates differ. bf16 weights follow
    their fp32 masters."""
    module = policy(dtype=dtype)
    engine = muon(module)
    expected = {name: weight.detach().float().clone() for name, weight in module.named_parameters()}
    hidden = {f"model.{name}" for name in HIDDEN}
    decaying = {name for name, weight in expected.items() if weight.ndim == 2} - hidden
    vectors = set(expected) - hidden - decaying
    by_hand = [
        torch.optim.Muon(
            [expected[name] for name in expected if name in hidden],
            weight_decay=DECAY,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        *(
            torch.optim.AdamW(
                [expected[name] for name in names], betas=(0.9, 0.95), weight_decay=decay, fused=True
            )
            for names, decay in ((decaying, DECAY), (vectors, 0.0))
        ),
    ]
    for number, rate in enumerate((RATE, RATE / 3)):
        given = {name: scale * value for name, value in drawn(module, number).items()}
        give(module, given)
        for name, weight in expected.items():
            weight.grad = given[name].to(dtype, copy=True).float()
        norm = nn.utils.clip_grad_norm_(expected.values(), 1.0)
        assert (float(norm) > 1) is (scale > 1)
        assert engine.step(rate) == pytest.approx(float(norm))
        for optimizer in by_hand:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    for name, weight in module.named_parameters():
        assert torch.equal(engine._optimised[name], expected[name]), name
        assert torch.equal(weight, expected[name].to(dtype)), name


def test_the_first_update_is_the_orthogonal_matrix_at_adamws_size() -> None:
    """From the papers, without PyTorch's code: U V^T of the gradient times 0.2 sqrt(longer side), of which
    the iteration leaves the singular values within 0.3 of 1 (Jordan et al. 2024); bf16 adds to it. The
    gradients are well conditioned: tiny singular values need more iterations."""
    module = policy()
    before = copies(dict(module.named_parameters()))
    gradients = drawn(module, 0)
    for name, value in gradients.items():
        if value.ndim == 2:
            u, s, v = torch.linalg.svd(value, full_matrices=False)
            gradients[name] = u @ torch.diag(1e-3 * torch.linspace(1, 3, len(s))) @ v
    engine = muon(module)
    give(module, gradients)
    engine.step(RATE)
    for name, weight in module.named_parameters():
        if name.removeprefix("model.") not in HIDDEN:
            continue
        longer = max(weight.shape)
        update = (before[name] * (1 - RATE * DECAY) - weight.detach()) / (RATE * 0.2 * math.sqrt(longer))
        u, _, v = torch.linalg.svd(gradients[name].double(), full_matrices=False)
        turned = u.T @ update.double() @ v.T
        values = turned.diag()
        assert 0.65 < float(values.min()) and float(values.max()) < 1.3, name
        assert float((turned - torch.diag(values)).abs().max()) < 0.05, name
        assert 0.12 < float((0.2 * math.sqrt(longer) * update).square().mean().sqrt()) < 0.26, "as AdamW's"


def test_a_matrix_whose_gradient_is_zero_only_decays() -> None:
    module = policy()
    before = copies(dict(module.named_parameters()))
    engine = muon(module, "hidden")
    give(module, {name: torch.zeros_like(value) for name, value in before.items()})
    engine.step(RATE)
    for name, weight in module.named_parameters():
        kept = 1 - RATE * DECAY if name.removeprefix("model.") in HIDDEN else 1.0
        torch.testing.assert_close(weight.detach(), before[name] * kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "freeze",
    [None, Freeze(embeddings=True, layers=1), Freeze(names=("*norm*", "*bias", "*embed*", "*head*"))],
)
def test_a_state_is_resumed_bit_for_bit(dtype: torch.dtype, freeze: Freeze | None, tmp_path: Path) -> None:
    def made() -> TorchEngine:
        module = policy(dtype=dtype)
        if freeze is not None:
            freeze_weights(module.model, freeze)
        return muon(module, average=0.75)

    whole = made()
    for number in range(3):
        step(whole, number)
    whole.save_state(tmp_path)
    whole.finish_saving()
    resumed = made()
    resumed.load_state(tmp_path)
    for number in (3, 4):
        assert step(whole, number) == step(resumed, number)
    for (name, one), other in zip(whole._optimised.items(), resumed._optimised.values(), strict=True):
        assert torch.equal(one, other), name
    with whole.averaged(), resumed.averaged():
        for one, other in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_state_before_the_first_step_is_resumed(tmp_path: Path) -> None:
    """As of an actor that is still frozen."""
    whole = muon(policy())
    whole.save_state(tmp_path)
    whole.finish_saving()
    resumed = muon(policy())
    resumed.load_state(tmp_path)
    fresh = muon(policy())
    for number in range(2):
        assert step(resumed, number) == step(fresh, number)
    for one, other in zip(fresh.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_nothing(broken: float) -> None:
    engine = muon(policy())
    step(engine, 0)
    before = copies(dict(engine.module.named_parameters()))
    states = [copies(state) for state in engine._states().values()]
    step_of_gradients = drawn(engine.module, 1)
    step_of_gradients["model.model.layers.0.mlp.up_proj.weight"][0, 0] = broken
    give(engine.module, step_of_gradients)
    with pytest.raises(FloatingPointError, match="gradient norm"):
        engine.step(RATE)
    for name, weight in engine.module.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None
    for state, kept in zip(engine._states().values(), states, strict=True):
        assert all(torch.equal(state[kind], value) for kind, value in kept.items())


@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo", "kto"])
def test_a_stage_trains_with_muon(kind: str, material: Path, tmp_path: Path) -> None:
    found = {}
    for optimizer in ("adamw", "muon"):
        config = config_of(kind, material, samples=16, optimizer=optimizer)
        run(config, material, tmp_path / optimizer)
        found[optimizer] = weights(tmp_path / optimizer)
    differing = {
        name for name, weight in found["muon"].items() if not torch.equal(weight, found["adamw"][name])
    }
    assert any("q_proj.weight" in name for name in differing)


ONE = {"prompts": {"sources": "p.jsonl"}}
TWO = {"num_ranks_per_node": 2}


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("sft", {"ranks": TWO}, "each model on one rank, but ranks configures 2"),
        ("sft", {"zero_stage": 2}, "leave out zero_stage"),
        ("sft", {"adam_offload": True, "ranks": {"gpus": 1}}, "leave out adam_offload"),
        ("sft", {"deepspeed": {"wall_clock_breakdown": True}}, "leave out deepspeed"),
        ("sft", {"lora": {}}, "adapters"),
        ("ppo", {"critic_ranks": TWO}, "each model on one rank, but critic_ranks configures 2"),
        ("ppo", {"param_offload": ["actor"], "actor_ranks": {"gpus": 1}}, "leave out param_offload"),
    ],
)
def test_what_muon_cannot_train_is_refused(kind: str, fields: dict[str, Any], told: str) -> None:
    config = KINDS[kind].config
    needed = ONE if kind == "ppo" else {"data": {"sources": "p.jsonl"}}
    config.model_validate(needed | fields)
    with pytest.raises(ValueError, match=told) as refused:
        config.model_validate(needed | fields | {"optimizer": "muon"})
    assert len(refused.value.errors()) == 1  # type: ignore[attr-defined]
    assert str(refused.value).count("optimizer=muon") == 1


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_auto_is_plain_torch(kind: str) -> None:
    needed = ONE if kind == "ppo" else {"data": {"sources": "p.jsonl"}}
    config = KINDS[kind].config.model_validate(needed | {"optimizer": "muon"})
    assert config.sharding is TORCH and config.alone
