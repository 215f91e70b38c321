"""Selects example battles for the page: won, lost and tied ones from all categories, with the judge's text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from evaluation.report.summary import Evaluated
from rlhf_core.records import Judgment

MAX_TEXT = 1500  # characters of a prompt or an answer
EXAMPLES = {"won": 5, "lost": 3, "tied": 3}


class Example(NamedTuple):
    """One battle. `before` and `after`: answers of the baseline and the final model. `verdict`: the judge's text of the first game, in
    which A is the baseline; `swapped`: that of the second."""

    uid: str
    category: str
    prompt: str
    before: str
    after: str
    outcome: str
    verdict: str
    swapped: str


class Group(NamedTuple):
    """Battles of one outcome: `played` of `total`, and some of them."""

    outcome: str
    played: int
    total: int
    examples: list[Example]


def examples(evaluated: Evaluated) -> list[Group]:
    """Reads the report's answers and judgments, and returns a group for each outcome; empty when there is no battle to show."""
    answers: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for row in _jsonl(evaluated.folder / "answers"):
        answers[str(row.get("model"))][str(row.get("uid"))] = _conversation(row.get("messages"))
    before, after = answers[evaluated.report.baseline], answers[evaluated.final]
    battles: dict[str, list[Judgment]] = {outcome: [] for outcome in EXAMPLES}
    for row in _jsonl(evaluated.folder / "judgments"):
        try:
            battle = Judgment.model_validate(row)
        except ValidationError:
            continue
        ours = (battle.judge, battle.model, battle.baseline) == (evaluated.report.judge, evaluated.final, evaluated.report.baseline)
        if ours and battle.score is not None and battle.uid in before and battle.uid in after:
            battles["won" if battle.score > 0.5 else "lost" if battle.score < 0.5 else "tied"].append(battle)
    total = sum(map(len, battles.values()))
    groups = []
    for outcome, played in battles.items():
        chosen = [
            Example(
                uid=battle.uid,
                category=battle.category,
                prompt=_cut(before[battle.uid][0]),
                before=_cut(before[battle.uid][1]),
                after=_cut(after[battle.uid][1]),
                outcome=outcome,
                verdict=_cut(battle.games[0].judgment.get("answer", "")),
                swapped=_cut(battle.games[1].judgment.get("answer", "")),
            )
            for battle in _by_turns(played, EXAMPLES[outcome])
        ]
        groups.append(Group(outcome, len(played), total, chosen))
    return groups if total else []


def _by_turns(battles: Sequence[Judgment], limit: int) -> list[Judgment]:
    """Returns `limit` battles: the first of every category, then the second of every category, and so on."""
    seen: dict[str, int] = defaultdict(int)
    turns = []
    for battle in battles:
        turns.append((seen[battle.category], battle.category, battle))
        seen[battle.category] += 1
    return [battle for *_, battle in sorted(turns, key=lambda turn: turn[:2])[:limit]]


def _conversation(messages: Any) -> tuple[str, str]:
    """Returns (prompt, answer) of Arena-Hard's messages; an assistant's content may be a string or `{"answer": ...}`."""
    texts = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        texts.append(str(content.get("answer", "")) if isinstance(content, dict) else str(content or ""))
    return ("\n\n".join(texts[:-1]), texts[-1]) if texts else ("", "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"


def _jsonl(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row
