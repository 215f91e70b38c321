"""Ranks of which one has images in a pass and the other has none stay in step under ZeRO-3, and take the step
that one rank takes; a saved state brings all weights back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.pictured_models import make_pictured

pytestmark = pytest.mark.slow
PROGRAM = """
import json, logging, os, sys
from pathlib import Path
logging.disable(logging.WARNING)
import torch
from rlhf_core.config import SFT, RewardModel
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.kernels.attention import is_stateful
from rlhf_core.models.load_model import trained_policy, trained_scorer
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import masked_logprobs, token_scores
from rlhf_core.models.weights import shards
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.masked import gather_last
from rlhf_core.training.ranks import make_engine, shards_of
from tests.unit.data.pictures.test_picture_rendering import TALKS, talk

shards.SMALL = 500
count = int(os.environ["WORLD_SIZE"])
fields = json.loads(sys.argv[2])
stage = fields.pop("stage", 3)
whole = {"zero_stage": stage}
if stage == 3:
    whole["deepspeed"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
whole = whole if count > 1 else {}
scores = fields.pop("scores", False)
config = (RewardModel if scores else SFT).model_validate({
    "model": "base", "data": {"sources": "none"}, "ranks": {"num_ranks_per_node": count},
    "train_batch_size": 2, "micro_train_batch_size": 1, **fields, **whole,
})
tokenizer = load_tokenizer(sys.argv[1])
renderer = Renderer(tokenizer, "chat")
if scores:
    module = trained_scorer(sys.argv[1], 0, "float32", False, config.lora, 0, shards=shards_of(config))
else:
    module = trained_policy(sys.argv[1], "float32", False, config.lora, 0, shards=shards_of(config))
reader = reads_pictures(module, sys.argv[1], tokenizer, "float32", 1, config.image_encoder)
engine = make_engine(module, config, packed=True)

def loss_of(batch, count):
    if scores:
        return -gather_last(token_scores(engine, batch), batch.documents, count).sum() / 5
    return -masked_logprobs(engine, batch).logprobs.sum() / 50

plain = renderer.conversation(talk("No image here.", "None.", "Why?", "So."))
pictured = [renderer.conversation(messages) for messages in TALKS]
def weights():
    sent = checkpoint_weights(module.model, engine.gathered, encoder=module.image_encoder)
    return {name: weight.double().clone() for name, weight in sent}

def step(whole):
    mine = whole[engine.rank :: count]
    for number, row in enumerate(mine, 1):
        rows = [[document] for document in row] if is_stateful(module.model) else [row]
        batch = collate(rows, 0, reader=reader).to(engine.device)
        engine.backward(loss_of(batch, len(row)), number == len(mine))
    return engine.step(1e-3)

def moved(start, part):
    return sum(float((weight - start[name]).abs().sum()) for name, weight in weights().items() if part(name))

start = weights()
norms = [step(whole) for whole in ([pictured[:2], [plain]], [[plain], pictured[2:]], [[plain], [plain]])]
trained = set(module.image_encoder.stored) if module.image_encoder else set()
distances = [moved(start, trained.__contains__), moved(start, lambda name: name not in trained)]
state = Path(sys.argv[3]) / str(count)
state.mkdir(exist_ok=True)
engine.save_state(state)
engine.finish_saving()
engine.barrier()
saved = weights()
step([pictured[:1], [plain]])
left = moved(saved, lambda name: True)
engine.load_state(state)
print(json.dumps({"norms": norms, "distances": distances, "left": left, "back": moved(saved, lambda name: True)}))
"""


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_vl", {}),
        ("gemma3", {"scores": True}),
        ("qwen3_vl", {"image_encoder": "trained", "image_encoder_learning_rate": 1e-6}),
        pytest.param("mistral3", {"image_encoder": "trained"}, marks=pytest.mark.long),
        pytest.param(
            "gemma3", {"image_encoder": "trained", "gradient_checkpointing": True}, marks=pytest.mark.long
        ),
        pytest.param("gemma4", {"image_encoder": "trained", "stage": 1}, marks=pytest.mark.long),
        pytest.param("gemma4", {"image_encoder": "trained", "stage": 2}, marks=pytest.mark.long),
        pytest.param(
            "qwen3_vl", {"image_encoder": "projector", "freeze": {"names": "*"}}, marks=pytest.mark.long
        ),
        pytest.param("qwen3_vl", {"scores": True}, marks=pytest.mark.long),
        pytest.param("gemma3", {"gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param("gemma4", {}, marks=pytest.mark.long),
        pytest.param("mistral3", {}, marks=pytest.mark.long),
        pytest.param("qwen3_5", {}, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", {}, marks=pytest.mark.long),
        pytest.param("qwen3_vl", {"lora": {"rank": 4}}, marks=pytest.mark.long),
    ],
)
def test_one_rank_has_images(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    base = make_pictured(family, tmp_path / "base")
    one, two = (
        json.loads(on_gloo_ranks(count, PROGRAM, base, json.dumps(fields), tmp_path)[0].splitlines()[-1])
        for count in (1, 2)
    )
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    # Adam's steps have one size, also where a gradient is little but rounding errors
    assert two["distances"] == pytest.approx(one["distances"], rel=1e-2)
    assert bool(one["distances"][0]) == ("image_encoder" in fields)
    assert bool(one["distances"][1]) == ("freeze" not in fields)
    for found in (one, two):
        assert found["left"] > 0 and found["back"] == 0
