"""Finds the questions that a model lost in a finished evaluation, for a regression suite. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evaluation.scores.arena_files import read_judgments
from rlhf_core.config import RuleJudge
from rlhf_core.data.questions import load_questions
from rlhf_core.data.suite import SuiteQuestion
from rlhf_core.records import EvalReport, Judgment
from rlhf_core.runs.run_dir import RunDir, StageRequest


def lost_questions(
    folder: Path, model: str, lost_to: str | None = None, judge: str | None = None
) -> list[SuiteQuestion]:
    """Returns the questions that `model` lost to `lost_to` (None: the baseline) in both games according to
    `judge` (None: the first). Each question has the other model's answer as its reference, and the known
    answer if a rule is among the judges.

    Raises ValueError when the directory does not hold a finished evaluation, or when the evaluation lacks a
    named model or judge.
    """
    run = RunDir(folder)
    try:
        request = run.request()
    except (OSError, ValidationError):
        raise ValueError(
            f"{folder}: is not a run directory: give ARTIFACTS/stages/NAME-DIGEST of an evaluation"
        ) from None
    report = EvalReport.read(run / "report" / "eval.json") if run.result() else None
    if report is None:
        raise ValueError(f"{folder}: holds no finished evaluation: run it first, or give another directory")
    judged = [
        one for one in read_judgments(run / "report" / "judgments") if one.judge == (judge or report.judge)
    ]
    sides = dict.fromkeys((one.model, one.baseline) for one in judged)
    side = (model, lost_to or report.baseline)
    if side not in sides:
        there = ", ".join(f"{one} against {other}" for one, other in sides) or f"nothing by a judge {judge}"
        raise ValueError(f"{folder}: has no battles of {side[0]} against {side[1]}; there is {there}")
    lost = [one for one in judged if (one.model, one.baseline) == side and one.scores == (0.0, 0.0)]
    answers = _answers(run.path, side[1])
    known = _known(request)
    return [_question(one, answers[one.uid], known.get(one.uid), request) for one in lost]


def _question(
    judgment: Judgment, row: dict[str, Any], answer: str | None, request: StageRequest
) -> SuiteQuestion:
    content = row["messages"][-1]["content"]
    return SuiteQuestion(
        uid=judgment.uid,
        prompt=tuple(row["messages"][:-1]),
        reason=f"{judgment.model} lost both games to {judgment.baseline} by {judgment.judge}",
        source=f"{request.name}-{request.digest}",
        category=judgment.category,
        answer=answer,
        reference=content["answer"] if isinstance(content, dict) else content,
    )


def _answers(folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a model's answers by uid, from the file whose rows name the model."""
    for file in sorted((folder / "report" / "answers").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        if rows and rows[0]["model"] == model:
            return {row["uid"]: row for row in rows}
    raise ValueError(f"{folder}: has no answers of {model} in report/answers")


def _known(request: StageRequest) -> dict[str, str]:
    """Returns the known answers by uid if the evaluation has a rule judge. Raises ValueError when its
    questions cannot be loaded."""
    config = request.config
    rule = next((one for one in config.judges_of_answers if isinstance(one, RuleJudge)), None)
    if rule is None or config.asks is None:
        return {}
    questions = load_questions(*config.asks, request.seed)
    return {one.uid: one.known_answer(rule.answer_key) for one in questions}
