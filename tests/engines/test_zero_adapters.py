"""ZeRO-3 and adapters: layers are fetched whole, and the first layer's adapters have their gradients although embeddings are frozen."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.gloo_ranks import on_gloo_ranks

PROGRAM = """
import json
import sys

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.config import SFT, Ranks
from rlhf_core.models.load import trained_policy
from rlhf_core.models.lora import lora_layers
from rlhf_core.training.ranks import make_engine, shards_of

base, stage = sys.argv[1], int(sys.argv[2])
config = SFT.model_validate({
    "data": {"sources": "rows.jsonl"}, "dtype": "float32", "lora": {"rank": 4}, "micro_train_batch_size": 1,
    "gradient_checkpointing": False, "ranks": Ranks(), "zero_stage": stage, "deepspeed": {},
})
policy = trained_policy(base, "float32", False, config.lora, 0, shards=shards_of(config))
engine = make_engine(policy, config)
tokens = torch.arange(3, 67)[None]
found = []
for step in range(3):
    engine.backward(-engine(tokens, torch.arange(64)[None], torch.zeros_like(tokens)).logprobs.mean(), True)
    engine.step(1e-2)
    layers = lora_layers(policy.model)
    first = next(layer for name, layer in layers.items() if ".0." in name)
    weight = first.lora_B["default"].weight
    with engine.gathered([weight]):
        found.append(float(weight.norm()))
whole = [bool(getattr(part, "_z3_leaf", False)) for part in policy.modules() if isinstance(part, GradientCheckpointingLayer)]
print(json.dumps([found, whole]))
"""


def test_the_first_layers_adapters_learn_as_without_zero(material: Path) -> None:
    (zero, whole), (plain, _) = (json.loads(on_gloo_ranks(1, PROGRAM, material / "base", stage)[0].splitlines()[-1]) for stage in (3, 0))
    assert all(whole) and whole, "a layer is fetched at once"
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(zero, plain, strict=True)) and plain[0] > 0
