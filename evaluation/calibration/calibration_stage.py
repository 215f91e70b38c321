"""Runs the calibration stage, in which a judge decides pairs that people have labelled. The judge sees each
pair in both orders, and its verdicts are compared with the people's labels.

`report/calibration.json` is the report, and `report/calibration.md` has its tables.
`report/judgments/<judge>.jsonl` has the judge's games in Arena-Hard's format, with the models `a` and `b`.
Verdicts of a chat judge are cached as they arrive, so a resumed stage never requests the same verdict twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from evaluation.answers.local_answers import file_name
from evaluation.calibration.calibration_report import (
    CALIBRATION,
    CalibrationReport,
    calibration_tables,
    metrics,
)
from evaluation.calibration.measures import Observed, confusion, judge_signs, measure
from evaluation.judges.factory import judge_names, judging, make_judge
from evaluation.judges.offline import battles
from evaluation.scores.arena_files import judgment_lines
from evaluation.scores.scoring import Floats
from evaluation.scores.style import Style, features, markdown, style_of
from rlhf_core.config import Calibration
from rlhf_core.config.judging.calibration import judge_identity
from rlhf_core.data.labels import LabelledPair, load_labels
from rlhf_core.data.questions import Question
from rlhf_core.records import POINTS, Judgment
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system.files import write_text

REPORT = "report"


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Judges all pairs and writes the report. Raises ValueError if a label is invalid or if too many games
    have no verdict."""
    config = request.config
    assert isinstance(config, Calibration), f"calibration got the config of a {config.stage} stage"
    pairs = load_labels(config.labels.path, config.max_labels)
    questions = [Question(pair.key, "all", pair.messages, {}) for pair in pairs]
    answers = {"a": [pair.answer_a for pair in pairs], "b": [pair.answer_b for pair in pairs]}
    ((name, judge_config),) = judge_names((config.judge,)).items()
    with ExitStack() as stack:
        judge = make_judge(name, judge_config, request, config, run, stack)
        judged = battles(judge, questions, answers, [("b", "a")])
    path = run / REPORT / "judgments" / f"{file_name(name)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, judgment_lines(judged))

    observed = observe(pairs, judged)
    report = CalibrationReport(
        judge=name,
        identity=judge_identity(judge_config, request.inputs, config.template_args),
        pairs=len(pairs),
        uids=len({pair.uid for pair in pairs}),
        labels=sum(len(pair.votes) + len(pair.repeats) for pair in pairs),
        annotators=len({name for pair in pairs for name in pair.votes}),
        unjudged=int(np.isnan(judge_signs(observed.games)).sum()),
        measures=measure(observed, config.bootstrap_rounds, request.seed),
        confusion=tuple(map(tuple, confusion(observed).tolist())),
        judging=judging(judged, judge, judge_config),
    )
    found = metrics(report)
    tracker = Tracker(run, total_steps=1)
    tracker.log(1, found)
    tracker.close()
    write_text(run / REPORT / "calibration.md", calibration_tables(report))
    write_text(run / REPORT / CALIBRATION, report.model_dump_json(indent=2))
    for title, one in report.rows:
        print(f"{name}: {title}: {one.value:.3f} [{one.ci_low:.3f}, {one.ci_high:.3f}]", flush=True)
    return Outcome(found, {"report": REPORT})


def observe(pairs: Sequence[LabelledPair], judged: Sequence[Judgment]) -> Observed:
    """Returns the signs that people and the judge gave each pair, and the differences between the pair's
    answers. Lengths are in characters."""
    votes = [[sum(sign == wanted for sign in pair.votes.values()) for wanted in (1, 0, -1)] for pair in pairs]
    repeats = [[len(pair.repeats), sum(one == other for one, other in pair.repeats)] for pair in pairs]
    styles = features([_style(pair.answer_a) for pair in pairs], [_style(pair.answer_b) for pair in pairs])
    return Observed(
        uids=[pair.uid for pair in pairs],
        games=games_of(judged),
        human=np.array([pair.sign for pair in pairs]),
        longer=np.sign(styles[:, 0]).astype(np.int64),
        marked=np.sign(styles[:, 1:].sum(1).round(12)).astype(np.int64),
        votes=np.array(votes, np.float64),
        repeats=np.array(repeats, np.float64),
    )


def games_of(judged: Sequence[Judgment]) -> Floats:
    """Returns the winner of each game, (N, 2): 1 for the answer shown first, -1 for the second, 0 for a tie,
    nan without a verdict."""
    points = [
        [np.nan if game.score is None else 2 * POINTS[game.score] - 1 for game in judgment.games]
        for judgment in judged
    ]
    return np.array(points, np.float64)


def _style(text: str) -> Style:
    return style_of({"token_len": len(text), **markdown(text)})
