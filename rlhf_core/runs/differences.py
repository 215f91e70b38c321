"""Compares the configuration, inputs, versions and metrics of two run directories. Reads plain JSON, so that
directories written by other versions can be read.

Used by `alignflow diff` and the dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.config.former_names import stage_with_new_names
from rlhf_core.runs.lineage import stage_of
from rlhf_core.runs.run_dir import REQUEST, RESULT
from rlhf_core.system.files import read_json
from rlhf_core.system.redaction import without_passwords


class RunDifference(NamedTuple):
    """One difference between two runs. `part`: stages, recipe, configuration, inputs, versions, metrics or
    digest."""

    stage: str
    part: str
    key: str
    before: str
    after: str


def stage_differences(
    name: str, before: Path, after: Path, *, read: Callable[[Path], dict[str, Any]] = read_json
) -> Iterator[RunDifference]:
    """Yields the differences between two run directories. `name`: the stage's name in the results. `read`:
    returns the JSON object in a file, or {}."""
    old, new = (read(folder / REQUEST) for folder in (before, after))
    results = [read(folder / RESULT) for folder in (before, after)]
    parts = {
        "configuration": [
            {"seed": request.get("seed"), **stage_with_new_names(request.get("config", {}))}
            for request in (old, new)
        ],
        "inputs": [
            {key: _content(place) for key, place in request.get("inputs", {}).items()}
            for request in (old, new)
        ],
        "versions": [result.get("environment", {}) for result in results],
        "metrics": [result.get("metrics", {}) for result in results],
    }
    found = [
        RunDifference(name, part, *change)
        for part, (first, second) in parts.items()
        for change in changed(first, second)
    ]
    digests = [
        request.get("digest", folder.name.rpartition("-")[2])
        for request, folder in ((old, before), (new, after))
    ]
    if digests[0] != digests[1]:
        explained = any(change.part in ("configuration", "inputs") for change in found)
        yield RunDifference(
            name, "digest", "" if explained else "its data, its base model or the stage's code", *digests
        )
    yield from found
    for side, result in zip(("before", "after"), results, strict=True):
        if not result:
            yield RunDifference(
                name,
                "metrics",
                f"no result {side}",
                *(("not done", "") if side == "before" else ("", "not done")),
            )


def changed(old: object, new: object) -> Iterator[tuple[str, str, str]]:
    """Yields (key, before, after) for all leaves that differ, as strings without passwords."""
    yield from ((key, _text(before), _text(after)) for key, before, after in changes(old, new))


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, before, after) for all leaves that differ between two records, with '-' for a missing
    leaf."""
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        old = dict(enumerate(old))
        new = dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from changes(old.get(name, "-"), new.get(name, "-"), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, old, new


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return without_passwords(text)


def _content(place: str) -> str:
    """Returns an input in comparable form: `<name>-<digest>` for a stage's output, else the path or Hub id
    itself."""
    stage = stage_of(place)
    return f"{stage[1]['name']}-{stage[1]['digest']}" if stage else place
