"""Questions of stages: labels of judges, and models asked what they were selected by."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import Preferences, Recipe
from rlhf_core.preflight.question_checks import question_problems, selecting_questions
from rlhf_core.recipe.plan import Plan, plan


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


PAIRS = {"sources": "pairs.jsonl"}


def planned(folder: Path, model: str, questions: list[str]) -> Plan:
    """A sweep that is selected by three questions; `model` is judged by `questions` afterwards."""
    asked = {"trial": ["Who?", "What?", "When?"], "last": questions}
    for name, texts in asked.items():
        rows = [json.dumps({"uid": f"{name}{i}", "prompt": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    judged: dict[str, Any] = {"stage": "evaluation", "baseline": "base"}
    stages = {
        "dpo": {"policy": "base", "data": PAIRS, "sweep": {"beta": [0.1, 0.3]}},
        "trial": judged | {"models": ["dpo"], "questions": {"path": str(folder / "trial.jsonl")}},
        "best": {"stage": "select", "of": "dpo", "by": "trial"},
        "more": {"stage": "dpo", "policy": "best", "data": PAIRS},
        "last": judged | {"models": [model], "questions": {"path": str(folder / "last.jsonl")}},
    }
    return plan(Recipe(name="r", base_model="org/model", artifacts=str(folder), stages=stages))


def test_the_selecting_questions_are_refused_for_the_selected_model_and_its_descendants(
    tmp_path: Path,
) -> None:
    for model in ("best", "more"):
        (told,) = selecting_questions(planned(tmp_path, model, ["why?", " what? "]))
        assert (
            told
            == "stages.last.questions: 1 of 2 questions are those of trial, by which best chose its model:"
            " ask others here, or the win rate is too high"
        )


def test_other_questions_and_other_models_are_right(tmp_path: Path) -> None:
    assert selecting_questions(planned(tmp_path, "best", ["Why?", "How?"])) == []
    # this model was selected by nothing
    assert selecting_questions(planned(tmp_path, "dpo.beta=0.1", ["Who?"])) == []
