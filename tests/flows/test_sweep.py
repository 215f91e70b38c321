"""A sweep in a flow: its variants run side by side, a new value is the only one that is trained, a killed
variant is run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.alignment import alignment, stage
from rlhf_core.config import Recipe
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.runs.launch import StageFailed
from tests.support.writing_stages import attempts, fault, statuses

pytestmark = pytest.mark.usefixtures("prefect")
TEXT = """
name: tiny
base_model: org/model
side_by_side: 2
stages:
  sft: {data: {sources: train.jsonl}}
  dpo: {policy: sft, data: {sources: pairs.jsonl}, sweep: {beta: [0.05, 0.1, 0.3]}}
  trial: {stage: evaluation, models: [dpo], questions: {path: q.jsonl}}
  best: {stage: select, of: dpo, by: trial}
  evaluation: {models: [best], questions: {path: other.jsonl}}
"""
VARIANTS = ["dpo.beta=0.05", "dpo.beta=0.1", "dpo.beta=0.3"]


def test_variants_and_what_follows(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe()
    monkeypatch.setattr("flows.schedule.num_cpus", lambda: 4)
    Path("recipe.yaml").write_text(TEXT)
    fault(**{VARIANTS[1]: ["killed", "killed"]})
    with pytest.raises(StageFailed, match=r"stage dpo\.beta=0\.1 failed"):
        alignment(load_recipe("recipe.yaml"))
    first = Counter(attempts())
    assert first["sft"] == 1
    assert first[VARIANTS[1]] == 2
    assert statuses()[VARIANTS[0]] == "done"
    assert not first["trial"]
    alignment(load_recipe("recipe.yaml"))
    left = Counter(
        {VARIANTS[1]: 1, VARIANTS[2]: 1 - first[VARIANTS[2]], "trial": 1, "best": 1, "evaluation": 1}
    )
    assert Counter(attempts()) - first == +left
    assert set(statuses().values()) == {"done", "skipped"}

    before = Counter(attempts())
    alignment(load_recipe("recipe.yaml", ["dpo.sweep.beta=[0.05, 0.1, 0.3, 0.5]"]))
    assert Counter(attempts()) - before == Counter(
        {"dpo.beta=0.5": 1, "trial": 1, "best": 1, "evaluation": 1}
    )
    stage("recipe.yaml", "dpo", ("dpo.sweep.beta=[0.1, 0.7]",))
    assert attempts()[-1] == "dpo.beta=0.7"
    assert "dpo.beta=0.7" in Path("artifacts/tiny/report.html").read_text()
