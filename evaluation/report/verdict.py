"""Writes the top of the report: the verdict in a sentence, the main numbers, and the answers to "is my SFT,
reward model or PPO bad?"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.report.summary import Evaluated, Evidence, trend
from evaluation.report.template import interval, number, percent
from rlhf_core.config import KINDS
from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.gate_checks import holding


class Tile(NamedTuple):
    """A headline number on the page."""

    title: str
    value: str
    note: str


def verdict(evaluated: Evaluated | None, stages: Sequence[Evidence]) -> str:
    """Returns a sentence that says whether the final model is better than the baseline, with the 95 %
    interval, or why there is no evaluation."""
    if evaluated is None:
        stopped = [stage.view.name for stage in stages if stage.view.status == "failed"]
        if stopped:
            return f"The run stopped at {', '.join(stopped)}: there is no evaluation."
        ended = [stage.view.name for stage in stages if stage.view.status == "interrupted"]
        if ended:
            return f"The run was interrupted in {', '.join(ended)}: run it again to continue."
        held = [stage.view.name for stage in stages if holding(stage.view.gates)]
        if held:
            return (
                f"The run stopped after {', '.join(held)}, which did not pass a gate: there is no evaluation."
            )
        return "This run has no evaluation (yet)."
    rate = evaluated.decided[evaluated.final]
    edge = any(round(100 * bound) == 50 for bound in (rate.ci_low, rate.ci_high))
    digits = 1 if edge else 0  # one more digit when an interval ends near one half
    evidence = f"(95 % interval {interval(rate, digits)}, judge: {rate.judge})"
    score = f"it {rate.counted}, a win rate of {percent(rate.win_rate, digits)} with ties as half {evidence}"
    final = f"The final model ({rate.model})"
    baseline = _title(rate.baseline)
    if rate.ci_low > 0.5:
        return f"{final} is better than {baseline}: {score}."
    if rate.ci_high < 0.5:
        return f"{final} is worse than {baseline}: {score}."
    return f"{final} is not clearly better or worse than {baseline}: {score}."


def tiles(stages: Sequence[Evidence], evaluated: Evaluated | None) -> list[Tile]:
    """Returns the main numbers of the evaluation, of the reward during training, and of the reward models."""
    found = []
    if evaluated:
        rate = evaluated.decided[evaluated.final]
        right = evaluated.report.right
        note = f"{interval(rate)} against {_title(rate.baseline)}: {rate.counted}"
        found.append(Tile("Win rate, ties as half", percent(rate.win_rate), note))
        if {rate.baseline, rate.model} <= right.keys():
            value = f"{percent(right[rate.baseline])} → {percent(right[rate.model])}"
            found.append(Tile("Right answers", value, f"{_title(rate.baseline)} → {rate.model}"))
    for stage in stages:
        kind = KINDS[stage.view.kind]
        name = "" if stage.view.name == stage.view.kind else f" ({stage.view.name})"
        rise = trend(stage.curves.get("reward/mean", []))
        if rise:
            errors = "" if rise.errors is None else f", {rise.errors:+.1f} standard errors"
            value = f"{number(rise.first)} → {number(rise.last)}"
            found.append(
                Tile(f"{kind.shown_as} reward{name}", value, f"first → last fifth of the run{errors}")
            )
        accuracy = stage.result.metrics.get("eval/accuracy") if stage.result else None
        if kind.makes == "reward" and accuracy is not None:
            found.append(
                Tile(
                    f"{kind.shown_as.capitalize()}{name}",
                    percent(accuracy),
                    "held-out pairs ranked correctly",
                )
            )
    return found


def _title(model: str) -> str:
    return KINDS[model].shown_as if model in KINDS else model


class Suspect(NamedTuple):
    """A question, the stage that it concerns, and the answer. `bad`: None if unknown."""

    question: str
    stage: str
    bad: bool | None
    answer: str


def suspects(stages: Sequence[Evidence]) -> list[Suspect]:
    """Returns a question with its answer for each SFT, reward model and PPO stage, in the recipe's order; an
    empty list when no stage has a gate.

    Rounds of a loop are left out, since they are in the table of gates.
    """
    if not any(stage.view.gates for stage in stages):
        return []
    asked = [
        stage
        for stage in stages
        if KINDS[stage.view.kind].output == "checkpoint" and ".round" not in stage.view.name
    ]
    return [
        Suspect(f"Is my {KINDS[stage.view.kind].shown_as} bad?", stage.view.name, *_answer(stage))
        for stage in asked
    ]


def _answer(stage: Evidence) -> tuple[bool | None, str]:
    gates = stage.view.gates
    if stage.result is None:
        return None, (
            "Unknown: it was not run." if stage.view.status == "not run" else "Unknown: it did not finish."
        )
    if not gates:
        return None, "Unknown: it has no gates."
    failed = [gate for gate in gates if not gate.passed and not gate.waits]
    values = ", ".join(map(_told, failed or gates))
    if failed:
        return True, f"Yes: {values}. {failed[0].meaning}".strip()
    return False, f"No, by its gates: {values}."


def _told(verdict: Verdict) -> str:
    if verdict.gate.approve:
        return verdict.said
    return (
        f"{verdict.gate.metric} {'is missing' if verdict.value is None else f'{verdict.value:.3g}'}"
        f" ({verdict.gate.bound})"
    )
