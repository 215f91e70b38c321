"""Reads the data for a drift stage from a finished evaluation. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evaluation.answers.local_answers import file_name
from evaluation.answers.question_pictures import read_messages
from evaluation.judges.factory import judge_names
from evaluation.scores.arena_files import read_judgments
from rlhf_core import config as configs
from rlhf_core.data.questions import Question
from rlhf_core.records import Judgment
from rlhf_core.runs.run_dir import RunDir, StageRequest


@dataclass(frozen=True)
class Judged:
    """A finished evaluation: its request, its names for the two models, and each model's answers, in the
    order of `questions`."""

    request: StageRequest
    folder: Path
    model: str
    reference: str
    questions: list[Question]
    answers: dict[str, list[str]]

    @property
    def config(self) -> configs.Evaluation:
        assert isinstance(self.request.config, configs.Evaluation)
        return self.request.config

    @property
    def reward_judge(self) -> str | None:
        """Returns the name of the first second-opinion judge that is a reward model; None if there is
        none."""
        named = list(judge_names(self.config.judges).items())[1:]
        return next((name for name, judge in named if isinstance(judge, configs.RewardJudge)), None)

    @property
    def judge(self) -> str:
        """Returns the name of the deciding judge."""
        return next(iter(judge_names(self.config.judges)))

    def judgments(self, judge: str) -> list[Judgment]:
        """Returns a judge's battles of the model against the evaluation's baseline."""
        battle = (judge, self.model, self.config.baseline)
        return [
            one
            for one in read_judgments(self.folder / "judgments")
            if (one.judge, one.model, one.baseline) == battle
        ]


def read_evaluation(report: Path, inputs: Mapping[str, str], model: str, reference: str) -> Judged:
    """Reads the evaluation with this report folder. `inputs` has the paths of the two models.

    Raises ValueError when one of the models has no answers in the evaluation.
    """
    request = RunDir(report.parent).request()
    config = request.config
    assert isinstance(config, configs.Evaluation), (
        f"drift got the report of a {config.stage} stage as evaluation"
    )
    names = {
        place_of(request.inputs[name]): name
        for name in (*config.models, config.baseline)
        if name in request.inputs
    }
    missing = [name for name in (model, reference) if place_of(inputs[name]) not in names]
    if missing:
        known = ", ".join(dict.fromkeys((config.baseline, *config.models)))
        raise ValueError(
            f"{' and '.join(missing)} did not answer in the evaluation {request.name}, but {known} did: add"
            " it to its models"
        )
    ours = [names[place_of(inputs[name])] for name in (model, reference)]
    rows = {}
    for name in ours:
        text = (report / "answers" / f"{file_name(name)}.jsonl").read_text(encoding="utf-8")
        rows[name] = {row["uid"]: row for row in map(json.loads, text.split("\n")[:-1])}
    first = rows[ours[0]]
    questions = [
        Question(uid, "all", tuple(read_messages(row["messages"][:-1], report)), {})
        for uid, row in first.items()
        if uid in rows[ours[1]]
    ]
    answers = {
        name: [_answer(rows[name][question.uid]["messages"][-1]["content"]) for question in questions]
        for name in ours
    }
    return Judged(request, report, ours[0], ours[1], questions, answers)


def place_of(place: str) -> str:
    """Returns a model's Hub id, or the last three components of its path, which include its stage's digest
    and do not depend on the location of the artifacts."""
    return "/".join(PurePosixPath(place).parts[-3:])


def _answer(content: object) -> str:
    return str(content["answer"] if isinstance(content, dict) else content)
