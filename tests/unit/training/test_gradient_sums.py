"""Gradients of bf16 weights are the same for every number of passes: small ones are not lost in the sum of
many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config import SFT, Ranks
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.config.training.sharding import Training
from rlhf_core.forecast.fitting_passes import sums_in_fp32
from rlhf_core.forecast.memory import trained
from rlhf_core.models.logprobs import token_logprobs as head_module
from rlhf_core.models.logprobs.token_logprobs import token_logprobs
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.zero.zero_options import ZeroOptions, engine_config, options_of
from tests.support.measured import LARGE_MODEL

ADAMW = AdamW((0.9, 0.95), 0.0, 1e9)  # nothing is clipped


class Constant(nn.Module):
    """Has the gradient 0.7, rounded to bf16, in each element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return (self.weight * torch.tensor(0.7, dtype=torch.bfloat16)).float().sum()


def step(passes: int) -> tuple[float, float]:
    """Returns the gradient norm of a step of so many passes, and the gradient that Adam has seen."""
    engine = TorchEngine(Constant(), ADAMW)
    for number in range(1, passes + 1):
        engine.backward(engine() / passes, number == passes)
    norm = engine.step(1e-3)
    (state,) = engine._states().values()
    return norm, float(state["exp_avg"].mean()) / (1 - ADAMW.betas[0])


@pytest.mark.parametrize("passes", [64, 256, 1024])
def test_a_constant_signal_adds_up_over_many_passes(passes: int) -> None:
    norm, gradient = step(1)
    assert gradient == pytest.approx(0.7, rel=4e-3)
    assert step(passes) == pytest.approx((norm, gradient), rel=1e-3)


def test_one_pass_holds_bf16_gradients_and_several_hold_fp32_ones() -> None:
    engine = TorchEngine(Constant(), ADAMW)
    (weight,), (master,) = engine.module.parameters(), engine._optimised.values()
    engine.backward(engine(), last=True)
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16 and master.grad is None
    engine.step(1e-3)
    engine.backward(engine(), last=False)
    assert weight.grad is None and master.grad is not None and master.grad.dtype == torch.float32
    engine.backward(engine(), last=True)
    assert weight.grad is None
    engine.step(1e-3)
    engine.backward(engine(), last=True)
    assert master.grad is None, "the next step begins anew"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_chunks_of_a_head_add_up(bias: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk has the same rows, so the whole gradient is that of one chunk times their number."""
    torch.manual_seed(0)
    head = nn.Linear(8, 16, bias=bias).bfloat16()
    rows = torch.randn(4, 8)
    chunks = 1024
    monkeypatch.setattr(head_module, "LOGITS_CHUNK", 4)

    def gradients(count: int) -> list[Tensor]:
        head.zero_grad()
        hidden = rows.bfloat16().repeat(count, 1).requires_grad_()
        targets = torch.arange(4).repeat(count)
        token_logprobs(head, hidden, targets, 1.0, "no", False, cap)[0].sum().backward()
        return [weight.grad.float() for weight in head.parameters() if weight.grad is not None]

    one = gradients(1)
    many = gradients(chunks)
    assert all(weight.dtype == torch.bfloat16 for weight in head.parameters()) and len(one) == 1 + bias
    for single, whole in zip(one, many, strict=True):
        torch.testing.assert_close(whole / chunks, single, rtol=1e-3, atol=1e-3 * float(single.abs().max()))


def sft(**fields: object) -> SFT:
    common = dict(
        data={"sources": "rows.jsonl"}, dtype="bfloat16", max_len=128, train_batch_size=64, zero_stage="auto"
    )
    return SFT.model_validate(common | {"micro_train_batch_size": 8} | fields)


@pytest.mark.parametrize(
    ("fields", "ranks", "several"),
    [
        ({}, 8, False),
        ({}, 4, True),
        ({"sequence_parallel_size": 2}, 8, True),
        ({"micro_train_tokens": 16 * 128}, 4, False),
        ({"micro_train_tokens": 16 * 128 - 1}, 4, True),
        ({"deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}}}, 4, False),
    ],
)
def test_deepspeed_adds_in_fp32_where_a_step_has_several_passes(
    fields: dict[str, object], ranks: int, several: bool
) -> None:
    config = sft(ranks=Ranks(num_ranks_per_node=ranks), **fields)
    assert sums_in_fp32(config, ranks) is several
    options = options_of(config, "model", config.ranks)
    made = engine_config(ADAMW, 2, "bfloat16", 1, options, False, {})
    assert (made["data_types"].get("grad_accum_dtype") == "fp32") is several
    # as its weights are
    assert engine_config(ADAMW, 2, "float32", 1, ZeroOptions(), False, {})["data_types"] == {}


@pytest.mark.parametrize(("stage", "ranks", "more"), [(0, 1, 2), (3, 4, 2 / 4), (1, 4, 2), (2, 4, -2 / 4)])
def test_fp32_sums_are_in_the_forecast(stage: int, ranks: int, more: float) -> None:
    """Bytes a parameter. ZeRO-1 also has larger buckets; ZeRO-2 needs less, as its step uses the sums as they
    are."""
    one, several = (
        trained(LARGE_MODEL, Training(ranks, SHARDINGS[stage], 0.0, 8192, sums_in_fp32=on), True, 8192)
        for on in (False, True)
    )
    held = (several.still + several.training - one.still - one.training) / LARGE_MODEL.parameters
    buckets = {1: 4e9, 2: 2e9}.get(stage, 0.0) / LARGE_MODEL.parameters
    assert held == pytest.approx(more + buckets)
