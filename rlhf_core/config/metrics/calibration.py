"""Metrics of a judge's calibration against people."""

from __future__ import annotations

from rlhf_core.config.judging.judges import ChatJudge
from rlhf_core.config.metrics.metric import Condition, Metric

BY_CHAT = Condition("of a chat judge", lambda config: isinstance(config.judge, ChatJudge))
AGREES_NOT = (
    "The judge names another winner than people too often: compare it with human_agreement, and try another"
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
    ),
    *estimated(
        "swap_consistency",
        "share of pairs whose two games name the same winner",
        "The judge changes its mind with the order of the answers: it is unsure or weak.",
    ),
    *estimated(
        "length_bias", "how much more often than people the judge prefers the longer answer", LIKES_LENGTH
    ),
    *estimated(
        "length_error_gap",
        "share of errors towards the longer answer where people prefer the other, minus the share of errors"
        " the other way",
        LIKES_LENGTH,
    ),
    *estimated(
        "markdown_bias",
        "how much more often than people the judge prefers the answer with more headers, lists and bold text"
        " for its length",
        LIKES_MARKDOWN,
    ),
    *estimated("markdown_error_gap", "of such answers: as `length_error_gap`", LIKES_MARKDOWN),
    *estimated("human_agreement", "share of two annotators of a pair who name the same winner", UNCLEAR),
    *estimated("human_kappa", "Fleiss' kappa of pairs with several annotators", UNCLEAR, ""),
    *estimated("human_repeat", "share of repeated labels that name the same winner", UNCLEAR),
    Metric("pairs", "labelled pairs", "count", failed="There are too few labelled pairs: label more."),
    Metric("uids labels annotators", "their questions; labels that count; people", "count"),
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
    Metric("judge_cost", "its cost, where its prices are given", "", BY_CHAT),
)
