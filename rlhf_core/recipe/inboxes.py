"""Replaces inboxes in the data sources of stages by files with the rows that these stages train on. Torch-free.

A stage goes up to the row that was the newest when the recipe was first planned (pins.json; `--latest` moves on). Round k of a loop takes
the rows after those of round k - 1. A round of a loop that has not begun is left open: its file is named and not written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rlhf_core.config import Evaluation, IterativeFeedback, Recipe, Source, StageConfig
from rlhf_core.config.data import Rows
from rlhf_core.data.questions import load_questions
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.take import VIEWS, file_of, take
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.revisions import Pins
from rlhf_core.system.files import Digests, digest

Taken = Mapping[str, Mapping[str, int]]  # round of a loop -> inbox -> number of its newest row in that round
ROUND = re.compile(r"(?P<loop>.+)\.round(?P<number>\d+)(\.|$)")
Value = TypeVar("Value")


class Inboxes:
    """The inboxes of a recipe's stages. `settled`: the rounds with inboxes whose rows are known."""

    def __init__(self, recipe: Recipe, pins: Pins, digests: Digests, taken: Taken | None):
        self._recipe, self._pins, self._digests, self._taken = recipe, pins, digests, taken
        self.settled: dict[str, dict[str, int]] = {}

    def with_files(self, name: str, config: StageConfig) -> StageConfig:
        """Returns a stage's config with files in place of inboxes. Raises ValueError for a data set that an inbox has no rows for."""
        files: dict[Source, Source] = {}
        for text in config.texts:
            for source in text.data.sources:
                if source.is_inbox:
                    files[source] = self._file(name, source, text.rows, text.field)
        return replaced(config, files) if files else config

    def _file(self, name: str, source: Source, rows: Rows | None, field: str) -> Source:
        if rows is None or rows not in VIEWS:
            raise ValueError(f"stages.{name}.{field}: {source.path} is an inbox, which has no rows for it: name a file")
        inbox = Inbox(Path(source.path).absolute())
        if not inbox.exists:
            return source
        after, until = self._range(name, inbox)
        if until is None:
            path = file_of(inbox, rows, after, inbox.end(), self._key)
            path = path.with_name(f"open-{path.name}")
        else:
            path = take(inbox, rows, after, until, lambda: Questions(evaluation_texts(self._recipe)), self._key)
        return Source(path=str(path), probability=source.probability)

    def _range(self, name: str, inbox: Inbox) -> tuple[int, int | None]:
        """Returns the number after which, and up to which, a stage takes rows; None: its round has not begun."""
        title = ROUND.match(name)
        if title is None:
            return 0, self._end("", inbox, pin=True)
        number = int(title["number"])
        before = self._end(f"{title['loop']}.round{number - 1}", inbox, pin=self._taken is None) if number > 1 else 0
        return before or 0, self._end(f"{title['loop']}.round{number}", inbox, pin=self._taken is None)

    def _end(self, title: str, inbox: Inbox, pin: bool) -> int | None:
        place = str(inbox.folder)
        end = (self._taken or {}).get(title, {}).get(place)
        if end is None and (not title or self._taken is None or self._has_begun(title)):
            end = self._pins.kept(f"inbox:{place}@{title}", place, inbox.end if pin else lambda: None)
        if title and end is not None:
            self.settled.setdefault(title, {})[place] = end
        return end

    def _has_begun(self, title: str) -> bool:
        """Whether a command other than the loop has worked on a round: a plan alone, as of a check of the recipe, fixes no rows of it."""
        return any((Path(self._recipe.artifacts).absolute() / "stages").glob(f"{title}.*"))

    @cached_property
    def _asked(self) -> list[Evaluation]:
        """The evaluations with questions in files."""
        evaluations = (config for config in self._recipe.stages.values() if isinstance(config, Evaluation))
        return [config for config in evaluations if not is_remote(config.questions.path)]

    @cached_property
    def _key(self) -> str:
        return digest([self._digests.of(Path(config.questions.path)) for config in self._asked]) if self._asked else ""


def evaluation_texts(recipe: Recipe) -> list[str]:
    """Returns the questions of a recipe's evaluations that are in files, as texts; those that cannot be read are told elsewhere."""
    texts = []
    for config in recipe.stages.values():
        if isinstance(config, Evaluation) and not is_remote(config.questions.path):
            try:
                questions = load_questions(config.questions, config.max_questions, recipe.seed)
            except (OSError, ValueError):
                continue
            texts += [str(message["content"]) for question in questions for message in question.messages if message["role"] == "user"]
    return texts


def inboxes_of(recipe: Recipe) -> list[Path]:
    """Returns the folders of the inboxes that stages of a recipe name."""
    sources = (source for config in recipe.stages.values() for text in config.texts for source in text.data.sources)
    return list(dict.fromkeys(Path(source.path).absolute() for source in sources if source.is_inbox))


def ends_of(config: StageConfig) -> dict[str, int]:
    """Returns the newest row of each inbox in the data sources of a stage or loop."""
    places = [Path(source.path).absolute() for text in config.texts for source in text.data.sources if source.is_inbox]
    return {str(place): Inbox(place).end() for place in places if Inbox(place).exists}


def rows_awaited(recipe: Recipe, loop: str, number: int, taken: Taken) -> str:
    """Returns why round `number` of a loop on feedback cannot begin for want of new rows; '' when it can."""
    config = recipe.stages[loop]
    if not isinstance(config, IterativeFeedback) or f"{loop}.round{number}" in taken:
        return ""
    new = new_rows(config, taken.get(f"{loop}.round{number - 1}", {}))
    if new >= config.min_new_rows:
        return ""
    named = " and ".join(Path(source.path).name for source in config.feedback.sources if source.is_inbox)
    return f"round {number} waits for feedback: {named} has {new} new rows for {config.method}, and min_new_rows is {config.min_new_rows}"


def new_rows(config: IterativeFeedback, after: Mapping[str, int]) -> int:
    """Returns how many rows of a loop's method its inboxes have after these numbers."""
    kinds = VIEWS[config.texts[0].rows or "preference"]
    places = [Path(source.path).absolute() for source in config.feedback.sources if source.is_inbox]
    return sum(Inbox(place).count(kinds, after.get(str(place), 0)) for place in places)


def replaced(value: Value, files: Mapping[Source, Source]) -> Value:
    """Returns a config with other sources in place of some."""
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
