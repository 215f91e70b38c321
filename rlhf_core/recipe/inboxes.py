"""Replaces inboxes in the data sources of stages with files that hold the rows to train on. Torch-free.

A stage takes all rows up to the newest one at the time when the recipe was first planned (`pins.json`;
`--latest` updates it). Round k of a loop takes the rows after the last row of round k - 1. A round that has
not begun is left open: its file is named but not written. The current prompts of a drift stage include all
rows up to the last row of the newest round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rlhf_core.config import Recipe, Source, StageConfig
from rlhf_core.config.data import Rows, Text
from rlhf_core.config.gates import Asked
from rlhf_core.data.pictures.message_parts import marked_text
from rlhf_core.data.questions import load_questions
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.take import VIEWS, file_of, take, usable
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.revisions import Pins
from rlhf_core.system.files import Digests, digest

# round of a loop -> id of an inbox -> number of the newest row that the round takes from it
Taken = Mapping[str, Mapping[str, int]]
ROUND = re.compile(r"(?P<loop>.+)\.round(?P<number>\d+)(\.|$)")
Value = TypeVar("Value")


class Inboxes:
    """Holds the inboxes of a recipe's stages. `settled` are the rounds whose inbox rows are known. `taken`
    holds the newest rows of rounds that have begun. With `pin`, other rounds take all rows up to the newest
    one, whose number is stored. Without `pin`, their rows are left open."""

    def __init__(self, recipe: Recipe, pins: Pins, digests: Digests, taken: Taken, pin: bool):
        self._recipe = recipe
        self._pins = pins
        self._digests = digests
        self._taken = taken
        self._pin = pin
        self.settled: dict[str, dict[str, int]] = {}

    def with_files(self, name: str, config: StageConfig) -> StageConfig:
        """Returns a stage's config with each inbox replaced by a file. Raises ValueError if an inbox has no
        rows for a data set."""
        files: dict[Source, Source] = {}
        for text in config.texts:
            for source in text.data.sources:
                if source.is_inbox:
                    files[source] = self._file(name, source, text)
        return replaced(config, files) if files else config

    def _file(self, name: str, source: Source, text: Text) -> Source:
        rows = text.rows
        if rows is None or rows not in VIEWS:
            where = f"stages.{name}.{text.field}"
            raise ValueError(f"{where}: {source.path} is an inbox, which has no rows for it: name a file")
        inbox = Inbox(Path(source.path))
        if not inbox.exists:
            return source
        after, until = self._range(name, inbox)
        if text.to_newest:
            until = max((ends[inbox.id] for ends in self._taken.values() if inbox.id in ends), default=until)
        if until is None:
            path = file_of(inbox, rows, after, inbox.end(), self._key)
            path = path.with_name(f"open-{path.name}")
        else:
            path = take(
                inbox, rows, after, until, lambda: Questions(evaluation_texts(self._recipe)), self._key
            )
        return Source(path=str(path), probability=source.probability)

    def _range(self, name: str, inbox: Inbox) -> tuple[int, int | None]:
        """Returns (after, up to), the row numbers between which a stage takes rows. "up to" is None if its
        round has not begun."""
        title = ROUND.match(name)
        if title is None:
            return 0, self._end("", inbox, pin=True) or 0
        number = int(title["number"])
        before = self._end(f"{title['loop']}.round{number - 1}", inbox, self._pin) if number > 1 else 0
        return before or 0, self._end(f"{title['loop']}.round{number}", inbox, self._pin)

    def _end(self, title: str, inbox: Inbox, pin: bool) -> int | None:
        end = self._taken.get(title, {}).get(inbox.id)
        if end is None and pin:
            end = self._pins.kept(pin_of(inbox, title), str(inbox.folder), lambda: inbox.end() or None)
        if title and end is not None:
            self.settled.setdefault(title, {})[inbox.id] = end
        return end

    @cached_property
    def _key(self) -> str:
        asked = _asked_from_files(self._recipe)
        return digest([self._digests.of(Path(each.source.path)) for each in asked]) if asked else ""


def evaluation_texts(recipe: Recipe) -> list[str]:
    """Returns the texts of the evaluation questions that a recipe keeps in files. Skips unreadable files,
    because the evaluation's own check reports them."""
    texts = []
    for asked in _asked_from_files(recipe):
        try:
            questions = load_questions(*asked, recipe.seed)
        except (OSError, ValueError):
            continue
        texts += [
            marked_text(message["content"])
            for question in questions
            for message in question.messages
            if message["role"] == "user"
        ]
    return texts


