"""Ranks of a training stage, whichever kind it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config import Ranks, Trainable
from rlhf_core.models.kernels.feed_forward import split_feed_forward
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.training import ranks
from rlhf_core.training.zero.zero_engine import split_blocks


class Toy(Trainable):
    """A kind of stage that is in no table."""

    stage: Literal["toy"] = "toy"


def test_a_training_stage_of_any_kind_runs_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "set_rank_environment", lambda *_: None)
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: False)
    request = StageRequest.model_construct(name="toy", digest="d", config=Toy(), inputs={}, seed=0)
    outcome = ranks.on_ranks(lambda request, run: Outcome({"rows": 1.0}, {}), request, RunDir(tmp_path))
    assert outcome.metrics == {"rows": 1.0}


@pytest.mark.parametrize(
    ("zero", "nodes", "cut"),
    [
        ({}, 1, True),
        ({"reduce_bucket_size": 1000, "zero_quantized_weights": False}, 1, True),
        ({"zero_quantized_weights": True}, 1, False),
        ({"zero_quantized_nontrainable_weights": True}, 1, False),
        ({}, 2, False),
    ],
)
def test_weights_of_which_deepspeed_makes_others_are_whole_when_it_gets_them(
    zero: dict[str, object], nodes: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It quantises (qwZ), and makes second copies (hpZ), where it cuts a weight itself."""
    monkeypatch.setattr("rlhf_core.training.zero.zero_backend.ZeroShards", lambda dtype, on_host: "shards")
    config = Toy(
        ranks=Ranks(num_nodes=nodes, num_ranks_per_node=2),
        zero_stage=3,
        zero_hpz=nodes > 1,
        deepspeed={"zero_optimization": zero},
    )
    assert (ranks.shards_of(config) is not None) is cut


def test_feed_forward_blocks_that_share_weights_are_not_computed_in_parts_under_zero_3() -> None:
    shape = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2
    )
    model = LlamaForCausalLM(LlamaConfig(**shape))
    split_feed_forward(model, 4)
    blocks = [layer.mlp for layer in model.model.layers]
    assert split_blocks(model) == blocks
    model.model.layers[1].mlp = blocks[0]
    with pytest.raises(
        ValueError,
        match="feed-forward blocks that share weights cannot be computed in parts with zero_stage=3",
    ):
        split_blocks(model)
