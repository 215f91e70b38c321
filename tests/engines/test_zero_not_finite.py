"""DeepSpeed ends training where plain torch does: at a loss, or a gradient norm, that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from rlhf_core.config import SFT, Data
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.sft import run
from tests.engines.test_zero import FIELDS, TWO
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK = """
import sys
import torch
from torch import nn
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import ZeroEngine

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.layer(x).sum()

engine = ZeroEngine(Model().train(), AdamW((0.9, 0.95), 0.0, 1.0), int(sys.argv[1]), "float32", 1)
engine.backward(engine(torch.ones(1, 4)), True)
assert engine.step(1e-3) == 2.0
engine.backward((engine(torch.ones(1, 4)) * 0).sqrt(), True)  # 0, whose gradient is NaN
engine.step(1e-3)
"""


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_gradient_norm_that_is_not_finite(zero_stage: int) -> None:
    with pytest.raises(AssertionError, match=r"\nFloatingPointError: the gradient norm is .*\n$"):
        on_gloo_ranks(1, RANK, zero_stage)


def test_a_loss_on_two_ranks(material: Path, tmp_path: Path) -> None:
    data = Data.model_validate({"sources": str(material / "sft.jsonl"), "max_samples": 43})
    config = SFT(model="base", data=data, **FIELDS | TWO | {"learning_rate": 1e37})
    try:
        with pytest.raises(
            FloatingPointError, match=r"^sft: step 2 of 4: the loss is nan, and training ends here"
        ):
            run(
                stage_request(config, material / "base", seed=5),
                RunDir(tmp_path),
            )
    finally:
        ray.shutdown()
