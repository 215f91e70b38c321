"""Which weights ZeRO-3 leaves whole between passes: one rank in a process of its own, as DeepSpeed takes a
process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = pytest.mark.slow
RANK = """
import json, logging, sys
logging.disable(logging.WARNING)
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from rlhf_core.training.zero import zero_engine
from rlhf_core.training.engine import AdamW

scored, zero_engine.KEPT = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=600, hidden_size=384, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4
)
model = LlamaForCausalLM(config).train()
engine = zero_engine.ZeroEngine(model, AdamW((0.9, 0.95), 0.0, 1.0), 3, "float32", 1)
config = engine._engine._config.zero_config
tokens = torch.arange(16)[None]
whole = []

def count():
    fetched = [p for p in model.parameters() if not p.ds_persist]
    return sum(p.ds_status == ZeroParamStatus.AVAILABLE for p in fetched) / len(fetched)

for step in range(2):
    for _ in range(scored):
        with torch.no_grad():
            engine(tokens)
    scoring = count()
    engine.release()
    released = count()
    for number in range(3):
        logits = engine(tokens).logits
        forward = count()
        engine.backward(logits.logsumexp(-1).mean(), number == 2)
    whole.append({"scoring": scoring, "released": released, "forward": forward, "backward": count()})
    engine.step(1e-3)
print(json.dumps({"whole": whole, "linear": config.memory_efficient_linear, "prefetch": config.prefetch_bucket_size}))
"""


def one_rank(scored: int, kept: float) -> dict[str, Any]:
    return dict(json.loads(on_gloo_ranks(1, RANK, scored, kept)[0].splitlines()[-1]))


@pytest.mark.parametrize("scored", [0, 3])
def test_weights_of_a_small_model_stay_whole_for_the_backward_pass_alone(scored: int) -> None:
    """Also where the first passes had no gradient, as a reference's or a rollout's scores have none."""
    found = one_rank(scored, 1 / 16)
    for step in found["whole"]:
        assert step["released"] == step["backward"] == 0
        assert step["forward"] == 1
    assert found["linear"] is False


def test_those_of_others_are_fetched_again() -> None:
    found = one_rank(0, 0.0)
    layer = 4 * 384 * 384 + 3 * 384 * 512 + 2 * 384
    assert found["linear"] is True and found["prefetch"] == layer
    # Embedding and head of 0.23 million weights each, between layers of 1.18.
    assert all(step["forward"] < 0.5 and step["backward"] < 0.5 for step in found["whole"]), (
        "weights of a host's memory are not kept"
    )
