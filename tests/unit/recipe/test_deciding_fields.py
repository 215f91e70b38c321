"""The config fields that decide a stage's result are those of a committed list: a new one gets there by
intention."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from rlhf_core.config import KINDS
from rlhf_core.recipe.sentences import models_in
from rlhf_core.records import NotInDigest

LIST = Path(__file__).with_name("deciding_fields.txt")


def deciding() -> dict[str, list[str]]:
    """Returns the fields that are not marked, by kind, and those of every record in them, by its class."""
    found: dict[str, list[str]] = {}
    left: list[tuple[str, type[BaseModel]]] = [(name, kind.config) for name, kind in KINDS.items()]
    for title, config in left:
        fields = {
            name: field for name, field in config.model_fields.items() if NotInDigest not in field.metadata
        }
        found[title] = sorted(fields)
        records = [record for field in fields.values() for record in models_in(field.annotation)]
        left += [
            (record.__name__, record) for record in dict.fromkeys(records) if record.__name__ not in found
        ]
    return found


def test_the_fields_that_decide_a_result_are_those_of_the_list() -> None:
    listed = dict(line.split(": ", 1) for line in LIST.read_text().splitlines())
    found = {title: " ".join(fields) for title, fields in deciding().items()}
    changed = {
        title: set(found.get(title, "").split()) ^ set(listed.get(title, "").split())
        for title in found | listed
    }
    different = {
        title: sorted(fields)
        for title, fields in changed.items()
        if fields or (title in found) != (title in listed)
    }
    assert not different, f"mark these fields with NotInDigest, or write them into {LIST.name}: {different}"
