"""Converts rows of published chat and preference formats to the standard columns, with one function per
format. Torch-free.

`columns` is a table whose columns are named in the recipe. The other formats are UltraFeedback (raw, with
`completions`, and binarized, with `score_chosen`), LMSYS arena battles, Anthropic's HH dialogues and
ShareGPT's `conversations`. A row that prefers no answer (a tie, one completion, equal scores) has the reason
in `no_preference`; stages that need a preference drop and count it. Every converter accepts the row's place
and the row, and raises ValueError if a column has the wrong type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlhf_core.data.documents import Message
from rlhf_core.data.rows.columns import OTHER_NAMES, number_of, text_of

Row = Mapping[str, Any]
SHAREGPT_ROLES = {name: name for name in ("system", "user", "assistant")} | OTHER_NAMES
TURN = re.compile(r"\n\n(Human|Assistant):")
TIES = ("tie", "tie (bothbad)", "tie (both bad)", "bothbad")


class Standard(NamedTuple):
    """Holds standard columns to add to a row. `no_preference` is the reason why no answer of the row is
    preferred, or ''."""

    columns: dict[str, Any]
    no_preference: str = ""


def recognise(row: Row) -> str:
    """Returns the format of a data set, judging by its first row: `columns`, unless the row clearly has
    another format."""
    if {"conversation_a", "conversation_b", "winner"} <= row.keys():
        return "arena"
    if {"instruction", "completions"} <= row.keys() or {
        "chosen",
        "rejected",
        "score_chosen",
        "score_rejected",
    } <= row.keys():
        return "ultrafeedback"
    turns = row.get("conversations")
    if (
        isinstance(turns, list)
        and turns
        and isinstance(turns[0], dict)
        and {"from", "value"} <= turns[0].keys()
    ):
        return "sharegpt"
    answers = [row.get("chosen"), row.get("rejected")]
    if "prompt" not in row and all(isinstance(text, str) and TURN.match(text) for text in answers):
        return "hh"
    return "columns"


def ultrafeedback(where: str, row: Row) -> Standard:
    """Converts a row of UltraFeedback (Cui et al. 2023).

    In a raw row, chosen and rejected are the best and the worst completion. Completions are compared by
    `overall_score`, otherwise by the mean of the ratings in `annotations`, otherwise by `fine-grained_score`.
    A binarized row stays unchanged. `margin` is the difference of the two scores.
    """
    if "completions" not in row:
        scores = [number_of(row.get(name), where, name) for name in ("score_chosen", "score_rejected")]
        return Standard({"margin": scores[0] - scores[1]}, "" if scores[0] != scores[1] else "equal scores")
    prompt = [{"role": "user", "content": text_of(row.get("instruction"), where, "instruction")}]
    completions = _list(row["completions"], where, "completions")
    scored = [
        (_score(completion, where), text_of(completion.get("response"), where, "response"))
        for completion in completions
    ]
    if len(scored) < 2:
        return Standard(_preference(prompt, None, None), "a single completion")
    best = max(scored, key=lambda pair: pair[0])
    worst = min(scored, key=lambda pair: pair[0])
    if best[0] == worst[0]:
        return Standard(_preference(prompt, None, None), "equal scores")
    return Standard(_preference(prompt, best[1], worst[1], best[0] - worst[0]))


def arena(where: str, row: Row) -> Standard:
    """Converts a battle from LMSYS's arena (Zheng et al. 2023): two conversations with the same questions,
    and the name of the winner.

    The pair consists of the two last answers. The conversations must be equal before these answers, which is
    rare for battles with several turns.
    """
    first, second = (_chat(row.get(name), where, name) for name in ("conversation_a", "conversation_b"))
    winner = str(row.get("winner"))
    if winner not in ("model_a", "model_b", *TIES):
        raise ValueError(
            f"{where}: column 'winner' must be model_a, model_b or tie, found {row.get('winner')!r}: correct"
            " or drop the row"
        )
    prompt = first[:-1]
    if winner in TIES:
        return Standard(_preference(prompt, None, None), "a tie")
    if prompt != second[:-1]:
        return Standard(_preference(prompt, None, None), "conversations that differ before the last answer")
    chosen, rejected = (first, second) if winner == "model_a" else (second, first)
    return Standard(_preference(prompt, chosen[-1]["content"], rejected[-1]["content"]))


def hh(where: str, row: Row) -> Standard:
    """Converts Anthropic's helpful and harmless dialogues (Bai et al. 2022), strings of "\\n\\nHuman: ..."
    and "\\n\\nAssistant: ..."."""
    chosen, rejected = (_dialogue(row.get(name), where, name) for name in ("chosen", "rejected"))
    answered = chosen[-1]["role"] == rejected[-1]["role"] == "assistant"
    prompt = chosen[:-1] if chosen[-1]["role"] == "assistant" else chosen
    if not answered or not prompt:
        return Standard(_preference(prompt, None, None), "no answer at the end of the dialogue")
    if prompt != rejected[:-1]:
        return Standard(_preference(prompt, None, None), "conversations that differ before the last answer")
    return Standard(_preference(prompt, chosen[-1]["content"], rejected[-1]["content"]))


def sharegpt(where: str, row: Row) -> Standard:
    """Converts `conversations` of {from, value}. The prompt consists of all turns before the last answer."""
    messages = []
    for number, turn in enumerate(_list(row.get("conversations"), where, "conversations"), start=1):
        role = SHAREGPT_ROLES.get(str(turn.get("from")).lower())
        if role is None:
            raise ValueError(
                f"{where}: turn {number} of 'conversations' is from {turn.get('from')!r}, known are"
                f" {', '.join(SHAREGPT_ROLES)}: rename or drop it"
            )
        messages.append(
            {"role": role, "content": text_of(turn.get("value"), where, f"conversations' turn {number}")}
        )
    return Standard(
        {"messages": messages, "prompt": messages[:-1] if messages[-1]["role"] == "assistant" else messages}
    )


FORMATS: dict[str, Callable[[str, Row], Standard]] = {
    "ultrafeedback": ultrafeedback,
    "arena": arena,
    "hh": hh,
    "sharegpt": sharegpt,
}


def _preference(
    prompt: list[Message], chosen: str | None, rejected: str | None, margin: float | None = None
) -> dict[str, Any]:
    messages = None if chosen is None else [*prompt, {"role": "assistant", "content": chosen}]
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "margin": margin,
        "messages": messages,
        "response": chosen,
    }


def _score(completion: Mapping[str, Any], where: str) -> float:
    """Returns a completion's score. UltraFeedback's ratings are strings, some of them "N/A"."""
    if completion.get("overall_score") is not None:
        return number_of(completion["overall_score"], where, "overall_score")
    aspects = completion.get("annotations")
    ratings = (
        [aspect.get("Rating") for aspect in aspects.values() if isinstance(aspect, dict)]
        if isinstance(aspects, dict)
        else []
    )
    given = [number_of(rating, where, "Rating") for rating in ratings if rating not in (None, "N/A")]
    if given:
        return sum(given) / len(given)
    return number_of(completion.get("fine-grained_score"), where, "fine-grained_score")


def _dialogue(value: Any, where: str, column: str) -> list[Message]:
    text = text_of(value, where, column)
    first, *parts = TURN.split(text)
    if first.strip() or not parts:
        raise ValueError(
            f'{where}: column {column!r} must begin with "\\n\\nHuman:": correct the row, or set format to'
            " columns"
        )
    roles = parts[::2]
    contents = parts[1::2]
    return [
        {"role": SHAREGPT_ROLES[role.lower()], "content": content.strip()}
        for role, content in zip(roles, contents, strict=True)
    ]


def _chat(value: Any, where: str, column: str) -> list[Message]:
    messages = [
        {
            "role": text_of(turn.get("role"), where, f"{column}'s role"),
            "content": text_of(turn.get("content"), where, f"{column}'s content"),
        }
        for turn in _list(value, where, column)
    ]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{where}: column {column!r} must be a conversation that ends with an assistant message: correct"
            " or drop the row"
        )
    return messages


def _list(value: Any, where: str, column: str) -> list[Mapping[str, Any]]:
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(item, Mapping) for item in value)
    ):
        raise ValueError(
            f"{where}: column {column!r} must be a list of objects with at least one: correct or drop the row"
        )
    return list(value)
