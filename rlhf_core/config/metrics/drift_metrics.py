"""Metrics of drift: each signal with its 95 % interval, its change from the previous result and, if it is
tested, its p-value."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric

WITH_KL = Condition("with `kl`", lambda config: config.kl)
WITH_ANCHORS = Condition("with `anchors`", lambda config: config.anchors is not None)
OTHER_PROMPTS = (
    "Users' prompts differ from those that were trained on: read new prompts, and add such prompts to"
    " training and evaluation."
)
OTHER_LENGTH = (
    "Answers differ in length from the reference's: a reward model or judge that likes length is the usual"
    " cause."
)
OTHER_REFUSALS = (
    "The model does not refuse the same share of the questions as the reference: look at its refusals, and at"
    " the last rounds' pairs."
)
JUDGED_LONG_AGO = "The anchors were not judged again for a long time: lower anchors.days."
JUDGE_CHANGED = (
    "The judge's verdicts on the same answers have changed: its model or prompt is no longer the same, so win"
    " rates of different weeks cannot be compared. Calibrate it again."
)


def signal(
    name: str,
    meaning: str,
    failed: str,
    unit: str = "",
    test: str = "",
    when: Condition | None = None,
) -> tuple[Metric, ...]:
    """Returns the metrics of a signal. `test`: what its p-value is of; without one there is none."""
    tested = (Metric(f"{name}_p", f"p-value: {test}", "", when, failed=failed),) if test else ()
    return (
        Metric(name, meaning, unit, when, failed=failed),
        Metric(f"{name}_low {name}_high", "its 95 % interval", unit, when, failed=failed),
        Metric(
            f"{name}/change",
            "its change from the previous result, if there is one",
            unit,
            when,
            failed=failed,
        ),
        *tested,
    )


DRIFT = (
    *signal(
        "prompts/divergence",
        "Jensen-Shannon divergence of the words of present and past prompts, without its bias",
        OTHER_PROMPTS,
        "bits",
        "permutation test",
    ),
    *signal(
        "prompts/length",
        "mean prompt length in characters, present / past",
        OTHER_PROMPTS,
        "ratio",
        "Kolmogorov-Smirnov test",
    ),
    *signal("answers/length", "mean answer length in characters, model / reference", OTHER_LENGTH, "ratio"),
    *signal(
        "refusals/model",
        "share of the model's answers that begin with an English refusal (patterns)",
        OTHER_REFUSALS,
        "share",
    ),
    *signal("refusals/reference", "the same of the reference", OTHER_REFUSALS, "share"),
    *signal(
        "refusals/rise",
        "the model's share minus the reference's",
        OTHER_REFUSALS,
        "difference",
        "McNemar's exact test",
    ),
    *signal(
        "judge/reward_correlation",
        "with a reward model as second judge: Spearman's correlation, over questions, of the judge's score"
        " with the reward model's difference",
        "The judge and the reward model disagree: the rounds may exploit the reward model; train it anew.",
    ),
    *signal(
        "kl",
        "estimate of the KL of the model from the reference, may be negative",
        "The model is far from the reference: distrust its reward, and look at its answers.",
        "nats/answer",
        when=WITH_KL,
    ),
    *signal(
        "anchors/changed",
        "share of the anchors with another winner than in the past",
        JUDGE_CHANGED,
        "share",
        when=WITH_ANCHORS,
    ),
    *signal(
        "anchors/shift",
        "change of the win rate of their answer B",
        JUDGE_CHANGED,
        "difference",
        "exact sign test",
        WITH_ANCHORS,
    ),
    Metric(
        "anchors/age_days", "days since the anchors were judged", "days", WITH_ANCHORS, failed=JUDGED_LONG_AGO
    ),
)
