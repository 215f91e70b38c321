"""Under each ZeRO stage, the weights of a training are those of plain torch, also from a resumed state: frozen
ones stay bit for bit, and those of `ema` are the moving average."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TWO_STEPS = """
import json, logging, os, sys
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
    "dtype": dtype, "train_batch_size": 4, "micro_train_batch_size": 1, **json.loads(sys.argv[5]),
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
resumed = made()
"""
FROZEN = """
norms = [step(engine, index) for index in (2, 3)]
export(engine, folder / "trained", str(base), None, False)
resumed.load_state(folder)
assert [step(resumed, index) for index in (2, 3)] == norms
"""
AVERAGED = """
norms = [step(engine, 2)]
export_average(engine, folder / "average", str(base), None, False)
export(engine, folder / "trained", str(base), None, False)
norms.append(step(engine, 3))  # as without the export
resumed.load_state(folder)
again = [step(resumed, 2)]
export_average(resumed, folder / "resumed", str(base), None, False)
again.append(step(resumed, 3))
assert again == norms
"""


def folders(
    program: str, material: Path, tmp_path: Path, dtype: str, **fields: object
) -> Iterator[tuple[int, Path]]:
    """Yields the folder of what plain torch (stage 0) has made, and of each ZeRO stage on two ranks."""
    for stage, count in ((0, 1), (1, 2), (2, 2), (3, 2)):
        folder = tmp_path / str(stage)
        folder.mkdir()
        on_gloo_ranks(count, TWO_STEPS + program, material / "base", folder, stage, dtype, json.dumps(fields))
        yield stage, folder


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_what_is_not_frozen_is_trained_as_plain_torch_does(material: Path, tmp_path: Path) -> None:
    freeze = {"embeddings": True, "layers": 1, "names": ["model.norm.weight"]}
    how = {"freeze": freeze, "weight_decay": 0.1, "decay": "hidden"}
    trained = {
        stage: weights(folder / "trained")
        for stage, folder in folders(FROZEN, material, tmp_path, "float32", **how)
    }
    start = weights(material / "base")
    frozen = {
        name
        for name in start
        if "embed_tokens" in name or ".layers.0." in name or name == "model.norm.weight"
    }
    for stage, found in trained.items():
        assert set(found) == set(start)
        for name, weight in found.items():
            assert torch.equal(weight, start[name]) is (name in frozen), (stage, name)
            apart = float((weight - trained[0][name]).abs().mean())
            assert apart < 2e-5, (stage, name)  # the order of sums decides where a gradient is near 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_average_is_that_of_plain_torch(dtype: str, material: Path, tmp_path: Path) -> None:
    found = {}
    for stage, folder in folders(AVERAGED, material, tmp_path, dtype, ema=0.75):
        average, trained, resumed = (weights(folder / name) for name in ("average", "trained", "resumed"))
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
