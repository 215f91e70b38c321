"""Weights in host memory, and second copies of them in groups of ranks (hpZ), leave the losses as they are:
four ranks on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlhf_core.stages.sft
from rlhf_core.config import SFT, Data
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS = 4
RANK = """
import json, logging, sys
logging.disable(logging.WARNING)
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_options import ZeroOptions

options, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
resumed = Path(options.pop("resumed", folder))  # a state of other options
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=600, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4
)
model = LlamaForCausalLM(shape).train()
zero = options.setdefault("more", {}).setdefault("zero_optimization", {})
zero["param_persistence_threshold"] = 0  # all weights are sharded, small ones too
engine = ZeroEngine(model, AdamW((0.9, 0.95), 0.0, 1.0), 3, "float32", 1, ZeroOptions(**options))
tokens = torch.randint(600, (4, 2, 16), generator=torch.Generator().manual_seed(1))[engine.rank]

def step():
    found = 0.0
    for number, row in enumerate(tokens):
        logits = engine(row[None]).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], row[1:]) / 8
        engine.backward(loss, number == 1)
        found += engine.all_reduce(loss.detach().clone()).item()
    return found, engine.step(1e-2)

before = [step() for _ in range(2)]
folder.mkdir(exist_ok=True)
engine.barrier()
engine.save_state(folder)
engine.finish_saving()
engine.barrier()
after = [step() for _ in range(2)]
engine.load_state(resumed)
again = [step() for _ in range(2)]
zero = engine._engine._config.zero_config
with engine.gathered(list(model.parameters())):
    total = sum(float(weight.double().abs().sum()) for weight in model.parameters())
copies = [weight.ds_secondary_tensor for weight in model.parameters()]
assert not any(weight.ds_persist for weight in model.parameters())
if engine.rank == 0:
    found = {"steps": before + after, "again": again, "total": total, "offload": zero.offload_param is not None}
    held = max((copy.numel() for copy in copies if copy is not None), default=0)
    found |= {"hpz": zero.zero_hpz_partition_size, "copy": held, "bucket": zero.reduce_bucket_size, "prefetch": zero.prefetch_bucket_size}
    print(json.dumps(found))
engine.barrier()
torch.distributed.destroy_process_group()
"""


def train(folder: Path, **options: Any) -> dict[str, Any]:
    return dict(json.loads(on_gloo_ranks(RANKS, RANK, json.dumps(options), folder)[0].splitlines()[-1]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    found = train(folder) | {"folder": str(folder)}
    assert not found["offload"] and found["hpz"] == 1 and found["copy"] == 0
    losses = [loss for loss, _ in found["steps"]]
    assert losses[-1] < losses[0], "it learns"
    return found


def same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in ("steps", "again"):
        for (loss, norm), (other_loss, other_norm) in zip(found[name], plain[name], strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-5) and norm == pytest.approx(other_norm, rel=1e-4)
    for (loss, _), (before, _) in zip(found["again"], found["steps"][2:], strict=True):
        assert loss == pytest.approx(before, rel=1e-5), "from the state the same steps again"
    assert found["total"] == pytest.approx(plain["total"], rel=1e-5)


def test_weights_and_adam_in_host_memory_train_the_same(plain: dict[str, Any], tmp_path: Path) -> None:
    """Also from a state of ranks that had both on the device."""
    found = train(tmp_path, adam_offload=True, param_offload=True, resumed=plain["folder"])
    assert found["offload"]
    same(found, plain)


def test_weights_alone_in_host_memory_train_the_same(plain: dict[str, Any], tmp_path: Path) -> None:
    found = train(tmp_path, param_offload=True)
    assert found["offload"] and not plain["offload"]
    same(found, plain)


def test_second_copies_of_the_weights_train_the_same(plain: dict[str, Any], tmp_path: Path) -> None:
    found = train(tmp_path, hpz_ranks=2)
    # a half of the largest weight on each rank of a pair
    assert found["hpz"] == 2 and found["copy"] == 600 * 64 / 2
    same(found, plain)


def test_options_of_the_recipe_come_before_ours(plain: dict[str, Any], tmp_path: Path) -> None:
    found = train(
        tmp_path, more={"zero_optimization": {"reduce_bucket_size": 12345, "prefetch_bucket_size": 0}}
    )
    assert (found["bucket"], found["prefetch"]) == (12345, 0)
    same(found, plain)


def test_a_stage_on_one_rank_takes_options_of_deepspeed(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sft(name: str, **fields: Any) -> list[dict[str, float]]:
        data = Data(sources=str(material / "sft.jsonl"), max_samples=24)
        config = SFT(
            model="base",
            data=data,
            train_batch_size=12,
            micro_train_batch_size=2,
            max_len=64,
            learning_rate=1e-3,
            **fields,
        )
        (tmp_path / name).mkdir()
        rlhf_core.stages.sft.run(
            stage_request(config, material / "base", name=name, seed=5), RunDir(tmp_path / name)
        )
        return read_metrics(tmp_path / name)

    plain = sft("plain")
    told = capsys.readouterr().out
    block = sft("block", deepspeed={"zero_optimization": {"reduce_bucket_size": 100000}})
    assert "zero_stage" not in told and "zero_stage 3: memory cannot be estimated" in capsys.readouterr().out
    assert [line["loss"] for line in block] == pytest.approx([line["loss"] for line in plain], rel=2e-4)
    with pytest.raises(ValueError, match=r"deepspeed: DeepSpeed .* option 'zero_optimization.reduce_bucket'"):
        sft("wrong", deepspeed={"zero_optimization": {"reduce_bucket": 100000}})
