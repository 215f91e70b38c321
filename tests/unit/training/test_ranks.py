"""Ranks of a training stage, whichever kind it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from rlhf_core.config import Trainable
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
