"""Runs the regression stage, which evaluates the suite's questions, then determines which of them each model
passes and computes the band of earlier results.

A model passes a question if it does not lose: the mean of its two games is at least a tie. If the first judge
is a rule, the model passes if its answer is right, regardless of the baseline's answer. Without a verdict,
the question is not passed. `report/regression.json` has every question; the other files in `report/` are the
same as in an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evaluation.answers.local_answers import file_name, read_answers
from evaluation.evaluation_stage import REPORT
from evaluation.evaluation_stage import run as evaluate
from evaluation.judges.factory import judge_names
from evaluation.judges.offline import KnownAnswerJudge
from evaluation.regression.regression_report import (
    REGRESSION,
    QuestionOutcome,
    QuestionResult,
    RegressionReport,
    band_of,
    metrics,
    regression_table,
)
from rlhf_core import config as configs
from rlhf_core.config.judging.calibration import judge_identity
from rlhf_core.config.metrics.evaluation_metrics import RATES
from rlhf_core.data.questions import Question, load_questions
from rlhf_core.recipe.gate_checks import check
from rlhf_core.records import Judgment
from rlhf_core.runs.run_dir import RESULT, Outcome, RunDir, StageRequest
from rlhf_core.system.files import write_text


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Evaluates the suite and writes its report. Raises ValueError for the same reasons as
    `evaluation_stage.run`."""
    config = request.config
    assert isinstance(config, configs.Regression), f"regression got the config of a {config.stage} stage"
    evaluated = evaluate(request, run)
    questions = load_questions(config.questions, config.max_questions, request.seed)
    models = tuple(model for model in dict.fromkeys(config.models) if model != config.baseline)
    outcomes = {model: outcomes_of(run, config, model, questions) for model in models}
    identity = judge_identity(config.judges[0], request.inputs, config.template_args)
    trusted = trusted_history(run, request, identity)[-config.history :] if config.history else []
    earlier = [report.final_outcomes for report in trusted]
    report = RegressionReport(
        baseline=config.baseline,
        final=models[-1],
        models=models,
        judge=identity,
        questions=tuple(
            QuestionResult(
                uid=question.uid,
                prompt=question.prompt,
                reason=str(question.row.get("reason") or ""),
                source=str(question.row.get("source") or ""),
                outcomes={model: outcomes[model][question.uid] for model in models},
            )
            for question in questions
        ),
        before=earlier[-1] if earlier else {},
        band=band_of(outcomes[models[-1]], earlier, config.band),
    )
    write_text(run / REPORT / "regression.md", regression_table(report))
    write_text(run / REPORT / REGRESSION, report.model_dump_json(indent=2))
    found = {
        name: value
        for name, value in evaluated.metrics.items()
        if name.partition("/")[0].removesuffix("_vs_parent") not in RATES
    }
    found |= metrics(report)
    for model in models:
        failed = len(report.newly_failed(model))
        back = len(report.recovered(model))
        print(
            f"{model}: {found[f'passed/{model}']:.3f} of {len(questions)} passed, {failed} newly failed,"
            f" {back} recovered",
            flush=True,
        )
    return Outcome(found, evaluated.outputs)


def outcomes_of(
    run: RunDir, config: configs.Regression, model: str, questions: Sequence[Question]
) -> Mapping[str, QuestionOutcome]:
    """Returns the outcome of each question according to the first judge, by uid."""
    name, first = next(iter(judge_names(config.judges).items()))
    if isinstance(first, configs.RuleJudge):
        rule = KnownAnswerJudge(name, first.answer_key)
        answers = read_answers(run / REPORT / "answers" / f"{file_name(model)}.jsonl", questions)
        assert answers is not None, f"the evaluation wrote no answers of {model}"
        return {
            q.uid: "passed" if rule.right(q, given.text) else "failed"
            for q, given in zip(questions, answers, strict=True)
        }
    found: dict[str, QuestionOutcome] = dict.fromkeys([question.uid for question in questions], "no verdict")
    text = (run / REPORT / "judgments" / f"{file_name(name)}.jsonl").read_text(encoding="utf-8")
    for line in filter(None, text.split("\n")):  # `splitlines` would also split at U+2028
        judgment = Judgment.model_validate_json(line)
        if (judgment.model, judgment.baseline) == (model, config.baseline) and judgment.score is not None:
            found[judgment.uid] = "passed" if judgment.score >= 0.5 else "failed"
    return found


def trusted_history(run: RunDir, request: StageRequest, judge: str) -> list[RegressionReport]:
    """Returns, oldest first, the reports of earlier finished stages that have the same name, baseline and
    judge and whose gates all passed."""
    found: list[tuple[float, RegressionReport]] = []
    assert isinstance(request.config, configs.Regression)
    for folder in run.path.parent.glob(f"{request.name}-*") if run.artifacts else ():
        other = RunDir(folder)
        result = other.result() if folder.resolve() != run.path else None
        report = RegressionReport.read(folder / REPORT / REGRESSION) if result else None
        if (
            result is None
            or report is None
            or (report.judge, report.baseline) != (judge, request.config.baseline)
        ):
            continue
        try:
            theirs = other.request()
        except (OSError, ValueError):
            continue
        if theirs.name == request.name and all(
            verdict.passed for verdict in check(theirs.name, theirs.config, result)
        ):
            found.append(((folder / RESULT).stat().st_mtime, report))
    return [report for _, report in sorted(found, key=lambda one: one[0])]
