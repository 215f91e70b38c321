"""Which metrics the table at the end of a run shows first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flows.cli.show import _importance
from rlhf_core.config import Evaluation, Source


def test_win_rates_are_first_in_the_order_of_the_recipe() -> None:
    node: Any = SimpleNamespace(config=Evaluation(models=("sft", "dpo"), questions=Source(path="q.jsonl")))
    metrics = {"answers": 1.0, "ci_low/sft": 0.4, "questions": 9.0, "win_rate/dpo": 0.6, "win_rate/sft": 0.5}
    shown = [name for name, _ in sorted(metrics.items(), key=_importance(node))]
    assert shown == ["win_rate/sft", "win_rate/dpo", "questions", "ci_low/sft", "answers"]
