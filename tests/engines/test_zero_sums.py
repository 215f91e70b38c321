"""DeepSpeed adds the bf16 gradients of many passes as one pass would have them, under each ZeRO stage."""

from __future__ import annotations

import json

import pytest

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK = """
import json, logging, sys
logging.disable(logging.WARNING)
import torch
from torch import nn
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_options import ZeroOptions
from rlhf_core.training.zero.zero_parts import zero_parts

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).float().sum()

stage, options, found = int(sys.argv[1]), ZeroOptions(adam_offload=sys.argv[2] == "offload"), []
row = torch.full((1, 16), 0.7, dtype=torch.bfloat16)
for passes in (1, 256):
    torch.manual_seed(0)
    engine = ZeroEngine(Model().bfloat16().train(), AdamW((0.9, 0.95), 0.0, 1e9), stage, "bfloat16", 1, options)
    for _ in range(2):
        for number in range(1, passes + 1):
            engine.backward(engine(row) / passes, number == passes)
        norm = engine.step(1e-3)
    optimizer = engine._engine.optimizer
    parts = [part.tensors["exp_avg"] for part in zero_parts(optimizer, engine.module, stage, engine.rank)]
    moments = torch.stack([sum(part.sum() for part in parts), torch.tensor(0.0)])
    found.append([norm, engine.all_reduce(moments)[0].item(), type(optimizer).__name__])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("stage", "place"), [(1, "gpu"), (2, "gpu"), (3, "gpu"), (2, "offload"), (3, "offload")]
)
def test_a_constant_signal_adds_up_over_many_passes(stage: int, place: str) -> None:
    one, many = json.loads(on_gloo_ranks(2, RANK, stage, place)[0].splitlines()[-1])
    # the gradient norm, and the sum of Adam's first moments
    assert many[:2] == pytest.approx(one[:2], rel=1e-3)
    # no other keeps gradients for good
    assert one[2] == {3: "DeepSpeedZeroOptimizer_Stage3"}.get(stage, "DeepSpeedZeroOptimizer")
