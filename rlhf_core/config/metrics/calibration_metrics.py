"""Declares metrics of a judge's calibration against people."""

from __future__ import annotations

from rlhf_core.config.judging.judges import ChatJudge
from rlhf_core.config.metrics.metric import Condition, Metric

BY_CHAT = Condition("for a chat judge", lambda config: isinstance(config.judge, ChatJudge))
AGREES_NOT = (
    "The judge and people choose different winners too often: compare this value with human_agreement, and"
    " try another judge or prompt."
)
LIKES_LENGTH = (
    "The judge prefers long answers more than people do: read length_controlled/MODEL, or use another judge."
)
LIKES_MARKDOWN = (
    "The judge prefers headers, lists and bold text more than people do: distrust wins of models that use"
    " these elements."
)
UNCLEAR = (
    "Annotators do not agree with each other or with themselves: make the labelling instructions clearer"
    " before you blame a judge."
)


def estimated(name: str, meaning: str, failed: str, unit: str = "share") -> tuple[Metric, ...]:
    """Returns the metrics of a measure and of the ends of its 95 % interval."""
    return (
        Metric(name, meaning, unit, failed=failed),
        Metric(
            f"{name}/ci_low {name}/ci_high", "lower and upper end of the 95 % interval", unit, failed=failed
        ),
    )


CALIBRATION = (
    *estimated(
        "agreement",
        "share of pairs on which the judge and people choose the same winner; a tie by only one side is a"
        " disagreement",
        AGREES_NOT,
    ),
    *estimated("agreement_decided", "agreement over the pairs that neither side calls a tie", AGREES_NOT),
    *estimated(
        "kappa",
        "Cohen's kappa over the verdicts A, tie and B",
        "The judge agrees with people hardly more often than chance would: do not let it decide. Few labels"
        " make the interval wide.",
        "",
    ),
    *estimated(
        "position_bias",
        "share of games won by the answer shown first minus share won by the answer shown second; 0: no bias",
        "The judge favours a position. Each pair is judged in both orders, but contradictory verdicts become"
        " ties: try another judge.",
        "difference",
    ),
    *estimated(
        "swap_consistency",
        "share of pairs whose two games have the same winner, or are both ties",
        "The judge's verdicts depend on the order of the answers: it is unsure or weak.",
    ),
    *estimated(
        "length_bias",
        "how much more often the judge prefers the longer answer than people do",
        LIKES_LENGTH,
        "difference",
    ),
    *estimated(
        "length_error_gap",
        "share of pairs in which the judge prefers the longer answer, among those where people prefer the"
        " shorter, minus the share in the reverse case",
        LIKES_LENGTH,
        "difference",
    ),
    *estimated(
        "markdown_bias",
        "how much more often the judge prefers the answer with more headers, lists and bold text for its"
        " length than people do",
        LIKES_MARKDOWN,
        "difference",
    ),
    *estimated(
        "markdown_error_gap",
        "the same difference as length_error_gap, for answers with more headers, lists and bold text",
        LIKES_MARKDOWN,
        "difference",
    ),
    *estimated(
        "human_agreement",
        "share of annotator pairs who choose the same winner, mean over the answer pairs with several"
        " annotators",
        UNCLEAR,
    ),
    *estimated("human_kappa", "Fleiss' kappa over the pairs with several annotators", UNCLEAR, ""),
    *estimated("human_repeat", "share of repeated labels that choose the same winner", UNCLEAR),
    Metric("pairs", "labelled pairs", "count", failed="There are too few labelled pairs: label more pairs."),
    Metric(
        "uids labels annotators", "distinct questions; labels, including repeated ones; annotators", "count"
    ),
    Metric(
        "failed_games",
        "games without a verdict",
        "count",
        failed="The judge gave no verdict in too many games: read its replies, and check its limits.",
    ),
    Metric(
        "unjudged",
        "pairs without a verdict",
        "count",
        failed="The judge gave no verdict on too many pairs: read its replies, and check its limits.",
    ),
    Metric(
        "judge_input_tokens judge_output_tokens", "tokens that the judge read and wrote", "tokens", BY_CHAT
    ),
    Metric("judge_cost", "cost of the judge, where its prices are given", "US$", BY_CHAT),
)
