"""Converts a launch script, Kubernetes YAML that contains one, or a TRL config to a recipe with a comment
about every flag."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.config import Recipe
from rlhf_core.migrate.draft import Note
from rlhf_core.migrate.launches import PROGRAMS, Launch, LaunchCommands, is_manifest, launches_of
from rlhf_core.migrate.shell import Remark
from rlhf_core.migrate.stage_drafts import stages_of
from rlhf_core.migrate.trl_commands import KINDS, refuse_python, trl_config
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.plan import plan
from rlhf_core.recipe.yaml_text import dump

HEADINGS = {
    "translated": "Translated, flag -> field:",
    "approximated": "Approximated; check these:",
    "dropped": "Dropped, and why:",
}


class Migrated(NamedTuple):
    """A converted script: a valid recipe, its YAML with comments, a note about every flag, and remarks."""

    recipe: Recipe
    text: str
    notes: tuple[Note, ...]
    remarks: tuple[Remark, ...]


def migrate(path: Path, gpus: int = 8) -> Migrated:
    """Converts a script to a recipe without executing any of it.

    `gpus`: number of GPUs of one machine, for launchers that use all of them. Raises ValueError, with a
    message of one sentence, when the file is not text, a quote is not closed, there is no training command, a
    command has no model or data, or a value is invalid in a recipe.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(
            f"script {path}: {error.strerror or error}; give the path of a shell script or a Kubernetes"
            " manifest"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"script {path} is not a text file; give the path of a shell script or a Kubernetes manifest"
        ) from None
    try:
        refuse_python(text, path.suffix)
        found = _found_in(text, path)
        if not found.launches:
            raise ValueError(
                f"there is no training command in it (one that starts {', '.join(PROGRAMS)}, or trl"
                f" {'|'.join(KINDS)}); give the script that launches the training"
            )
        raw, notes = stages_of(found.launches, gpus)
        raw = {"name": re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "migrated", **raw}
        recipe = recipe_of(raw)
        plan(recipe)
    except ValueError as error:
        raise ValueError(f"script {path}: {error}") from None
    return Migrated(recipe, _text(path, raw, notes, found.remarks), tuple(notes), tuple(found.remarks))


def _found_in(text: str, path: Path) -> LaunchCommands:
    """Returns the training commands in a script or a manifest, or the single command of a TRL YAML config."""
    config = (
        trl_config(text, path.stem) if path.suffix in (".yaml", ".yml") and not is_manifest(text) else None
    )
    if config is None:
        return launches_of(text, path.parent)
    command, options = config
    return LaunchCommands([Launch(KINDS[command], options, 1, (None, None), "trl")], [])


def _text(path: Path, raw: dict[str, Any], notes: list[Note], remarks: list[Remark]) -> str:
    lines = [
        f"Made from {path.name} by `alignflow migrate`. Nothing was executed; docs/how-to/migration.md says"
        " how to go on."
    ]
    lines += [f"Line {remark.line}: {remark.text}." for remark in remarks]
    for what, heading in HEADINGS.items():
        found = [note for note in notes if note.what == what]
        if found:
            lines += ["", heading, *(f"  {note.stage}: {note.flag} -> {note.text}" for note in found)]
    comments = "".join(
        f"# {line}".rstrip() + "\n"
        for line in "\n".join(line.replace("\n", "\\n") for line in lines).splitlines()
    )
    return comments + "\n" + dump(raw, width=120)
