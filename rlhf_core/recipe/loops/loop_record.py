"""Reads and writes the record of a loop, `<artifacts>/<recipe>/loop.json`: the finished rounds with the
digests of their stages, and the round in progress. `loop.lock` ensures that only one process works on a loop;
the system releases it when that process dies."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

from pydantic import Field, ValidationError

from rlhf_core.config import Recipe
from rlhf_core.records import Frozen
from rlhf_core.system.files import locked, write_text

FILE = "loop.json"
LOCK = "loop.lock"


class Round(Frozen):
    """Holds a finished round.

    `stages` holds the digest of each of its stages. `begun` is the start of the attempt that finished it;
    None if another command trained it. `win_rate` is its win rate against the baseline; None if no evaluation
    judged it. `before` is the previous round's win rate in the same evaluation. `taken` holds, by inbox id,
    the newest row that the round trained on. `refused` is the reason why its model is not used, or ''.
    """

    stages: dict[str, str]
    begun: datetime | None
    ended: datetime
    win_rate: float | None = None
    before: float | None = None
    taken: dict[str, int] = Field({})
    refused: str = ""


class RoundInProgress(Frozen):
    """Holds the round in progress: the digests of its stages, the time when its last attempt began, and the
    newest row that it takes from each inbox."""

    stages: dict[str, str]
    at: datetime
    taken: dict[str, int] = Field({})


class Record(Frozen):
    """The contents of `loop.json`."""

    loop: str
    rounds: tuple[Round, ...] = ()
    begun: RoundInProgress | None = None

    @property
    def refused(self) -> frozenset[str]:
        """Returns the names of the refused rounds."""
        return frozenset(
            f"{self.loop}.round{number}" for number, done in enumerate(self.rounds, start=1) if done.refused
        )

    @property
    def used(self) -> list[Round]:
        """Returns the finished rounds whose models are used, in order."""
        return [done for done in self.rounds if not done.refused]


def folder_of(recipe: Recipe) -> Path:
    """Returns the recipe's folder, `<artifacts>/<recipe>`."""
    return Path(recipe.artifacts).absolute() / recipe.name


def run_dir_of(recipe: Recipe, name: str, digest: str) -> Path:
    """Returns the run directory of a stage."""
    return folder_of(recipe).parent / "stages" / f"{name}-{digest}"


def read(folder: Path, loop: str) -> Record:
    """Returns the record of a loop, or an empty record if there is no file. Raises ValueError if the file is
    damaged or belongs to another loop."""
    try:
        text = (folder / FILE).read_text()
    except FileNotFoundError:
        return Record(loop=loop)
    try:
        record = Record.model_validate_json(text)
    except ValidationError:
        raise ValueError(
            f"{folder / FILE} cannot be read: restore it, or remove it to find the rounds by their"
            " directories"
        ) from None
    if record.loop != loop:
        raise ValueError(
            f"{folder / FILE} is of the loop {record.loop}, not of {loop}: rename the stage back, or give the"
            " recipe a new name"
        )
    return record


def write_record(folder: Path, record: Record) -> None:
    """Writes the record of a loop into its recipe's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, record.model_dump_json(indent=2) + "\n")


def loop_lock(folder: Path, seconds: float = 1.0) -> AbstractContextManager[bool]:
    """Locks the loop in a recipe's folder until the block ends, and yields whether that succeeded.

    Waits up to `seconds`, because a process that only checks whether the lock is free holds it briefly.
    """
    return locked(folder / LOCK, seconds)


def directories(folder: Path) -> list[str]:
    """Returns the names of the run directories, `<stage>-<digest>`, that the loop in a recipe's folder needs,
    for `alignflow gc`.

    Raises ValueError if `loop.json` cannot be read.
    """
    try:
        record = Record.model_validate_json((folder / FILE).read_text())
    except FileNotFoundError:
        return []
    except ValueError:  # not JSON, or not a loop's record
        raise ValueError(
            f"{folder / FILE} cannot be read: restore it, or remove it if nothing needs the loop"
        ) from None
    stages = [done.stages for done in record.used] + ([record.begun.stages] if record.begun else [])
    return [f"{name}-{digest}" for found in stages for name, digest in found.items()]
