"""Finds what the argument of a command names: a run by its id or name, a recipe's folder, a stage's
directory. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.run_records import RUN, RUNS, find_run, read, records

RUN_ID_BEGINS = re.compile(r"\d{4,8}(-[0-9a-f-]*)?$")  # as no Hub id of a model does


def place_of(artifacts: Path, given: str) -> Path:
    """Returns what a text names: a path that exists, else the folder of a recipe by its name, else the record
    of a run by its id or name.

    Other texts with a slash are returned as paths, and any text where there is no folder of artifacts. Raises
    ValueError as `find_run`.
    """
    if Path(given).exists() or not artifacts.is_dir():
        return Path(given)
    if (artifacts / given / RUN).is_file():
        return artifacts / given
    if "/" in given and given not in {run.id for run in records(artifacts)}:
        return Path(given)
    return find_run(artifacts, given).file


def recipe_folder(place: Path) -> Path:
    """Returns the recipe's folder of a run's record; other paths as they are."""
    if not is_record(place):
        return place
    return place.parent if place.name == RUN else place.parents[1]


def checkpoint_of(artifacts: Path, given: str) -> str:
    """Returns the directory of the last checkpoint of a run that a text names; the text itself where it is a
    path or may be a Hub id.

    Raises ValueError as `find_run` and `made_by`.
    """
    named = any(given in (run.id, run.name) for run in records(artifacts))
    if Path(given).exists() or (not named and not RUN_ID_BEGINS.match(given)):
        return given
    return str(made_by(find_run(artifacts, given).file))


def made_by(record: Path) -> Path:
    """Returns the run directory of the last stage of a run that made a checkpoint. Raises ValueError when
    none did."""
    artifacts = recipe_folder(record).parent
    run = read(record).require_whole()
    for stage in reversed(run.stages):
        result = RunDir(artifacts / stage.run_dir).result()
        if result is not None and "checkpoint" in result.outputs:
            return artifacts / stage.run_dir
    raise ValueError(
        f"run {run.label} has no checkpoint: give the directory of one of its stages, or another run"
    )


def is_record(place: Path) -> bool:
    """Whether a path is a run's record."""
    return place.is_file() and (place.name == RUN or (place.suffix == ".json" and place.parent.name == RUNS))
