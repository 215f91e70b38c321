"""A training state is read by another number of ranks, under another ZeRO stage: the same gradient norms, the
same weights."""

from __future__ import annotations

import hashlib
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

base, folder, stage, dtype, lora, do = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
shards.SMALL = 500
count = int(os.environ["WORLD_SIZE"])
config = SFT.model_validate({
    "model": "base", "data": {"sources": "none"}, "dtype": dtype, "zero_stage": stage, "ranks": {"num_ranks_per_node": count},
    "lora": {"rank": 4} if lora == "lora" else None, "train_batch_size": 12, "micro_train_batch_size": 1,
})
policy = trained_policy(str(base), dtype, False, config.lora, 0, shards=shards_of(config))
engine = make_engine(policy, config)
batch = torch.randint(80, (12, 24), generator=torch.Generator().manual_seed(1))
positions = torch.arange(24).expand(12, 24)

def step(index):
    mine = slice(engine.rank * 12 // count, (engine.rank + 1) * 12 // count)
    tokens = batch[mine].roll(index, 1)
    out = engine(tokens, positions[mine], torch.zeros_like(tokens))
    engine.backward(-out.logprobs.sum() / 288, True)
    return engine.step(1e-3)

if do == "train":
    for index in range(2):
        step(index)
    folder.mkdir(exist_ok=True)
    engine.save_state(folder)
    engine.finish_saving()
else:
    engine.load_state(folder)
engine.barrier()
print(" ".join(repr(step(index)) for index in (2, 3, 4)))
export(engine, folder.parent / f"{do}-{count}-{stage}", str(base), config.lora, False)
"""


def norms(count: int, base: Path, folder: Path, stage: int, dtype: str, lora: str, do: str) -> list[float]:
    printed = on_gloo_ranks(count, PROGRAM, base, folder, stage, dtype, lora, do)
    found = [[float(norm) for norm in text.splitlines()[-1].split()] for text in printed]
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize(
    ("stage", "dtype", "lora", "others"),
    [
        (3, "float32", "all", [(2, 3), (3, 3), (1, 0)]),
        pytest.param(3, "bfloat16", "all", [(2, 3), (3, 3), (2, 2), (2, 1)], marks=pytest.mark.long),
        pytest.param(2, "bfloat16", "all", [(3, 2), (3, 3)], marks=pytest.mark.long),
        pytest.param(1, "float32", "all", [(2, 3), (1, 0)], marks=pytest.mark.long),
        pytest.param(3, "float32", "lora", [(2, 3), (1, 0)], marks=pytest.mark.long),
    ],
)
def test_a_state_of_4_ranks_is_resumed_by_others(
    stage: int, dtype: str, lora: str, others: list[tuple[int, int]], material: Path, tmp_path: Path
) -> None:
    """By 4 again bit by bit; by others up to the order of sums."""
    state = tmp_path / "state"
    first = norms(4, material / "base", state, stage, dtype, lora, "train")
    again = norms(4, material / "base", state, stage, dtype, lora, "resume")
    assert again == first and digest(tmp_path / f"resume-4-{stage}") == digest(tmp_path / f"train-4-{stage}")
    close = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    expected = load_file(tmp_path / f"train-4-{stage}" / "model.safetensors")
    for count, other in others:
        assert norms(count, material / "base", state, other, dtype, lora, "resume") == pytest.approx(
            first, rel=close
        ), (count, other)
        resumed = load_file(tmp_path / f"resume-{count}-{other}" / "model.safetensors")
        for name, weight in expected.items():
            apart = float((resumed[name].float() - weight.float()).abs().mean())
            narrow = weight.dtype == torch.bfloat16
            # Adam moves a weight by about the learning rate, 1e-3, whatever its gradient: in bf16 the order
            # of sums decides where that is near 0 (one weight in 20), and which of two neighbours, 2^-8 of
            # the weight apart, it is rounded to (as many).
            bound = (1e-3 + 2**-8 * float(weight.float().abs().mean())) / 20 if narrow else 2e-5
            assert apart < bound, (count, other, name)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
