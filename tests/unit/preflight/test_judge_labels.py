"""Labelled pairs that a rewarding judge is held against are looked at before any work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import Preferences
from rlhf_core.preflight.question_checks import question_problems


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (None, "pairs.jsonl"),
        ('{"prompt": "a", "chosen": "b"}', "there is no column 'rejected'"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', ""),
    ],
    ids=["no file", "no column", "good"],
)
def test_missing_pairs_and_columns_are_told(line: str | None, told: str, tmp_path: Path) -> None:
    if line is not None:
        (tmp_path / "pairs.jsonl").write_text(line + "\n")
    judge = {"judge": {"model": "m"}, "rubric": "r", "agreement": {"data": str(tmp_path / "pairs.jsonl")}}
    config = Preferences(policy="sft", prompts={"sources": "p.jsonl"}, reward=judge)
    node: Any = SimpleNamespace(name="round", config=config)
    found = question_problems(node, 0)
    assert len(found) == bool(told)
    assert all(sentence.startswith("stages.round.reward: ") and told in sentence for sentence in found)
