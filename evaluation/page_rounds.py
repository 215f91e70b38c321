"""The rounds of loops, as the page shows them: chains of stages, and their win rates over the rounds."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from evaluation.model_charts import rounds_chart
from evaluation.summary import Evaluated, Evidence


def rounds(stages: Sequence[Evidence]) -> list[list[Evidence]]:
    """Chains of stages that train on what a preferences stage sampled, each round on the one before."""
    kinds = {stage.view.name: stage.view.kind for stage in stages}
    chains: list[list[Evidence]] = []
    for stage in stages:
        if stage.view.kind not in ("dpo", "kto", "sft") or "preferences" not in (kinds.get(parent) for parent in stage.view.parents):
            continue
        before = next((chain for chain in chains if chain[-1].view.name in stage.view.parents), None)
        if before is None:
            chains.append([stage])
        else:
            before.append(stage)
    return chains


def rounds_svg(chains: Sequence[Sequence[Evidence]], evaluated: Evaluated | None, stages: Sequence[Evidence]) -> Markup | None:
    """The chart of win rates over the rounds; None without an evaluation of two of them."""
    if evaluated is None:
        return None
    rates = {evaluated.stage.stage_of(model, stages): rate for model, rate in evaluated.decided.items()}  # by stage, not by alias
    baseline = evaluated.stage.stage_of(evaluated.report.baseline, stages)
    lines = []
    for chain in chains:
        points = []
        for stage in [*(s for s in stages if s.view.name in chain[0].view.parents and s.view.kind != "preferences"), *chain]:
            rate = rates.get(stage.view.name)
            if rate:
                points.append((rate.model, rate.win_rate, rate.ci_low, rate.ci_high))
            elif stage.view.name == baseline:
                points.append((evaluated.report.baseline, 0.5, 0.5, 0.5))
        if len(points) > 1:
            lines.append(points)
    kinds = sorted({chain[0].view.kind.upper() for chain in chains})
    return Markup(rounds_chart(lines, " and ".join(kinds))) if lines else None
