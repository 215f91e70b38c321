"""Ranks of a training stage, whichever kind it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from rlhf_core.config import Ranks, Trainable
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.training import ranks


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
    monkeypatch.setattr("rlhf_core.training.zero_shards.ZeroShards", lambda dtype, on_host: "shards")
    config = Toy(
        ranks=Ranks(num_nodes=nodes, num_ranks_per_node=2),
        zero_stage=3,
        zero_hpz=nodes > 1,
        deepspeed={"zero_optimization": zero},
    )
    assert (ranks.shards_of(config) is not None) is cut
