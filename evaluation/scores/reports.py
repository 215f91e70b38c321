"""Computes the report of each judge and the stage's metrics from judgments and answers. All functions are
pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from evaluation.scores.arena_hard import Styles, controlled, question_rows
from evaluation.scores.scoring import agreement, win_rate
from rlhf_core.records import EvalReport, Judging, Judgment, StyleEffect, WinRate


def make_reports(
    judgments: Mapping[str, Sequence[Judgment]],
    baseline: str,
    styles: Styles,
    about: Mapping[str, Mapping[str, float]],
    use: Mapping[str, Judging],
    resamples: int,
    seed: int,
) -> list[EvalReport]:
    """Returns one report per judge, in the order of `judgments`.

    `about`: statistics of each model's answers (the fraction right, mean_tokens, the fraction truncated);
    `use`: each judge's counts and costs. Raises ValueError when a judge gave no verdict.
    """
    main = {judge: [j for j in judged if j.baseline == baseline] for judge, judged in judgments.items()}
    reports = []
    for name, judged in judgments.items():
        agreements = {other: agreement(main[name], theirs) for other, theirs in main.items() if other != name}
        sides = dict.fromkeys((j.model, j.baseline) for j in judged)
        rates = [
            rate_of([j for j in judged if (j.model, j.baseline) == side], styles, resamples, seed)
            for side in sides
        ]
        effects = controlled(
            question_rows(main[name], styles, arena=False), ("length", "markdown"), resamples, seed
        ).effects
        reports.append(
            EvalReport(
                baseline=baseline,
                judge=name,
                win_rates=tuple(rate for rate in rates if rate.baseline == baseline),
                right=dict(about["right"]),
                mean_tokens=dict(about["mean_tokens"]),
                truncated=dict(about["truncated"]),
                agreement={other: share for other, share in agreements.items() if share is not None},
                against_parent=tuple(rate for rate in rates if rate.baseline != baseline),
                style=tuple(
                    StyleEffect(feature=f, effect=e.value, ci_low=e.low, ci_high=e.high)
                    for f, e in effects.items()
                ),
                judging=use[name],
            )
        )
    return reports


def rate_of(judged: Sequence[Judgment], styles: Styles, resamples: int, seed: int) -> WinRate:
    """Returns one model's win rate, raw and length-controlled (`arena_hard.controlled` fitted to this model
    alone)."""
    rate = win_rate(judged)
    held = controlled(question_rows(judged, styles, arena=False), ("length",), resamples, seed).scores[
        rate.model
    ]
    return rate.model_copy(update={"length_controlled": held.value, "lc_low": held.low, "lc_high": held.high})


def report_metrics(report: EvalReport) -> dict[str, float]:
    """Returns a judge's `win_rate/<model>`, `right/<model>`, ...; `judge_agreement` is the mean over the
    other judges.

    Rates against a parent are `win_rate_vs_parent/<model>`, `ci_low_vs_parent/<model>`, ...
    """
    metrics: dict[str, float] = {}
    for rate, suffix in [(rate, "") for rate in report.win_rates] + [
        (rate, "_vs_parent") for rate in report.against_parent
    ]:
        names = ("win_rate", "ci_low", "ci_high", "length_controlled", "swap_consistency")
        values = {name: getattr(rate, name) for name in names} | {"failed_games": float(rate.num_failed)}
        metrics |= {
            f"{name}{suffix}/{rate.model}": value for name, value in values.items() if value is not None
        }
    for name, shares in (
        ("right", report.right),
        ("length", report.mean_tokens),
        ("truncated", report.truncated),
    ):
        metrics |= {f"{name}/{model}": value for model, value in shares.items()}
    metrics |= {f"judge_agreement/{judge}": share for judge, share in report.agreement.items()}
    if report.agreement:
        metrics["judge_agreement"] = fmean(report.agreement.values())
    return metrics


def judging_metrics(report: EvalReport) -> dict[str, float]:
    """Returns tokens, cost and failures of one judge as metrics; {} for an offline judge."""
    use = report.judging
    if use is None or not use.input_tokens:
        return {}
    values = {
        "input_tokens": use.input_tokens,
        "output_tokens": use.output_tokens,
        "failed_games": use.failed,
        "cost": use.cost,
    }
    return {
        f"judge_{name}/{report.judge}": float(value) for name, value in values.items() if value is not None
    }
