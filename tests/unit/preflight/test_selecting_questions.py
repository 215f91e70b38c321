"""A selected model is not judged by the questions that selected it: refused before any work, also of what was
trained from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_core.config import Recipe
from rlhf_core.preflight.question_checks import selecting_questions
from rlhf_core.recipe.plan import Plan, plan

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
