"""What the page says first: the verdict in a sentence, and the numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.summary import Evaluated, Evidence, trend
from evaluation.words import interval, number, percent
from rlhf_core.gates import holding


class Tile(NamedTuple):
    title: str
    value: str
    note: str


def verdict(evaluated: Evaluated | None, stages: Sequence[Evidence]) -> str:
    """One sentence: is the final model better, and how sure is that."""
    if evaluated is None:
        stopped = [stage.view.name for stage in stages if stage.view.status == "failed"]
        if stopped:
            return f"The run stopped at {', '.join(stopped)}: there is no evaluation."
        held = [stage.view.name for stage in stages if holding(stage.view.gates)]
        if held:
            return f"The run stopped after {', '.join(held)}, which did not pass a gate: there is no evaluation."
        return "This run has no evaluation (yet)."
    rate = evaluated.decided[evaluated.final]
    edge = any(round(100 * bound) == 50 for bound in (rate.ci_low, rate.ci_high))
    digits = 1 if edge else 0  # an interval that ends near one half is told exactly
    won = percent(rate.win_rate, digits)
    evidence = f"(95 % interval {interval(rate, digits)}, {rate.num_questions} questions, judge: {rate.judge})"
    final, baseline = f"The final model ({rate.model})", _title(rate.baseline)
    if rate.ci_low > 0.5:
        return f"{final} beats {baseline} in {won} of battles {evidence}."
    if rate.ci_high < 0.5:
        return f"{final} is worse than {baseline}: it wins only {won} of battles {evidence}."
    return f"{final} is not clearly better or worse than {baseline}: it wins {won} of battles {evidence}."


def tiles(stages: Sequence[Evidence], evaluated: Evaluated | None) -> list[Tile]:
    """Of the evaluation, of PPO's reward, and of the reward models."""
    found = []
    if evaluated:
        rate, right = evaluated.decided[evaluated.final], evaluated.report.right
        found.append(Tile("Battles won", percent(rate.win_rate), f"{interval(rate)} against {_title(rate.baseline)}"))
        if {rate.baseline, rate.model} <= right.keys():
            value = f"{percent(right[rate.baseline])} → {percent(right[rate.model])}"
            found.append(Tile("Right answers", value, f"{_title(rate.baseline)} → {rate.model}"))
    for stage in stages:
        name = "" if stage.view.name == stage.view.kind else f" ({stage.view.name})"
        rise = trend(stage.curves.get("reward/mean", []))
        if stage.view.kind == "ppo" and rise:
            note = "first → last fifth of the run"
            found.append(Tile(f"PPO reward{name}", f"{number(rise.first)} → {number(rise.last)}", _errors(note, rise.errors)))
        accuracy = stage.result.metrics.get("eval/accuracy") if stage.result else None
        if stage.view.kind == "reward_model" and accuracy is not None:
            found.append(Tile(f"Reward model{name}", percent(accuracy), "held-out pairs ranked right"))
    return found


def _title(model: str) -> str:
    return "SFT" if model == "sft" else model


def _errors(note: str, errors: float | None) -> str:
    return note if errors is None else f"{note}, {errors:+.1f} standard errors"
