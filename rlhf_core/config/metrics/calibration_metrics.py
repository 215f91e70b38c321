"""Metrics of a judge's calibration against people."""

from __future__ import annotations

from rlhf_core.config.judging.judges import ChatJudge
from rlhf_core.config.metrics.metric import Condition, Metric

BY_CHAT = Condition("of a chat judge", lambda config: isinstance(config.judge, ChatJudge))
AGREES_NOT = (
    "The judge and people name different winners too often: compare it with human_agreement, and try another"
    " judge or prompt."
)
LIKES_LENGTH = (
    "The judge prefers long answers more than people do: read length_controlled/MODEL, or take another judge."
)
LIKES_MARKDOWN = (
    "The judge prefers headers, lists and bold text more than people do: distrust wins of models that use"
    " them."
)
UNCLEAR = (
    "People do not agree with each other or with themselves: make the labelling instructions clearer before"
    " you blame a judge."
)


def estimated(name: str, meaning: str, failed: str, unit: str = "share") -> tuple[Metric, ...]:
    """Returns a measure and the ends of its 95 % interval."""
    return (
        Metric(name, meaning, unit, failed=failed),
        Metric(f"{name}/ci_low {name}/ci_high", "its 95 % interval", unit, failed=failed),
    )


CALIBRATION = (
    *estimated(
        "agreement",
        "share of pairs with the same winner as people; a tie by only one side is a disagreement",
        AGREES_NOT,
    ),
    *estimated("agreement_decided", "the same over pairs that neither side calls a tie", AGREES_NOT),
    *estimated(
        "kappa",
        "Cohen's kappa over A, tie, B",
        "The judge agrees with people little more than by chance: do not let it decide. Few labels make the"
        " interval wide.",
        "",
    ),
    *estimated(
        "position_bias",
        "share of games won by the answer shown first minus that shown second; 0: none",
        "The judge favours a position: each pair is judged in both orders, but such verdicts become ties; try"
        " another judge.",
        "difference",
    ),
    *estimated(
        "swap_consistency",
        "share of pairs whose two games name the same winner, or both a tie",
        "The judge changes its mind with the order of the answers: it is unsure or weak.",
    ),
    *estimated(
        "length_bias",
        "how much more often than people the judge prefers the longer answer",
        LIKES_LENGTH,
        "difference",
    ),
    *estimated(
        "length_error_gap",
        "share of the pairs where people prefer the shorter answer and the judge the longer, minus the"
        " reverse; each"
        " over the pairs in which people made that choice",
        LIKES_LENGTH,
        "difference",
    ),
    *estimated(
        "markdown_bias",
        "how much more often than people the judge prefers the answer with more headers, lists and bold text"
        " for its length",
        LIKES_MARKDOWN,
        "difference",
    ),
    *estimated("markdown_error_gap", "the same for such answers", LIKES_MARKDOWN, "difference"),
    *estimated(
        "human_agreement",
        "share of pairs of annotators who name the same winner, mean over pairs of answers with several",
        UNCLEAR,
    ),
    *estimated("human_kappa", "Fleiss' kappa of pairs with several annotators", UNCLEAR, ""),
    *estimated("human_repeat", "share of repeated labels that name the same winner", UNCLEAR),
    Metric("pairs", "labelled pairs", "count", failed="There are too few labelled pairs: label more."),
    Metric("uids labels annotators", "distinct questions; labels, with repeated ones; annotators", "count"),
    Metric(
        "failed_games",
        "games without a verdict",
        "count",
        failed="The judge gave no verdict in too many games: look at its answers and limits.",
    ),
    Metric(
        "unjudged",
        "pairs without a verdict",
        "count",
        failed="The judge gave no verdict on too many pairs: look at its answers and limits.",
    ),
    Metric(
        "judge_input_tokens judge_output_tokens", "tokens that the judge read and wrote", "tokens", BY_CHAT
    ),
    Metric("judge_cost", "its cost, where its prices are given", "US$", BY_CHAT),
)
