"""Runs the drift stage, which compares the current prompts, answers and judges with past prompts, answers and
judges, and writes `report/drift.json`.

It reads the answers and judgments of a finished evaluation. It generates no answers, and loads a model only
for the KL (see `kl`) and for an anchor judge that needs a model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from evaluation.drift.answer_drift import answer_signals
from evaluation.drift.drift_report import DRIFT, DriftReport, Signal, metrics
from evaluation.drift.earlier_results import EarlierResult, earlier_results, with_changes
from evaluation.drift.judge_drift import agreement, judge_anchors
from evaluation.drift.prompt_drift import prompt_signals
from evaluation.drift.resampling import mean
from evaluation.drift.source import Judged, read_evaluation
from evaluation.judges.factory import judge_names, make_judge
from rlhf_core.config import Data, Drift
from rlhf_core.data.anchors import load_anchors
from rlhf_core.data.documents import as_text
from rlhf_core.data.rows.columns import Located, prompt_of
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system.files import digest, write_text

REPORT = "report"


class AnchorSignals(NamedTuple):
    """The signals of the anchors, a key that identifies the anchors and their judge, and the time of judging
    (UTC)."""

    signals: list[Signal]
    key: str
    at: datetime | None


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Computes all signals. Raises ValueError for invalid prompts or anchors, and when a model has no
    answers in the evaluation."""
    config = request.config
    assert isinstance(config, Drift), f"drift got the config of a {config.stage} stage"
    rounds = config.bootstrap_rounds
    seed = request.seed
    now = datetime.now(UTC)
    judged = read_evaluation(
        Path(request.inputs[config.evaluation]), request.inputs, config.model, config.reference
    )
    if config.kl and judged.config.temperature != 1:
        raise ValueError(
            f"kl needs answers sampled at temperature 1, but the evaluation {judged.request.name} has another"
            " temperature: set it to 1, or set kl to false"
        )
    signals = prompt_signals(*prompt_texts(config, seed), rounds, seed)
    signals += answer_signals(judged.answers[judged.model], judged.answers[judged.reference], rounds, seed)
    notes = []
    if judged.reward_judge is None:
        notes.append(
            "The evaluation has no reward model as second judge, so the agreement of the two is unknown."
        )
    elif found := agreement(
        judged.judgments(judged.judge), judged.judgments(judged.reward_judge), rounds, seed
    ):
        signals.append(found)
    else:
        notes.append(
            "Too few questions were judged by both the judge and the reward model, or one of them gave every"
            " question the same score."
        )
    if config.kl:
        signals.append(kl(config, judged, request))
    earlier = earlier_results(request, config, run)
    anchored = anchors(config, judged, request, run, earlier, now)
    report = DriftReport(
        at=now,
        model=config.model,
        reference=config.reference,
        signals=tuple(with_changes([*signals, *anchored.signals], earlier)),
        notes=tuple(notes),
        anchors_key=anchored.key,
        anchors_at=anchored.at,
        history=tuple(one.as_earlier for one in earlier),
    )
    (run / REPORT).mkdir(parents=True, exist_ok=True)
    write_text(run / REPORT / DRIFT, report.model_dump_json(indent=1))
    found_metrics = metrics(report)
    if anchored.at is not None:
        found_metrics["anchors/age_days"] = (now - anchored.at) / timedelta(days=1)
    tracker = Tracker(run, total_steps=1)
    tracker.log(1, found_metrics)
    tracker.close()
    for signal in report.signals:
        test = "" if signal.p is None else f", p = {signal.p:.3g}"
        print(
            f"{signal.name}: {signal.value:.4g} [{signal.low:.4g}, {signal.high:.4g}]{test} ({signal.count})",
            flush=True,
        )
    return Outcome(found_metrics, {"report": REPORT})


def prompt_texts(config: Drift, seed: int) -> tuple[list[str], list[str]]:
    """Returns the distinct current and past prompts as strings, at most `max_prompts` of each: the last of
    the current prompts, and a sample of the past prompts, drawn with the seed. Raises ValueError for the same
    reasons as `load_rows` and `prompt_of`."""

    def texts(name: str, data: Data) -> list[str]:
        rows = load_rows(data, seed, "prompt")
        return [
            as_text(prompt_of(Located(f"{name}, row {number}", row))) for number, row in enumerate(rows, 1)
        ]

    newest_first = list(dict.fromkeys(reversed(texts("prompts", config.prompts))))
    past = list(dict.fromkeys(texts("past_prompts", config.past_prompts)))
    drawn = random.Random(seed).sample(past, config.max_prompts) if len(past) > config.max_prompts else past
    return newest_first[: config.max_prompts], drawn


def kl(config: Drift, judged: Judged, request: StageRequest) -> Signal:
    """Returns `kl`: the mean of log p(answer | model) - log p(answer | reference) over the model's answers,
    in nats per answer."""
    # loads torch and model code, so import it only when needed
    from evaluation.answers.kl import log_ratios

    asked = judged.config.model_copy(update={"baseline": judged.reference})
    places = {judged.model: request.inputs[config.model], judged.reference: request.inputs[config.reference]}
    answers: dict[str, Sequence[str]] = {judged.model: judged.answers[judged.model]}
    ratios = log_ratios(judged.questions, answers, places, asked, request.trust_remote_code)[judged.model]
    low, high = mean(ratios, config.bootstrap_rounds, request.seed)
    return Signal(name="kl", value=float(ratios.mean()), low=low, high=high, count=len(ratios))


def anchors(
    config: Drift,
    judged: Judged,
    request: StageRequest,
    run: RunDir,
    earlier: Sequence[EarlierResult],
    now: datetime,
) -> AnchorSignals:
    """Judges the anchors and returns their signals. Reuses the signals of an earlier result if its verdicts
    on the same anchors are less than `anchors.days` old."""
    if config.anchors is None:
        return AnchorSignals([], "", None)
    pairs = load_anchors(config.anchors.pairs, request.seed)
    asked = [
        [question.prompt, a, b]
        for question, a, b in zip(pairs.questions, *pairs.answers.values(), strict=True)
    ]
    judge = config.anchors.judge
    key = digest(
        [
            asked,
            pairs.points.tolist(),
            judge.model_dump(mode="json"),
            request.inputs.get(getattr(judge, "reward", getattr(judge, "model", "")), ""),
        ]
    )
    for one in reversed(earlier):
        at = one.report.anchors_at
        if (
            one.report.anchors_key == key
            and at is not None
            and now - at < timedelta(days=config.anchors.days)
        ):
            print(f"anchors: reusing the verdicts of {at:%Y-%m-%d %H:%M} UTC", flush=True)
            return AnchorSignals(
                [signal for signal in one.report.signals if signal.name.startswith("anchors/")], key, at
            )
    with ExitStack() as stack:
        name = next(iter(judge_names([judge])))
        made = make_judge(name, judge, request, judged.config, run, stack)
        return AnchorSignals(judge_anchors(made, pairs), key, now)
