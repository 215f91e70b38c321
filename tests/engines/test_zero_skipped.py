"""DeepSpeed leaves out a step whose gradient is not finite: weights and moments stay, and the next step is as
if it had not been."""

from __future__ import annotations

import json

import pytest

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK = """
import json, logging, math, sys
logging.disable(logging.WARNING)
import torch
from torch import nn
from rlhf_core.objectives.losses import Loss
from rlhf_core.training.engine import AdamW
from rlhf_core.training.train_loop import accumulate
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_options import ZeroOptions
from rlhf_core.training.zero.zero_parts import zero_parts

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).float().square().sum()

stage, dtype, options = int(sys.argv[1]), sys.argv[2], ZeroOptions(adam_offload=sys.argv[3] == "offload")

def state(engine):
    optimizer = engine._engine.optimizer
    parts = zero_parts(optimizer, engine.module, stage, engine.rank)
    return [float(value.double().sum()) for part in parts for value in part.tensors.values()]

def train(bad):
    torch.manual_seed(0)
    engine = ZeroEngine(Model().to(getattr(torch, dtype)).train(), AdamW((0.9, 0.95), 0.0, 1.0), stage, dtype, 1, options)
    found = []
    for step in range(1, 5):
        if step == 2 and not bad:
            continue
        # Two passes a rank; the last of rank 1 is the bad one, whose loss is infinite by a constant, without a gradient of it.
        rows = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(step)).to(getattr(torch, dtype))

        def loss(place):
            value = engine(rows[place]) / 4 + (math.inf if step == 2 and place == 3 else 0.0)
            return Loss(value, {"loss": value.detach()})

        before = state(engine) if step > 1 else None
        metrics = accumulate(engine, range(4), loss, tainted=True)
        try:
            found.append(engine.step(1e-2))
        except FloatingPointError:
            assert step == 2 and metrics["loss"] == math.inf and state(engine) == before
    return found, state(engine)

(norms, ends), (others, other_ends) = train(True), train(False)
assert len(norms) == 3
print(json.dumps([norms, others, ends, other_ends]))
"""


@pytest.mark.parametrize(
    ("stage", "dtype", "place"),
    [
        (1, "bfloat16", "gpu"),
        (2, "bfloat16", "gpu"),
        (3, "bfloat16", "gpu"),
        (2, "bfloat16", "offload"),
        (3, "float32", "offload"),
        pytest.param(2, "float32", "gpu", marks=pytest.mark.long),
        pytest.param(3, "float32", "gpu", marks=pytest.mark.long),
    ],
)
def test_a_step_that_is_left_out_changes_nothing(stage: int, dtype: str, place: str) -> None:
    for printed in on_gloo_ranks(2, RANK, stage, dtype, place):
        norms, others, ends, other_ends = json.loads(printed.splitlines()[-1])
        assert norms == others and ends == other_ends
