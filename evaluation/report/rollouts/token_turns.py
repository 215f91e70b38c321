"""Splits the tokens of a recorded answer into turns, and describes each token: its text, the CSS classes of
its colours, and its numbers as text.

Colours have four levels for positive values and four for negative values. Levels of advantages are quarters
of the range; levels of gaps have fixed thresholds, so that they mean the same on all pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp
from typing import NamedTuple

from evaluation.report.rollouts.answer_rows import AnswerTokens, RecordedAnswer
from rlhf_core.system.redaction import plain

GAPS = (0.01, 0.03, 0.1, 0.3)  # thresholds of the levels of a gap, in nats
LEVELS = 4


class TokenView(NamedTuple):
    """A token on the page: its text, its CSS classes, and its numbers as a tooltip."""

    text: str
    style: str
    title: str


class Turn(NamedTuple):
    """Consecutive tokens of one author. `kind`: prompt, sampled, or given (by a tool or an environment)."""

    kind: str
    label: str
    tokens: list[TokenView]


def gaps_of(tokens: AnswerTokens) -> list[float | None]:
    """Returns the trainer's log-prob minus the engine's for each sampled token, in nats; None where either is
    unknown. The list is empty if the trainer's log-probs are not recorded."""
    if not tokens.trainer:
        return []
    pairs = zip(tokens.trainer, tokens.engine, strict=True)
    return [None if own is None or of_engine is None else own - of_engine for own, of_engine in pairs]


def advantage_range(answers: Iterable[RecordedAnswer]) -> float:
    """Returns the largest absolute advantage; 0 if there is none."""
    known = (
        abs(value) for one in answers if one.tokens for value in one.tokens.advantages if value is not None
    )
    return max(known, default=0.0)


def advantage_level(value: float | None, most: float) -> str:
    """Returns the class of an advantage's colour: its sign, n or p, and its quarter of the range, 1 to 4; ""
    if it is 0 or unknown."""
    if not value or not most:
        return ""
    level = min(LEVELS, int(abs(value) / most * LEVELS) + 1)
    return f"a{'n' if value < 0 else 'p'}{level}"


def gap_level(gap: float | None) -> str:
    """Returns the class of a gap's colour, "" below the first threshold."""
    level = 0 if gap is None else bisect_right(GAPS, abs(gap))
    return f"g{'n' if gap is not None and gap < 0 else 'p'}{level}" if level else ""


def turns_of(answer: RecordedAnswer, most: float) -> list[Turn]:
    """Returns the turns of an answer whose tokens are recorded. Advantages range from -`most` to `most`."""
    tokens = answer.tokens
    assert tokens is not None, "its tokens are recorded"
    borders = sorted({0, *tokens.answers, *tokens.starts, len(tokens.ids)})
    sampled_at = dict(zip(tokens.answers[::2], tokens.answers[1::2], strict=True))
    gaps = gaps_of(tokens)
    turns: list[Turn] = []
    inside = 0  # end of the current sampled tokens
    number = 0
    place = 0  # index among the sampled tokens
    for start, end in pairwise(borders):
        if start in sampled_at:
            inside = sampled_at[start]
            number += 1
        if start < inside:
            views = [sampled_token(tokens, gaps, at, place + at - start, most) for at in range(start, end)]
            place += end - start
            turns.append(Turn("sampled", sampled_label(answer, number), views))
        else:
            views = [TokenView(*text_of(tokens, at), f"token {tokens.ids[at]}") for at in range(start, end)]
            turns.append(Turn(*given_label(answer, start, number), views))
    return turns


def sampled_label(answer: RecordedAnswer, number: int) -> str:
    """Returns the heading of the `number`-th sampled turn."""
    used = {None: "", True: ", trained on", False: ", not trained on"}[answer.trained]
    assert answer.tokens is not None
    which = f" {number}" if len(answer.tokens.answers) > 2 else ""
    return f"sampled{which}{used}"


def given_label(answer: RecordedAnswer, start: int, number: int) -> tuple[str, str]:
    """Returns the kind and heading of a turn that was not sampled. It starts at token `start`, after `number`
    sampled turns."""
    assert answer.tokens is not None
    if start in answer.tokens.starts:
        return "prompt", "start of another conversation, not trained on"
    if not number:
        return "prompt", "prompt, not trained on"
    plain_talk = not answer.tokens.starts and number <= len(answer.roles)
    roles = answer.roles[number - 1] if plain_talk else []
    names = ", ".join(dict.fromkeys(roles)) or "environment"
    return "given", f"{names}, not trained on"


def sampled_token(
    tokens: AnswerTokens, gaps: Sequence[float | None], at: int, place: int, most: float
) -> TokenView:
    """Returns the view of the token at index `at`, which is the `place`-th sampled token."""
    advantage = tokens.advantages[place] if tokens.advantages else None
    gap = gaps[place] if gaps else None
    text, style = text_of(tokens, at)
    classes = [style, advantage_level(advantage, most), gap_level(gap)]
    told = [f"advantage {signed(advantage)}"]
    if gap is not None:
        told.append(f"gap {signed(gap)}")
    for name in ("engine", "trainer", "reference"):
        values = getattr(tokens, name)
        value = values[place] if values else None
        if value is not None:
            told.append(f"{name} {signed(value)} (p {exp(min(value, 0.0)):.3g})")
    if place in tokens.left_out:
        classes.append("out")
        told.append("left out of the loss")
    return TokenView(text, " ".join(filter(None, classes)), ", ".join([*told, f"token {tokens.ids[at]}"]))


def text_of(tokens: AnswerTokens, at: int) -> tuple[str, str]:
    """Returns the visible text of a token and its class: `special`; `part` if a later token completes its
    character. Line ends and tabs are made visible."""
    if at in tokens.special:
        return plain(tokens.texts[at]) or "◇", "special"
    if not tokens.texts[at]:
        return "·", "part"
    return plain(tokens.texts[at].replace("\n", "↵\n").replace("\t", "⇥")), ""


def signed(value: float | None) -> str:
    """Formats a number with its sign and three digits; "unknown" for None."""
    if value is None:
        return "unknown"
    return f"{value:+.3g}" if value else "0"
