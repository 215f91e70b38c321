"""A state of a DeepSpeed engine is resumed with passes of another size, as a stage is after it ran out of
memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = pytest.mark.slow
RANK = """
import sys
from pathlib import Path
import torch
from torch import nn
from rlhf_core.cluster.rank_environment import PATIENCE
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import ZeroEngine

def engine(micro):
    torch.manual_seed(0)
    return ZeroEngine(nn.Linear(8, 8).train(), AdamW((0.9, 0.95), 0.0, 1.0), int(sys.argv[1]), "float32", micro)

def step(engine, micro):
    for part in range(0, 8, micro):
        engine.backward(engine(data[part : part + micro]).square().sum() / 8, part + micro == 8)
    return engine.step(1e-2)

data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
first = engine(4)
limit = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
assert limit == PATIENCE and limit.total_seconds() >= 24 * 3600, "one rank may write for hours"
step(first, 4)
first.save_state(Path(sys.argv[2]))
first.finish_saving()
whole = [step(first, 4) for _ in range(3)]
second = engine(1)
second.load_state(Path(sys.argv[2]))
assert [step(second, 1) for _ in range(3)] == __import__("pytest").approx(whole, rel=1e-5)
print("the same", whole)
"""


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_state_goes_on_with_shorter_passes(zero_stage: int, tmp_path: Path) -> None:
    assert "the same" in on_gloo_ranks(1, RANK, zero_stage, tmp_path)[0]
