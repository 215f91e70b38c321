"""DeepSpeed in float16: the loss scale changes by DeepSpeed's rule, a step that overflows is skipped and
counted, one whose loss is not finite changes nothing, gradients and norms are free of the scale, and a
resumed engine goes on bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from tests.engines.test_zero import TWO, train
from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK = """
import json, logging, math, sys, tempfile
logging.disable(logging.WARNING)
from pathlib import Path
import torch
from torch import nn
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_parts import zero_parts

stage, folder = int(sys.argv[1]), Path(sys.argv[2])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).float().square().mean()

def opened(dtype="float16"):
    engine = ZeroEngine(Model().to(getattr(torch, dtype)).train(), AdamW((0.9, 0.95), 0.0, 1e9), stage, dtype, 1)
    if dtype == "float16":
        scaler = engine._engine.optimizer.loss_scaler
        assert scaler.cur_scale == 2**16 and scaler.scale_window == 1000 and scaler.delayed_shift == 2
        scaler.scale_window = 3
    return engine

def state(engine):
    parts = zero_parts(engine._engine.optimizer, engine.module, stage, engine.rank)
    return [value.double().tolist() for part in parts for value in part.tensors.values()]

def step(engine, number, factor=1.0, dtype=torch.float16):
    rows = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
    for place in range(2):
        loss = engine(rows[place]) * factor / engine.world_size
        engine.backward(loss, last=place == 1)
    return engine.step(1e-3)

BAD = (2, 3, 4)  # these overflow
TAINTED = (2, 5, 9)  # before these, a step whose loss on rank 0 is not finite changes nothing
engine = opened()
found = []
for number in range(1, 15):
    if number in TAINTED:
        before = state(engine), engine.scaling
        assert step(engine, number, math.nan if engine.rank == 0 else 1.0) is None
        assert (state(engine), engine.scaling) == before
    before = state(engine) if number in BAD else None
    norm = step(engine, number, 1e9 if number in BAD else 1.0)
    assert (norm is None) == (number in BAD)
    assert before is None or state(engine) == before
    found.append((norm, *engine.scaling))
engine.save_state(folder)
engine.finish_saving()
engine.barrier()
ahead = [(step(engine, number), *engine.scaling) for number in range(15, 20)], state(engine)
again = opened()
again.load_state(folder)
resumed = [(step(again, number), *again.scaling) for number in range(15, 20)], state(again)
exact = opened("float32")
norms = [step(exact, number, dtype=torch.float32) for number in range(1, 15) if number not in BAD]
drift = sum(abs(a - b) for mine, other in zip(state(engine), state(again)) for a, b in zip(mine, other))
print(json.dumps([found, norms, ahead[0], resumed[0], drift]))
"""


def expected_scales(bad: tuple[int, ...], steps: int, window: int) -> list[tuple[float, int]]:
    """The scale after each step, and the number of overflows: two overflows halve it, each further one too
    until it grows; `window` steps after the last overflow, and each `window` further ones, it doubles."""
    scale = 2.0**16
    patience = 2
    last = -1
    overflows = 0
    found = []
    for step in range(steps):
        if step + 1 in bad:
            overflows += 1
            if patience == 1:
                scale /= 2
            else:
                patience -= 1
            last = step
        else:
            stable = step - last - 1
            if stable > 0 and stable % window == 0:
                patience = 2
                scale *= 2
        found.append((scale, overflows))
    return found


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_the_loss_scale(stage: int, ranks: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    results = [json.loads(text.splitlines()[-1]) for text in on_gloo_ranks(ranks, RANK, stage, folder)]
    for found, norms, ahead, resumed, drift in results:
        assert [(scale, overflows) for _, scale, overflows in found] == expected_scales((2, 3, 4), 14, 3)
        taken = [norm for norm, *_ in found if norm is not None]
        assert taken == pytest.approx(norms, rel=2e-2), "float16 against float32, at each scale"
        assert ahead == resumed and drift == 0
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_stages_in_float16_with_their_heads_in_fp32_train_as_in_float32(
    kind: str, material: Path, tmp_path: Path
) -> None:
    exact = train(kind, material, tmp_path / "exact")
    try:
        half = train(kind, material, tmp_path / "half", dtype="float16", fp32_head=True, **TWO)
    finally:
        ray.shutdown()
    assert len(half) == len(exact) == 4
    for ours, whole in zip(half, exact, strict=True):
        assert ours["loss"] == pytest.approx(whole["loss"], rel=2e-3)
        assert ours["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.02)
        assert (ours["loss_scale"], ours["overflow_steps"]) == (2**16, 0)
        assert "loss_scale" not in whole
