"""Declares metrics of drift: each signal with its 95 % interval, its change from the previous result and, if
it is tested, its p-value."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric

WITH_KL = Condition("with `kl`", lambda config: config.kl)
WITH_ANCHORS = Condition("with `anchors`", lambda config: config.anchors is not None)
OTHER_PROMPTS = (
    "Users' prompts differ from those used in training: read new prompts, and add similar ones to training"
    " and evaluation."
)
OTHER_LENGTH = (
    "The answers' lengths differ from the reference's: the usual cause is a reward model or judge that"
    " prefers long answers."
)
OTHER_REFUSALS = (
    "The model refuses a different share of the questions than the reference: read its refusals, and the"
    " pairs of the last rounds."
)
JUDGED_LONG_AGO = "The anchors have not been judged again for a long time: lower anchors.days."
JUDGE_CHANGED = (
    "The judge's verdicts on the same answers have changed: its model or prompt differs from before, so win"
    " rates of different weeks cannot be compared. Calibrate the judge again."
)


def signal(
    name: str,
    meaning: str,
    failed: str,
    unit: str = "",
    test: str = "",
    when: Condition | None = None,
) -> tuple[Metric, ...]:
    """Returns the metrics of a signal. `test`: the test that gives its p-value; "": the signal has no
    p-value."""
    tested = (Metric(f"{name}_p", f"p-value: {test}", "", when, failed=failed),) if test else ()
    return (
        Metric(name, meaning, unit, when, failed=failed),
        Metric(
            f"{name}_low {name}_high", "lower and upper end of the 95 % interval", unit, when, failed=failed
        ),
        Metric(
            f"{name}/change",
            "change from the previous result, if there is one",
            unit,
            when,
            failed=failed,
        ),
        *tested,
    )


DRIFT = (
    *signal(
        "prompts/divergence",
        "Jensen-Shannon divergence between the words of current and past prompts, corrected for bias",
        OTHER_PROMPTS,
        "bits",
        "permutation test",
    ),
    *signal(
        "prompts/length",
        "mean prompt length in characters, current / past",
        OTHER_PROMPTS,
        "ratio",
        "Kolmogorov-Smirnov test",
    ),
    *signal("answers/length", "mean answer length in characters, model / reference", OTHER_LENGTH, "ratio"),
    *signal(
        "refusals/model",
        "share of the model's answers that begin with an English refusal (matched by patterns)",
        OTHER_REFUSALS,
        "share",
    ),
    *signal(
        "refusals/reference",
        "share of the reference's answers that begin with an English refusal",
        OTHER_REFUSALS,
        "share",
    ),
    *signal(
        "refusals/rise",
        "the model's share of refusals minus the reference's",
        OTHER_REFUSALS,
        "difference",
        "McNemar's exact test",
    ),
    *signal(
        "judge/reward_correlation",
        "with a reward model as second judge: Spearman's correlation, over questions, between the judge's"
        " score and the difference of the reward model's scores",
        "The judge and the reward model disagree: the rounds may exploit the reward model, so retrain it.",
    ),
    *signal(
        "kl",
        "estimate of the KL of the model to the reference; may be negative",
        "The model is far from the reference: distrust its reward, and read its answers.",
        "nats/answer",
        when=WITH_KL,
    ),
    *signal(
        "anchors/changed",
        "share of the anchors whose winner differs from the past one",
        JUDGE_CHANGED,
        "share",
        when=WITH_ANCHORS,
    ),
    *signal(
        "anchors/shift",
        "change in the win rate of the anchors' answer B",
        JUDGE_CHANGED,
        "difference",
        "exact sign test",
        WITH_ANCHORS,
    ),
    Metric(
        "anchors/age_days",
        "days since the anchors were last judged",
        "days",
        WITH_ANCHORS,
        failed=JUDGED_LONG_AGO,
    ),
)
