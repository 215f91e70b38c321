"""Writes the request in which a judge rates one answer."""

from __future__ import annotations

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.data.rows.columns import written
from rlhf_core.judging.fenced_text import FENCES, fenced
from rlhf_core.rewards.reward_contract import Sample

# part of the cache's keys; change it with every change to the reminder or to how ratings are read
PROMPT_VERSION = "alignflow-rating-1"
Messages = tuple[dict[str, str], ...]


def rating_prompt(source: JudgeReward, sample: Sample) -> Messages:
    """Returns the chat messages that ask for a rating. Raises ValueError when the row lacks the reference."""
    parts = [
        "You rate the answer of an AI assistant to the last message of a conversation.",
        task_of(source),
        f"The request holds the texts {', '.join(name for name, _ in texts_of(source, sample))}. {FENCES}",
        "Length alone is neither good nor bad. Give your reasons briefly, then end with the verdict, in this"
        f" form: {form_of(source)}",
    ]
    user = fenced(texts_of(source, sample))
    return ({"role": "system", "content": "\n\n".join(parts)}, {"role": "user", "content": user})


def task_of(source: JudgeReward) -> str:
    """Returns the rubric or the criteria."""
    if source.rubric is not None:
        return f"What to rate:\n{source.rubric}"
    listed = "\n".join(f"- {criterion.name}: {criterion.text}" for criterion in source.criteria)
    return f"Rate each of these by itself:\n{listed}"


def form_of(source: JudgeReward) -> str:
    """Returns the required form of the verdict, including the scale."""
    low, high = source.scale
    number = f"a number from {low:g} (worst) to {high:g} (best)"
    if not source.criteria:
        return f"[[N]], where N is {number}"
    named = ", ".join(f"{criterion.name}: N" for criterion in source.criteria)
    return f"[[{named}]], where each N is {number}"


def reminder(form: str, problem: str) -> dict[str, str]:
    """Returns the message that asks again for a verdict in this form after a reply without one."""
    told = f"{problem[0].upper()}{problem[1:]}."
    return {
        "role": "user",
        "content": f"{told} Finish now with the verdict alone, in this form: {form}",
    }


def texts_of(source: JudgeReward, sample: Sample) -> list[tuple[str, str]]:
    """Returns the texts that the judge reads, with their names. Raises ValueError when the row lacks the
    reference."""
    said = "\n\n".join(f"{message['role']}: {written(message)}" for message in sample.prompt)
    texts = [("conversation", said)]
    if source.reference is not None:
        texts.append(("reference answer", reference_of(source.reference, sample)))
    return [*texts, ("answer", sample.response)]


def reference_of(column: str, sample: Sample) -> str:
    """Returns the reference answer of a row. Raises ValueError when it has none."""
    value = sample.row.get(column)
    if value is None or not str(value).strip():
        raise ValueError(f"a row has no reference answer in the column {column!r}")
    return str(value)
