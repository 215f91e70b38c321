"""ZeRO-3 fetches layers with adapters whole, and the first layer's adapters have their gradients although
embeddings are frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = pytest.mark.slow
PROGRAM = """
import json, os, sys

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.config import SFT, Ranks
from rlhf_core.models.weights import shards
from rlhf_core.models.load_model import trained_policy
from rlhf_core.models.lora import lora_layers, without_adapters
from rlhf_core.training.zero import zero_engine
from rlhf_core.training.ranks import make_engine, shards_of

shards.SMALL = 500
if sys.argv[4] == "alone":
    zero_engine._layers = lambda module: set()
count, rank, base, stage = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
config = SFT.model_validate({
    "data": {"sources": "rows.jsonl"}, "dtype": "float32", "lora": {"rank": 4}, "micro_train_batch_size": 1, "max_norm": 1e9,
    "gradient_checkpointing": sys.argv[3] == "recomputed", "ranks": Ranks(num_ranks_per_node=count), "zero_stage": stage,
    "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage else {},
})
policy = trained_policy(base, "float32", False, config.lora, 0, shards=shards_of(config))
engine = make_engine(policy, config)
texts, places = [torch.arange(3, 67), torch.arange(70, 134) % 80], torch.arange(64)[None]
found = []
for _ in range(3):
    with torch.no_grad(), without_adapters(policy.model):
        engine(texts[rank][None], places, torch.zeros(1, 64, dtype=torch.long))
    mine = texts[rank::count]
    for text in mine:
        out = engine(text[None], places, torch.zeros(1, 64, dtype=torch.long))
        engine.backward(-out.logprobs.mean(), text is mine[-1])
    found.append(engine.step(1e-2))
whole = [bool(getattr(part, "_z3_leaf", False)) for part in policy.modules() if isinstance(part, GradientCheckpointingLayer)]
cut = sum(hasattr(weight, "ds_tensor") and not weight.ds_persist for weight in policy.parameters())
first = next(layer for name, layer in lora_layers(policy.model).items() if ".0." in name).lora_B["default"].weight
with engine.gathered([first]):
    print(json.dumps([[*found, float(first.norm())], whole, cut]))
"""


@pytest.mark.parametrize("recomputed", ["recomputed", "kept"])
@pytest.mark.parametrize("fetched", ["whole", "alone"])
def test_two_ranks_train_adapters_as_one_without_zero(recomputed: str, fetched: str, material: Path) -> None:
    """Gradient norms of three steps, and the norm of the first layer's B. Before each step the model is read
    without its adapters. alone: each module of a layer is fetched where it is called, as where layers share
    weights."""
    (zero, whole, cut), (plain, _, _) = (
        json.loads(
            on_gloo_ranks(count, PROGRAM, material / "base", stage, recomputed, fetched)[0].splitlines()[-1]
        )
        for count, stage in ((2, 3), (1, 0))
    )
    assert whole and all(whole) == (fetched == "whole") and cut, "layers are cut, and fetched at once"
    assert zero == pytest.approx(plain, rel=1e-4) and plain[-1] > 0
