"""Renders recorded answers as HTML, with facts about each and its tokens by turn. The surrounding page
switches between the two colourings without a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup

from evaluation.report.rollouts.answer_rows import RecordedAnswer
from evaluation.report.rollouts.token_turns import GAPS, LEVELS, Turn, gaps_of, signed, turns_of
from evaluation.report.template import fill, number

TEMPLATES = Path(__file__).parents[1] / "templates"
PARTS = {
    "sum": "weighted sum",
    "clipped": "after clipping",
    "overlong": "length penalty",
    "truncated": "truncation penalty",
    "shaped": "used for the advantage",
}


class AnswerView(NamedTuple):
    """An answer on the page: facts about it as (name, text), and its turns. If its tokens are not recorded,
    there are no turns, and the page shows its messages instead."""

    answer: RecordedAnswer
    facts: list[tuple[str, str]]
    turns: list[Turn]


def answers_html(answers: Sequence[RecordedAnswer], most: float) -> Markup:
    """Returns answers as HTML, one below the other. `most`: the largest absolute advantage."""
    views = [view_of(answer, most) for answer in answers]
    return Markup(fill("answers.html.j2", views=views))


def legend_html() -> Markup:
    """Returns the style of tokens, the switch between colourings, and the legend of the colours."""
    levels = range(1, LEVELS + 1)
    return Markup(fill("token_legend.html.j2", style=style_of_tokens(), gaps=GAPS, levels=levels))


def style_of_tokens() -> Markup:
    return Markup((TEMPLATES / "tokens.css").read_text(encoding="utf-8"))


def view_of(answer: RecordedAnswer, most: float) -> AnswerView:
    return AnswerView(answer, facts_of(answer), turns_of(answer, most) if answer.tokens else [])


def facts_of(answer: RecordedAnswer) -> list[tuple[str, str]]:
    """Returns the facts about an answer as (name, text)."""
    sources = ", ".join(f"{source} {number(value)}" for source, value in answer.rewards.items())
    facts = [("reward", sources or "–")]
    if answer.reward:
        facts.append(("reward parts", parts_text(answer)))
    if "kl" in answer.reward:
        coef = answer.reward.get("kl_coef")
        how = f", times {number(coef)} in the reward" if coef else ", not in the reward"
        facts.append(("KL to the reference", f"{number(answer.reward['kl'])} nats in total{how}"))
    facts.append(("ended", ended_text(answer)))
    if answer.tokens:
        facts.append(("length", length_text(answer)))
    if answer.prompt_cut:
        facts.append(("prompt", "cut to prompt_max_len"))
    if answer.ages is not None:
        facts.append(("age of the weights", age_text(*answer.ages)))
    if answer.trained is not None:
        facts.append(("trained on", "yes" if answer.trained else "no: no reward, no comparison, or masked"))
    if answer.tools:
        counted = {name: answer.tools.count(name) for name in dict.fromkeys(answer.tools)}
        facts.append(("tools called", ", ".join(f"{name} {times}" for name, times in counted.items())))
    return facts + token_facts(answer)


def parts_text(answer: RecordedAnswer) -> str:
    """Returns the steps from the sum of the reward sources to the advantage as text, without steps that
    change nothing."""
    known = {name: value for name, value in answer.reward.items() if name not in ("kl", "kl_coef")}
    parts = dict(known)
    for name in ("clipped", "shaped"):
        if name in parts and parts[name] == known.get("sum"):
            del parts[name]
    return ", ".join(f"{PARTS.get(name, name)} {number(value)}" for name, value in parts.items())


def ended_text(answer: RecordedAnswer) -> str:
    """Returns why an answer or episode ended."""
    if answer.failure:
        return f"failed: {answer.failure}"
    if answer.ended_by is not None:
        return f"cut by the limit of {answer.ended_by}"
    return "complete" if answer.finished else "cut by a limit"


def length_text(answer: RecordedAnswer) -> str:
    """Returns how many tokens were sampled and how many of them are not recorded."""
    tokens = answer.tokens
    assert tokens is not None, "its tokens are recorded"
    told = f"{tokens.sampled:,} tokens sampled of {tokens.total:,}"
    turns = len(tokens.answers) // 2
    if turns > 1:
        told += f", in {turns} turns"
    left = tokens.total - len(tokens.ids)
    return f"{told}; the last {left:,} are not recorded" if left else told


def age_text(least: int, most: int) -> str:
    """Returns how many updates old the weights that sampled an answer were."""
    span = f"{least}" if least == most else f"{least} to {most}"
    return f"{span} update{'' if span == '1' else 's'} behind"


def token_facts(answer: RecordedAnswer) -> list[tuple[str, str]]:
    """Returns facts, (name, text), about the advantages and gaps of the sampled tokens."""
    tokens = answer.tokens
    if tokens is None:
        return []
    facts = []
    advantages = [value for value in tokens.advantages if value is not None]
    if advantages:
        low, high = min(advantages), max(advantages)
        span = (
            signed(low)
            if low == high
            else f"{signed(low)} to {signed(high)}, mean {signed(fmean(advantages))}"
        )
        facts.append(("advantage", span))
    gaps = [abs(gap) for gap in gaps_of(tokens) if gap is not None]
    if gaps:
        facts.append(
            ("gap, trainer − engine", f"mean |gap| {number(fmean(gaps))}, largest {number(max(gaps))} nats")
        )
    if tokens.left_out:
        facts.append(("left out of the loss", f"{len(tokens.left_out)} tokens"))
    return facts
