"""Under each ZeRO stage `ema` is the moving average of plain torch, also from a resumed state, and the weights
come back after its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = """
import logging, os, sys
from pathlib import Path
logging.disable(logging.WARNING)
import torch
from rlhf_core.config import SFT
from rlhf_core.models.weights import shards
from rlhf_core.models.load_model import trained_policy
from rlhf_core.training.ranks import export, export_average, make_engine, shards_of

base, folder, stage, dtype = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
shards.SMALL = 500
count = int(os.environ["WORLD_SIZE"])
config = SFT.model_validate({
    "model": "base", "data": {"sources": "none"}, "zero_stage": stage, "ranks": {"num_ranks_per_node": count},
    "ema": 0.75, "dtype": dtype, "train_batch_size": 4, "micro_train_batch_size": 1,
})

def made():
    return make_engine(trained_policy(str(base), dtype, False, None, 0, shards=shards_of(config)), config)

batch = torch.randint(80, (4, 24), generator=torch.Generator().manual_seed(1))
positions = torch.arange(24).expand(4, 24)

def step(engine, index):
    mine = slice(engine.rank * 4 // count, (engine.rank + 1) * 4 // count)
    tokens = batch[mine].roll(index, 1)
    out = engine(tokens, positions[mine], torch.zeros_like(tokens))
    engine.backward(-out.logprobs.sum() / 96, True)
    return engine.step(1e-3)

engine = made()
for index in range(2):
    step(engine, index)
engine.save_state(folder)
engine.finish_saving()
engine.barrier()
norms = [step(engine, 2)]
export_average(engine, folder / "average", str(base), None, False)
export(engine, folder / "trained", str(base), None, False)
norms.append(step(engine, 3))  # as without the export
resumed = made()
resumed.load_state(folder)
again = [step(resumed, 2)]
export_average(resumed, folder / "resumed", str(base), None, False)
again.append(step(resumed, 3))
assert again == norms
"""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_zero_averages_as_plain_torch_does(dtype: str, material: Path, tmp_path: Path) -> None:
    found = {}
    for stage, count in ((0, 1), (1, 2), (2, 2), (3, 2)):
        folder = tmp_path / str(stage)
        folder.mkdir()
        on_gloo_ranks(count, PROGRAM, material / "base", folder, stage, dtype)
        average, trained, resumed = (
            load_file(folder / name / "model.safetensors") for name in ("average", "trained", "resumed")
        )
        assert set(average) == set(trained)
        assert all(torch.equal(resumed[name], weight) for name, weight in average.items())
        lag = {
            name: float((average[name].float() - weight.float()).abs().mean())
            for name, weight in trained.items()
        }
        assert sum(lag.values()) / len(lag) > 1e-4, "the average is behind by more than a step's tenth"
        found[stage] = average
    bound = 2e-5 if dtype == "float32" else 1e-3
    for stage, average in found.items():
        for name, weight in average.items():
            apart = float((weight.float() - found[0][name].float()).abs().mean())
            assert apart < bound, (stage, name)