def _asked_from_files(recipe: Recipe) -> list[Asked]:
    found = [config.asks for config in recipe.stages.values()]
    return [asked for asked in found if asked is not None and not is_remote(asked.source.path)]


def inboxes_of(recipe: Recipe) -> list[Path]:
    """Returns the folders of the inboxes that a recipe's stages name."""
    return list(
        dict.fromkeys(inbox.folder for config in recipe.stages.values() for inbox, _ in _named(config))
    )


def ends_of(config: StageConfig) -> dict[str, int]:
    """Returns, by inbox id, the number of the newest row of each inbox that a stage or loop reads."""
    return {inbox.id: inbox.end() for inbox, _ in _named(config) if inbox.exists}


def pin_of(inbox: Inbox, title: str) -> str:
    """Returns the key of an inbox's pin for a round ("" outside rounds)."""
    return f"inbox:{inbox.id}@{title}"


def pinned_ends(recipe: Recipe, loop: str, title: str, pins: Pins) -> dict[str, int]:
    """Returns the last row, by inbox id, that another command has planned to use in a round of a loop."""
    found = {
        inbox.id: pins.kept(pin_of(inbox, title), "", lambda: None)
        for inbox, _ in _named(recipe.stages[loop])
        if inbox.exists
    }
    return {identity: end for identity, end in found.items() if end is not None}


def rows_awaited(recipe: Recipe, loop: str, number: int, taken: Taken) -> str:
    """Returns why round `number` of a loop cannot begin if its inboxes have too few new rows; otherwise
    ''."""
    config = recipe.stages[loop]
    named = _named(config)
    if not named:
        return ""
    before = taken.get(f"{loop}.round{number - 1}", {})
    wanted = config.new_rows_needed or 1
    questions = cache(lambda: Questions(evaluation_texts(recipe)))
    new = sum(
        usable(inbox, rows, before.get(inbox.id, 0), questions, wanted)
        for inbox, rows in named
        if inbox.exists
    )
    if new >= wanted:
        return ""
    places = " and ".join(inbox.folder.name for inbox, _ in named)
    return (
        f"round {number} waits for feedback: {places} has {new} new rows that it can use, and it begins with"
        f" {wanted}"
    )


def _named(config: StageConfig) -> list[tuple[Inbox, Rows]]:
    """Returns the inboxes among the data sources of a stage or loop, each with the kind of rows required from
    it."""
    texts = [(text.data.sources, text.rows) for text in config.texts if text.rows in VIEWS]
    return [
        (Inbox(Path(source.path)), rows)
        for sources, rows in texts
        if rows
        for source in sources
        if source.is_inbox
    ]


def new_rows(config: StageConfig, after: Mapping[str, int]) -> int:
    """Returns the number of rows suitable for a loop's method that its inboxes have after the row numbers in
    `after` (by inbox id)."""
    return sum(
        inbox.count(VIEWS[rows], after.get(inbox.id, 0)) for inbox, rows in _named(config) if inbox.exists
    )


def replaced(value: Value, files: Mapping[Source, Source]) -> Value:
    """Returns a config with the keys of `files` replaced by their values."""
    new: Any = value
    if isinstance(value, Source):
        new = files.get(value, value)
    elif isinstance(value, BaseModel):
        changed = {name: replaced(getattr(value, name), files) for name in type(value).model_fields}
        changed = {name: part for name, part in changed.items() if part is not getattr(value, name)}
        new = value.model_copy(update=changed) if changed else value
    elif isinstance(value, tuple):
        parts = tuple(replaced(part, files) for part in value)
        new = value if all(a is b for a, b in zip(value, parts, strict=True)) else parts
    return new
