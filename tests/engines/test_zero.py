"""DeepSpeed ZeRO-3 on two Ray workers against plain torch on one rank: the same losses, the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config import DPO, KTO, SFT, Data, Lora, Ranks, RewardModel
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.families import make_family
from tests.support.stage_request import stage_request
from tests.support.stage_work import WORK
from tests.unit.models.test_document_leak import save_leaking

pytestmark = pytest.mark.slow
FIELDS = {"train_batch_size": 12, "micro_train_batch_size": 2, "max_len": 64, "learning_rate": 1e-3}
TWO = {"zero_stage": 3, "ranks": Ranks(num_ranks_per_node=2, cpus=0.5)}


def train(
    kind: str, material: Path, folder: Path, base: Path | None = None, **more: object
) -> list[dict[str, float]]:
    def data(name: str) -> Data:
        # 4 steps; the last has 7 items, dealt unevenly
        return Data(sources=str(material / name), max_samples=43)

    config: SFT | RewardModel | DPO | KTO
    if kind == "sft":
        rows = {"data": data("sft.jsonl"), "eval_data": data("sft_heldout.jsonl")}
        config = SFT(model="base", **{**rows, **FIELDS, **more})
    elif kind == "reward_model":
        config = RewardModel(model="base", data=data("preferences.jsonl"), **{**FIELDS, **more})
    elif kind == "kto":
        config = KTO(
            policy="base",
            data=data("preferences.jsonl").model_copy(update={"max_samples": 21}),
            **{**FIELDS, **more},
        )
    else:
        config = DPO(policy="base", data=data("preferences.jsonl"), **{**FIELDS, **more})
    folder.mkdir()
    inputs = dict.fromkeys(("base", "other"), str(base or material / "base"))
    request = stage_request(config, inputs, name=kind, seed=5)
    WORK[kind](request, RunDir(folder))
    return read_metrics(folder)


@pytest.mark.parametrize(
    "kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sft", "reward_model", "kto"))]
)
def test_two_zero3_ranks_train_as_one_does(kind: str, material: Path, tmp_path: Path) -> None:
    two_are_one(kind, material, tmp_path)
    auto = AutoModelForSequenceClassification if kind == "reward_model" else AutoModelForCausalLM
    exported = load_file(tmp_path / "two" / "checkpoint" / "model.safetensors")
    loaded = auto.from_pretrained(tmp_path / "two" / "checkpoint").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in exported.items()), (
        "export and transformers disagree"
    )


def test_two_zero3_ranks_train_adapters_as_one_does(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_are_one("dpo", material, tmp_path, lora=Lora(rank=4), zero_stage="auto")
    assert "zero_stage 3: memory cannot be estimated, as there is no GPU" in capsys.readouterr().out


def test_two_zero3_ranks_share_another_reference_as_one_has_it(material: Path, tmp_path: Path) -> None:
    two_are_one("dpo", material, tmp_path, reference="other")


def test_two_zero3_ranks_train_experts_and_their_balance_as_one_does(material: Path, tmp_path: Path) -> None:
    base = make_family("mixtral", material / "base", tmp_path / "base")
    lines = two_are_one("sft", material, tmp_path, base, router_aux_coef=0.01)
    assert all(line["router/balance"] > 0 for line in lines)


@pytest.mark.long
def test_two_zero3_ranks_keep_documents_apart_that_would_leak_as_one_does(
    material: Path, tmp_path: Path
) -> None:
    base = save_leaking("falcon", material / "base", tmp_path / "base")
    rows = train("sft", material, tmp_path / "rows", base, packing=False)
    packed = two_are_one("sft", material, tmp_path, base)
    assert [line["loss"] for line in packed] == pytest.approx([line["loss"] for line in rows], rel=2e-4)


def two_are_one(
    kind: str,
    material: Path,
    tmp_path: Path,
    base: Path | None = None,
    ranks: Mapping[str, object] = TWO,
    **more: object,
) -> list[dict[str, float]]:
    """Trains on one rank and on two, compares curves and checkpoints; the curve of two ranks."""
    one = train(kind, material, tmp_path / "one", base, **more)
    try:
        two = train(kind, material, tmp_path / "two", base, save_steps=2, **{**ranks, **more})
    finally:
        ray.shutdown()
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", *({"eval/loss", "router/balance"} & a.keys())):
            assert b[name] == pytest.approx(a[name], rel=2e-4, abs=1e-6), (a["step"], name)
    expected, exported = (
        load_file(tmp_path / run / "checkpoint" / "model.safetensors") for run in ("one", "two")
    )
    assert expected.keys() == exported.keys()
    for name, weight in expected.items():
        # AdamW's first steps move by the sign of tiny gradients, so a few elements differ by fractions of the
        # learning rate.
        assert (weight - exported[name]).abs().mean() < 2e-5, name
    return two
