"""Selects example battles for the report: won, lost and tied battles from all categories, with the judge's
explanations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from evaluation.answers.question_pictures import small_picture
from evaluation.report.summary import Evaluated
from rlhf_core.data.pictures.picture_files import PICTURE_FILE
from rlhf_core.records import Judgment

EXAMPLES = {"won": 5, "lost": 3, "tied": 3}


class Example(NamedTuple):
    """One battle. `pictures`: data URLs of the prompt's images, reduced in size. `before` and `after`:
    answers of the baseline and the final model."""

    battle: Judgment
    prompt: str
    pictures: list[str]
    before: str
    after: str


class StoredConversation(NamedTuple):
    """A stored prompt and its answer. `pictures`: files of the prompt's images in the report's folder."""

    prompt: str
    answer: str
    pictures: list[str]


class Group(NamedTuple):
    """Battles of one outcome: `played` of all `total` battles had this outcome; `examples` are some of
    these."""

    outcome: str
    played: int
    total: int
    examples: list[Example]


def examples(evaluated: Evaluated) -> list[Group]:
    """Reads the report's answers and judgments, and returns a group for each outcome; an empty list when
    there is no battle to show."""
    answers: dict[str, dict[str, StoredConversation]] = defaultdict(dict)
    for row in _jsonl(evaluated.folder / "answers"):
        answers[str(row.get("model"))][str(row.get("uid"))] = _conversation(row.get("messages"))
    before = answers[evaluated.report.baseline]
    after = answers[evaluated.final]
    battles: dict[str, list[Judgment]] = {outcome: [] for outcome in EXAMPLES}
    for row in _jsonl(evaluated.folder / "judgments"):
        try:
            battle = Judgment.model_validate(row)
        except ValidationError:
            continue
        ours = (battle.judge, battle.model, battle.baseline) == (
            evaluated.report.judge,
            evaluated.final,
            evaluated.report.baseline,
        )
        if ours and battle.score is not None and battle.uid in before and battle.uid in after:
            battles[_outcome(battle.score)].append(battle)
    total = sum(map(len, battles.values()))
    groups = []
    for outcome, played in battles.items():
        chosen = [
            _example(evaluated.folder, battle, before[battle.uid], after[battle.uid])
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


def _example(
    folder: Path, battle: Judgment, before: StoredConversation, after: StoredConversation
) -> Example:
    pictures = [small_picture(folder / name) for name in before.pictures if PICTURE_FILE.fullmatch(name)]
    return Example(battle, before.prompt, [url for url in pictures if url], before.answer, after.answer)


def _conversation(messages: Any) -> StoredConversation:
    """Reads Arena-Hard's messages. The content of an assistant message may be a string or `{"answer": ...}`;
    the content of a message with images is a list of parts."""
    texts = []
    pictures: list[str] = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict)]
            pictures += [str(part.get("image", "")) for part in parts if part.get("type") == "image"]
            content = "".join(str(part.get("text", "")) for part in parts)
        texts.append(str(content.get("answer", "")) if isinstance(content, dict) else str(content or ""))
    return StoredConversation("\n\n".join(texts[:-1]), texts[-1] if texts else "", pictures)


def _jsonl(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def _outcome(score: float) -> str:
    if score == 0.5:
        return "tied"
    return "won" if score > 0.5 else "lost"
