"""Keeps the state of a stage's translation: the flags not read yet, the recipe fields, and a note about each
flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from rlhf_core.config import KINDS
from rlhf_core.migrate.flag_values import Words
from rlhf_core.migrate.flags import DROPPED, FIELDS, PPO_ONLY, Dialect, Field, flat
from rlhf_core.migrate.launches import Launch
from rlhf_core.recipe.sentences import models_in

SECRET = re.compile(r"(^|[._])(token|secret|password|api_?key|use_wandb|wandb\.key)$")
IN_URL = re.compile(r"(?<=//)[^/@\s]+@")
T = TypeVar("T")
What = Literal["translated", "approximated", "dropped"]


class Note(NamedTuple):
    """The outcome for a flag. `text`: the field, with the difference if the translation is an approximation,
    or the reason why the flag was dropped. `line`: line in the script."""

    what: What
    stage: str
    flag: str
    text: str
    line: int


class Flag(NamedTuple):
    """A flag as notes show it, without secrets, and the words of its value."""

    shown: str
    words: Words

    @property
    def first(self) -> str:
        """Returns the first word of the value, or ''."""
        return self.words[0] if self.words else ""


@dataclass
class Draft:
    """A stage of kind `kind`. `left`: the flags that are not read yet, by flat name."""

    name: str
    kind: str
    line: int
    dialect: Dialect
    left: dict[str, Flag]
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def take(self, flag: str) -> Flag | None:
        """Removes a flag from `left` and returns it; returns None if the script does not have it."""
        return self.left.pop(flag, None)

    def note(self, what: What, flag: Flag | str | None, text: str) -> None:
        """Appends a note about a flag, which may be given by name; does nothing if `flag` is None."""
        if flag is not None:
            self.notes.append(
                Note(what, self.name, flag.shown if isinstance(flag, Flag) else flag, text, self.line)
            )

    def has(self, name: str) -> bool:
        """Returns whether stages of this kind have a field (`engine.sleep` is a nested one)."""
        return find_field(KINDS[self.kind].config, name) is not None

    def default(self, name: str) -> Any:
        return find_field(KINDS[self.kind].config, name)

    def put(self, name: str, value: Any) -> None:
        """Sets a field, which may be nested."""
        *outer, last = name.split(".")
        place = self.fields
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value

    def get(self, name: str) -> Any:
        """Returns a field's value, or its default."""
        place: Any = self.fields
        for part in name.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return self.default(name) if place is None else place

    def read(self, flag: Flag | None, reader: Callable[[Words], T], otherwise: str = "") -> T | None:
        """Returns a flag's value. Returns None when the flag is None or, after adding a note, when its words
        do not fit. `otherwise`: the replacement that the note names."""
        try:
            return reader(flag.words) if flag else None
        except ValueError as error:
            self.note("dropped", flag, f"{error}; {otherwise}" if otherwise else str(error))
            return None

    def translate(self, flag: Flag | None, name: str, value: Any, how: str = "") -> None:
        """Sets a field and adds a note. `how`: the difference, if the translation is an approximation."""
        self.put(name, value)
        self.note("approximated" if how else "translated", flag, f"{name}: {how}" if how else name)

    def read_fields(self, only: Collection[str] = FIELDS, table: Mapping[str, Field] = FIELDS) -> None:
        """Translates the flags that are in both `table` and `only`."""
        for flag in [name for name in self.left if name in table and name in only]:
            rule = table[flag]
            given = self.left.pop(flag)
            if not self.has(rule.name) or (flag in PPO_ONLY and self.kind != "ppo"):
                self.note("dropped", given, DROPPED.get(flag, f"a {self.kind} stage has no {rule.name}"))
                continue
            value = self.read(given, rule.read, f"{rule.name} keeps its default")
            if value is not None:
                self.translate(given, rule.name, value, rule.how)

    def drop_rest(self, reason_of: Callable[[str], str] | None = None) -> None:
        """Drops every remaining flag, noting the reason. `reason_of`: returns the reason for a flag of
        another tool."""
        for name, given in self.left.items():
            if reason_of is not None:
                reason = reason_of(name)
            elif "muon" in name:
                reason = "the optimiser is AdamW"
            elif name.startswith("critic."):
                reason = "the critic shares this setting with the actor, whose flag is used"
            else:
                reason = DROPPED.get(
                    name, "unknown flag: check whether a field of docs/reference/config.md means the same"
                )
            self.note("dropped", given, reason)
        self.left.clear()


def draft_of(launch: Launch, name: str) -> Draft:
    """Returns a draft with all flags of a launch in `left`."""
    left: dict[str, Flag] = {}
    dialect: Dialect = "flat"
    for given, words in launch.flags.items():
        flag, of = flat(given)
        dialect = of if of == "dotted" else dialect
        shown = (
            "***" if SECRET.search(given) and words else " ".join(word.replace("\n", "\\n") for word in words)
        )
        shown = IN_URL.sub("***@", shown)
        left[flag] = Flag(f"--{given} {shown if len(shown) <= 100 else shown[:97] + '...'}".rstrip(), words)
    return Draft(name, launch.kind, launch.line, dialect, left)


def find_field(model: type[BaseModel], name: str) -> Any:
    """Returns the default of a field (`engine.sleep` is a nested one); `...` when it is required or its
    default is None; None for an unknown field."""
    first, _, rest = name.partition(".")
    info = model.model_fields.get(first)
    if info is None:
        return None
    if rest:
        inner = models_in(info.annotation)
        return find_field(inner[0], rest) if inner else None
    return ... if info.is_required() or info.default is None else info.default
