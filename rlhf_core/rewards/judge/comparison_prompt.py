"""Writes the request in which a judge compares two answers, and reads the judge's verdict by the rules used
in evaluations; see `rlhf_core/judging/judge_reply.py`."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.judging.fenced_text import FENCES, fenced
from rlhf_core.judging.judge_reply import read_verdict
from rlhf_core.judging.marked_reply import MarkedReply
from rlhf_core.records import POINTS
from rlhf_core.rewards.judge.rating_prompt import Messages, texts_of
from rlhf_core.rewards.judge.rating_reply import Rating
from rlhf_core.rewards.reward_contract import Sample

LABELS = (
    "exactly one of these verdicts:\n"
    "[[A>>B]] answer A is much better\n"
    "[[A>B]] answer A is better\n"
    "[[A=B]] they are equally good\n"
    "[[B>A]] answer B is better\n"
    "[[B>>A]] answer B is much better"
)


def comparison_prompt(
    source: JudgeReward, sample: Sample, answers: tuple[str, str]
) -> tuple[Messages, list[str]]:
    """Returns the chat messages that ask which of two answers to a sample's prompt is better, and the texts
    that the messages contain. A reference answer is shown unless it is one of the two answers. Raises
    ValueError when the row lacks the reference."""
    shown = source if source.compare == "group" else source.model_copy(update={"reference": None})
    named = [
        *texts_of(shown, sample)[:-1],
        *zip(("answer A", "answer B"), answers, strict=True),
    ]
    parts = [
        "You compare two answers of AI assistants, A and B, to the last message of a conversation.",
        f"What decides:\n{source.rubric}",
        f"The request holds the texts {', '.join(name for name, _ in named)}. {FENCES}",
        "Neither the order of the answers nor length alone may matter. Give your reasons briefly, then end"
        f" with {LABELS}",
    ]
    messages = (
        {"role": "system", "content": "\n\n".join(parts)},
        {"role": "user", "content": fenced(named)},
    )
    return messages, [text for _, text in named]


def read_comparison(reply: str, texts: Sequence[str], cut: bool = False) -> MarkedReply[Rating]:
    """Returns the points of answer A, 0, 0.5 or 1, from a judge's reply about these texts."""
    label, problem = read_verdict(reply, texts, cut)
    return MarkedReply(None if label is None else (POINTS[label],), problem)
