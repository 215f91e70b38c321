"""Under each ZeRO stage, frozen weights stay bit for bit, the others are those of plain torch, and a state is
resumed."""

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
from rlhf_core.training.ranks import export, make_engine, shards_of

base, folder, stage = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
shards.SMALL = 500
count = int(os.environ["WORLD_SIZE"])
config = SFT.model_validate({
    "model": "base", "data": {"sources": "none"}, "zero_stage": stage, "ranks": {"num_ranks_per_node": count},
    "freeze": {"embeddings": True, "layers": 1, "names": ["model.norm.weight"]}, "weight_decay": 0.1, "decay": "hidden",
    "train_batch_size": 4, "micro_train_batch_size": 1,
})

def made():
    return make_engine(trained_policy(str(base), "float32", False, None, 0, shards=shards_of(config)), config)

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
norms = [step(engine, index) for index in (2, 3)]
export(engine, folder / f"trained-{stage}", str(base), None, False)
resumed = made()
resumed.load_state(folder)
assert [step(resumed, index) for index in (2, 3)] == norms
print(norms[-1])
"""


def test_zero_trains_what_is_not_frozen_as_plain_torch_does(material: Path, tmp_path: Path) -> None:
    trained = {}
    for stage, count in ((0, 1), (1, 2), (2, 2), (3, 2)):
        folder = tmp_path / str(stage)
        folder.mkdir()
        on_gloo_ranks(count, PROGRAM, material / "base", folder, stage)
        trained[stage] = load_file(folder / f"trained-{stage}" / "model.safetensors")
    start = load_file(material / "base" / "model.safetensors")
    frozen = {
        name
        for name in start
        if "embed_tokens" in name or ".layers.0." in name or name == "model.norm.weight"
    }
    for stage, weights in trained.items():
        assert set(weights) == set(start)
        for name, weight in weights.items():
            assert torch.equal(weight, start[name]) is (name in frozen), (stage, name)
            apart = float((weight - trained[0][name]).abs().mean())
            assert apart < 2e-5, (stage, name)  # the order of sums decides where a gradient is near 0
