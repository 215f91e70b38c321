"""Resolves a command's argument: a run by its id or name, a recipe's folder, or a stage's directory.
Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.run_records import RUN, RUNS, find_run, read, records

RUN_ID_BEGINS = re.compile(r"\d{4,8}(-[0-9a-f-]*)?$")  # no Hub id of a model starts like this


def place_of(artifacts: Path, given: str) -> Path:
    """Returns the path that an argument refers to: an existing path, else the folder of the recipe with this
    name, else the record of the run with this id or name.

    An argument that contains a slash is always a path, and so is any argument if there is no artifacts
    folder. Raises ValueError for the same reasons as `find_run`.
    """
    if Path(given).exists() or not artifacts.is_dir():
        return Path(given)
    if (artifacts / given / RUN).is_file():
        return artifacts / given
    if "/" in given and given not in {run.id for run in records(artifacts)}:
        return Path(given)
    return find_run(artifacts, given).file


def recipe_folder(place: Path) -> Path:
    """Returns the recipe's folder if `place` is a run's record, else `place` itself."""
    if not is_record(place):
        return place
    return place.parent if place.name == RUN else place.parents[1]


def checkpoint_of(artifacts: Path, given: str) -> str:
    """Returns the directory of the last checkpoint of the run that an argument names, or the argument
    itself if it is a path or may be a Hub id.

    Raises ValueError for the same reasons as `find_run` and `made_by`.
    """
    named = any(given in (run.id, run.name) for run in records(artifacts))
    if Path(given).exists() or (not named and not RUN_ID_BEGINS.match(given)):
        return given
    return str(made_by(find_run(artifacts, given).file))


def made_by(record: Path) -> Path:
    """Returns the run directory of a run's last stage that produced a checkpoint. Raises ValueError when
    there is none."""
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
    """Returns whether a path is a run's record."""
    return place.is_file() and (place.name == RUN or (place.suffix == ".json" and place.parent.name == RUNS))
