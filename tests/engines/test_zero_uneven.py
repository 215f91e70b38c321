"""Ranks whose passes have other tokens than those of the others fetch the weights of ZeRO-3 equally often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = pytest.mark.slow
IN_PARTS = """
import json, logging, os, sys
logging.disable(logging.WARNING)
import torch
from rlhf_core.config import SFT
from rlhf_core.models.weights import shards
from rlhf_core.models.load_model import trained_policy
from rlhf_core.training.ranks import make_engine, shards_of

shards.SMALL = 500
count = int(os.environ["WORLD_SIZE"])
whole = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}, "zero_stage": 3} if count > 1 else {}
config = SFT.model_validate({
    "model": "base", "data": {"sources": "none"}, "ranks": {"num_ranks_per_node": count}, "mlp_tokens": 16,
    "train_batch_size": 2, "micro_train_batch_size": 1, **json.loads(sys.argv[2]), **whole,
})
policy = trained_policy(sys.argv[1], "float32", False, config.lora, 0, shards=shards_of(config))
engine = make_engine(policy, config)
rows, norms = [torch.randint(80, (1, size), generator=torch.Generator().manual_seed(size)) for size in (12, 75)], []
for step in range(3):
    mine = rows[engine.rank :: count]
    for number, tokens in enumerate(mine, 1):
        tokens = tokens.roll(step, 1)
        out = engine(tokens, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens))
        engine.backward(-out.logprobs.sum() / 87, number == len(mine))
    norms.append(engine.step(1e-3))
print(json.dumps(norms))
"""
EXPERTS = """
import json, logging, os
logging.disable(logging.WARNING)
import torch
from torch import nn
from rlhf_core.training.zero.zero_engine import join_group
from rlhf_core.training.zero.zero_shards import FrozenZero

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(400, 400) for _ in range(3))

    def forward(self, tokens, chosen):
        for place in chosen:
            tokens = self.experts[place](tokens)
        return tokens

torch.manual_seed(0)
model = nn.ModuleList([Block(), Block()])
model.forward = lambda tokens, chosen: model[1](model[0](tokens, chosen), chosen)
tokens, ways = torch.randn(2, 400), [[0, 2], [1]]
with torch.no_grad():
    expected = [model(tokens, chosen) for chosen in ways]
join_group()
rank, frozen = int(os.environ["RANK"]), FrozenZero(model, "float32")
with torch.no_grad():
    gaps = [float((frozen(tokens, ways[turn ^ rank]) - expected[turn ^ rank]).abs().max()) for turn in range(2)]
print(json.dumps(gaps))
"""


@pytest.mark.parametrize(
    "fields",
    [
        {"lora": {"rank": 4}},
        pytest.param(
            {"lora": {"rank": 4, "targets": ["gate_proj", "up_proj", "down_proj"]}}, marks=pytest.mark.long
        ),
        pytest.param({"lora": {"rank": 4}, "gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
    ],
)
def test_feed_forward_blocks_have_other_numbers_of_parts(fields: dict[str, Any], material: Path) -> None:
    """One part on a rank, five on the other."""
    one, two = (
        json.loads(on_gloo_ranks(count, IN_PARTS, material / "base", json.dumps(fields))[0].splitlines()[-1])
        for count in (1, 2)
    )
    assert two == pytest.approx(one, rel=1e-4)


def test_tokens_of_a_frozen_model_go_to_other_experts() -> None:
    for printed in on_gloo_ranks(2, EXPERTS):
        assert max(json.loads(printed.splitlines()[-1])) < 1e-6
