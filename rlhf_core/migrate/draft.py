"""A stage in the making: the flags that are still to be read, the fields they became, and what became of each flag."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from rlhf_core.migrate.flags import DROPPED, FIELDS, PPO_ONLY, Dialect, flat
from rlhf_core.migrate.launches import Launch
from rlhf_core.recipe import config_class, models_in

SECRET = re.compile(r"(^|[._])(token|secret|password|api_?key|use_wandb|wandb\.key)$")
IN_URL = re.compile(r"(?<=//)[^/@\s]+@")
Words = tuple[str, ...]
What = Literal["translated", "approximated", "dropped"]


class Note(NamedTuple):
    """What became of a flag: `told` is the field, or how it is only alike, or why there is none. `line` is that of the script."""

    what: What
    stage: str
    flag: str
    told: str
    line: int


class Flag(NamedTuple):
    shown: str
    words: Words


@dataclass
class Draft:
    """A stage of kind `kind`; `left` holds the flags nobody has read yet, by their flat names."""

    name: str
    kind: str
    line: int
    dialect: Dialect
    left: dict[str, Flag]
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def take(self, flag: str) -> Flag | None:
        """Reads a flag; None when the script does not give it."""
        return self.left.pop(flag, None)

    def note(self, what: What, shown: str, told: str) -> None:
        self.notes.append(Note(what, self.name, shown, told, self.line))

    def has(self, name: str) -> bool:
        """Whether stages of this kind have a field (`vllm.sleep` is a nested one)."""
        return find_field(config_class(self.kind), name) is not None

    def default(self, name: str) -> Any:
        return find_field(config_class(self.kind), name)

    def put(self, name: str, value: Any) -> None:
        *outer, last = name.split(".")
        place = self.fields
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value

    def get(self, name: str) -> Any:
        """A field's value, or the default that it will have."""
        place: Any = self.fields
        for part in name.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return self.default(name) if place is None else place

    def translate(self, flag: Flag, name: str, value: Any, how: str = "") -> None:
        self.put(name, value)
        self.note("approximated" if how else "translated", flag.shown, f"{name}: {how}" if how else name)

    def read_fields(self, only: Collection[str] = FIELDS) -> None:
        """Reads every flag that is simply a field, or those of `only`."""
        for flag in [name for name in self.left if name in FIELDS and name in only]:
            rule, given = FIELDS[flag], self.left.pop(flag)
            if not self.has(rule.name) or (flag in PPO_ONLY and self.kind != "ppo"):
                self.note("dropped", given.shown, DROPPED.get(flag, f"a {self.kind} stage has no {rule.name}"))
                continue
            try:
                self.translate(given, rule.name, rule.read(given.words), rule.how)
            except ValueError as error:
                self.note("dropped", given.shown, f"{error}; {rule.name} keeps its default")

    def drop_rest(self) -> None:
        """Says of every flag that is left why it is."""
        for name, given in self.left.items():
            if "muon" in name:
                reason = "the optimiser is AdamW"
            elif name.startswith("critic."):
                reason = "the critic shares this setting with the actor, whose flag counts"
            else:
                reason = DROPPED.get(name, "unknown flag: look whether a field of docs/config.md means the same")
            self.note("dropped", given.shown, reason)
        self.left.clear()


def draft_of(launch: Launch, name: str, kind: str = "") -> Draft:
    """A draft with all flags of a launch still to be read."""
    left: dict[str, Flag] = {}
    dialect: Dialect = "flat"
    for given, words in launch.flags.items():
        flag, of = flat(given)
        dialect = of if of == "dotted" else dialect
        shown = "***" if SECRET.search(given) and words else " ".join(word.replace("\n", "\\n") for word in words)
        shown = IN_URL.sub("***@", shown)
        left[flag] = Flag(f"--{given} {shown if len(shown) <= 100 else shown[:97] + '...'}".rstrip(), words)
    return Draft(name, kind or launch.kind, launch.line, dialect, left)


def find_field(model: type[BaseModel], name: str) -> Any:
    """The default of a field (`vllm.sleep` is a nested one); `...` when it must be given, None when there is no such field."""
    first, _, rest = name.partition(".")
    info = model.model_fields.get(first)
    if info is None:
        return None
    if rest:
        inner = models_in(info.annotation)
        return find_field(inner[0], rest) if inner else None
    return ... if info.is_required() or info.default is None else info.default
