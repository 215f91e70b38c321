"""Commands for the champion of a recipe, the published model in use."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from flows.cli.results.artifacts import Artifacts
from flows.cli.results.named_runs import place_of, recipe_folder
from flows.cli.show import OK, console, require_folder, say, table_of
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_records import RUN, RUNS
from rlhf_core.system.files import read_json
from rlhf_core.system.machine import MachineLacks

RecipeOrRun = Annotated[str, Parameter(name="folder")]


def champion(which: RecipeOrRun, *, artifacts: Artifacts = Path("artifacts")) -> int:
    """Show which published model of a recipe is in use, since when and why, and its predecessors.

    Args:
        which: the recipe's folder ARTIFACTS/NAME, the recipe's name, or the name or id of one of its runs.
    """
    from rlhf_core.stages.publication import champion_record as record  # imports the Hub's client

    folder = recipe_folder(place_of(artifacts, which))
    require_folder(folder)
    found = record.champions_of(folder.absolute())
    if found.now is None and found.moving is None:
        raise ValueError(
            f"{folder} has no champion: set champion: true in a publication, or run alignflow promote"
        )
    table = table_of(
        "since (UTC)",
        "model",
        "publication",
        "on the Hub",
        "why",
        title=f"champions of {escape(folder.absolute().name)}",
    )
    for reign in found.reigns:
        place = f"{reign.repo_id}@{(reign.commit or '')[:8]}" if reign.repo_id else ""
        why = f"{reign.why} ({reign.by})" if reign.by else reign.why
        ended = f"{why}; rolled back: {reign.ended}" if reign.ended else why
        table.add_row(f"{reign.at:%Y-%m-%d %H:%M}", *map(escape, (reign.model, reign.run, place, ended)))
    console.print(table)
    if found.now is not None:
        say(f"the champion is {found.now.model}: {folder / record.LINK}")
    if found.moving is not None:
        console.print(
            f"a move to {found.moving.model} was interrupted: run the recipe, promote or rollback to complete"
            " it",
            markup=False,
        )
    return OK


def promote(
    which: RecipeOrRun,
    publication: str,
    *,
    reason: str = "promoted by hand",
    by: str | None = None,
    artifacts: Artifacts = Path("artifacts"),
) -> int:
    """Make the model of a finished publication the champion.

    Args:
        which: the recipe's folder ARTIFACTS/NAME, the recipe's name, or the name or id of one of its runs.
        publication: name of the publication's run directory, or of the stage, which means its newest result.
        reason: stored with the champion.
        by: who decides; default: your user name on this machine.
    """
    from rlhf_core.stages.publication import champion_record as record  # imports the Hub's client

    folder = recipe_folder(place_of(artifacts, which))
    require_folder(folder)
    folder = folder.absolute()
    stages = folder.parent / "stages"
    there = sorted(_results(folder, publication), key=lambda file: file.stat().st_mtime)
    run_dir = stages / publication if (stages / publication).is_dir() or not there else there[-1].parent
    with _reached():
        new = record.promote(folder, run_dir, reason, by or getpass.getuser(), _store(folder))
    say(f"the champion is {new.model} ({new.run})")
    return OK


def rollback(
    which: RecipeOrRun,
    *,
    reason: str = "rolled back by hand",
    by: str | None = None,
    artifacts: Artifacts = Path("artifacts"),
) -> int:
    """Go back to the previous champion.

    Args:
        which: the recipe's folder ARTIFACTS/NAME, the recipe's name, or the name or id of one of its runs.
        reason: stored with both champions.
        by: who decides; default: your user name on this machine.
    """
    from rlhf_core.stages.publication import champion_record as record  # imports the Hub's client

    folder = recipe_folder(place_of(artifacts, which))
    require_folder(folder)
    folder = folder.absolute()
    with _reached():
        new = record.rollback(folder, reason, by or getpass.getuser(), _store(folder))
    say(f"the champion is {new.model} ({new.run}), {new.why}")
    return OK


def _results(folder: Path, stage: str) -> Iterator[Path]:
    """Yields the results of a stage of this recipe, and not of other recipes' stages with the same name."""
    runs = [read_json(file) for file in [folder / RUN, *(folder / RUNS).glob("*.json")]]
    ours = {
        Path(entry.get("run_dir", "")).name
        for run in runs
        for entry in run.get("stages", [])
        if entry.get("name") == stage
    }
    yield from (
        file for name in sorted(ours) if (file := folder.parent / "stages" / name / "result.json").is_file()
    )


def _store(folder: Path) -> Store | None:
    from rlhf_core.stages.publication import champion_record as record  # imports the Hub's client

    place = record.champions_of(folder).store
    return Store(place) if place else None


@contextmanager
def _reached() -> Iterator[None]:
    """Converts the error for an unreachable Hub to MachineLacks, whose message the command prints."""
    try:
        yield
    except ConnectionError as error:
        raise MachineLacks(str(error)) from None
