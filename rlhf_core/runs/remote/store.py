"""Copies finished stages to a recipe's store (a bucket or folder), and fetches missing stages from it.
Torch-free.

Stages work in the local artifacts folder; `<store>/stages/<stage>-<digest>/` is a copy of a run directory.
The copy's `files.json` holds the size and SHA-256 of every file. Its `result.json` is written last and
removed first, and a copy without one is ignored. Fetched files are checked against both lists before they are
moved into the run directory. With `checkpoints`, the newest resume state of a running stage is also copied,
to `<store>/states/<stage>-<digest>/step-<n>/`, with the state's `loop.json` last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlhf_core.config import Recipe
from rlhf_core.records import FileInfo, StageResult
from rlhf_core.runs.approval_record import FILE as APPROVAL
from rlhf_core.runs.approval_record import Approval
from rlhf_core.runs.remote.remote_files import RemoteFiles, StoreFault
from rlhf_core.runs.resume_state import LOOP
from rlhf_core.runs.run_dir import (
    EXPORTS,
    KEPT_FOLDER,
    METRICS,
    REQUEST,
    RESULT,
    ROLLOUTS,
    STATE,
    VALIDATION,
    RunDir,
    StageRequest,
)
from rlhf_core.system.files import file_digest, link_tree, sync_to_disk, write_bytes, write_text

FILES = "files.json"
FETCHING = ".fetching"
# prefix of a folder, beside the resume states, that holds the files of the state being copied
COPYING = ".copying-"
LISTING = TypeAdapter(dict[str, FileInfo])


class Damaged(ValueError):
    """Raised when a copy differs from the original. The message names the difference."""


class Store:
    """Copies of run directories at `url`; with `checkpoints`, also copies of resume states. `attempts` is
    passed to RemoteFiles.

    Every method raises StoreFault when the store cannot be used.
    """

    def __init__(self, url: str, checkpoints: bool = False, **attempts: Any):
        self.checkpoints = checkpoints
        self.files = RemoteFiles(url.rstrip("/"), **attempts)

    def has(self, name: str) -> bool:
        """Returns whether the store has a complete copy of the run directory `name`."""
        return self._result(name) is not None

    def put(self, run: RunDir) -> bool:
        """Copies the run directory of a finished stage to the store.

        Returns False when the store already has it, or when an output is outside the directory
        (`publication.folder`), in which case other machines run that stage themselves.
        """
        name = run.path.name
        result = run.result()
        if result and any(".." in Path(file).parts for file in result.files):
            return False
        if self.has(name):
            return False
        inside = (file.relative_to(run.path) for file in run.path.rglob("*") if file.is_file())
        own = (STATE, RESULT, APPROVAL)  # an approval is copied separately, once it is decided
        files = sorted(
            file.as_posix()
            for file in inside
            if file.parts[0] not in own and not file.parts[0].startswith(".")
        )
        self._put(f"stages/{name}", run.path, files, RESULT, result.files if result else {})
        return True

    def put_approval(self, run: RunDir) -> None:
        """Copies a person's decision on a stage, if the stage's copy is complete."""
        found = Approval.read(run / APPROVAL)
        place = f"stages/{run.path.name}/{APPROVAL}"
        if found is not None and found.decision is not None and self.has(run.path.name):
            content = (run / APPROVAL).read_bytes()
            if self.files.read(place) != content:
                self.files.write(content, place)

    def differs(self, run: RunDir) -> bool:
        """Returns whether files in the store's copy of a run directory differ in size from the local
        files."""
        try:
            listing = LISTING.validate_json(self.files.read(f"stages/{run.path.name}/{FILES}") or b"")
        except ValidationError:
            return False
        return any(
            (run / name).is_file() and (run / name).stat().st_size != info.size
            for name, info in listing.items()
        )

    def replace(self, run: RunDir) -> None:
        """Replaces the store's copy of a finished run directory with a new one."""
        self.files.remove(f"stages/{run.path.name}/{RESULT}")
        self.put(run)

    def fetch(self, run: RunDir, request: StageRequest) -> bool:
        """Fetches a finished run directory. Returns False when the store has no complete copy of it.

        The inputs in its `config.json` are replaced with the inputs of `request`, which are paths on this
        machine. Also raises StoreFault when the copy is damaged.
        """
        result = self._result(run.path.name)
        if result is None:
            return False
        place = f"stages/{run.path.name}"
        try:
            folder = self._get(place, run.path, RESULT, result.files)
        except Damaged as damage:
            told = (
                f"store {self.files.url}: the copy {place} is damaged ({damage}); remove {place} from the"
                " store and run again"
            )
            raise StoreFault(told) from None
        record = json.loads((folder / REQUEST).read_text())
        write_text(folder / REQUEST, json.dumps(record | {"inputs": request.inputs}, indent=2))
        _move(folder, run.path, RESULT)
        decided = self.files.read(f"{place}/{APPROVAL}")
        if decided:
            write_bytes(run / APPROVAL, decided)
        return True

    def put_state(self, run: RunDir, step: str) -> None:
        """Copies the resume state `step-<n>` to the store, with the metrics, exports, validation answers and
        best iteration to which it refers. Removes the copies of other states.

        Sends the files from a temporary folder, which the stage does not change. Raises OSError if the stage
        removes the state before its files are in that folder.
        """
        last = f"{STATE}/{step}/{LOOP}"
        with TemporaryDirectory(
            prefix=f"{COPYING}{step}-", dir=run / STATE, ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            _collect(run, step, folder)
            files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
            self._put(
                f"states/{run.path.name}/{step}", folder, [file for file in files if file != last], last, {}
            )
        self.drop_states(run, but=step)

    def fetch_state(self, run: RunDir) -> str | None:
        """Fetches the newest resume state with a complete copy into the run directory. Returns its name, or
        None when there is none.

        Skips damaged copies and prints a line about each.
        """
        for step in sorted(self._states(run.path.name), key=lambda step: -int(step.removeprefix("step-"))):
            place = f"states/{run.path.name}/{step}"
            last = f"{STATE}/{step}/{LOOP}"
            loop = self.files.read(f"{place}/{last}")
            if loop is None:
                continue
            try:
                json.loads(loop)
                _move(self._get(place, run.path, last, {}), run.path, last)
                return step
            except ValueError as damage:  # Damaged, or a truncated loop.json
                print(
                    f"store {self.files.url}: the copy {place} is damaged ({damage}) and is not used",
                    flush=True,
                )
        return None

    def drop_states(self, run: RunDir, but: str = "") -> None:
        """Removes the copies of a stage's resume states, except `but`."""
        for step in self._states(run.path.name):
            if step != but:
                self.files.remove(f"states/{run.path.name}/{step}/{STATE}/{step}/{LOOP}")
                self.files.remove(f"states/{run.path.name}/{step}")

    def _put(
        self, place: str, folder: Path, files: Iterable[str], last: str, known: Mapping[str, FileInfo]
    ) -> None:
        """Copies the `files` of a folder, then the list of these files, then the file `last`, which marks the
        copy as complete. Files in `known` are not hashed."""
        self.files.remove(f"{place}/{last}")
        listing: dict[str, dict[str, Any]] = {}
        for file in files:
            size = (folder / file).stat().st_size
            recorded = known[file].sha256 if file in known and known[file].size == size else None
            listing[file] = {"size": size, "sha256": recorded or file_digest(folder / file)}
            self.files.send(folder / file, f"{place}/{file}")
        self.files.write(json.dumps(listing, indent=1).encode(), f"{place}/{FILES}")
        self.files.send(folder / last, f"{place}/{last}")

    def _get(self, place: str, run_dir: Path, last: str, manifest: dict[str, FileInfo]) -> Path:
        """Fetches a copy into a temporary folder inside the run directory, checks all files, and returns the
        folder. Raises Damaged if the copy is incomplete or wrong."""
        try:
            listing = LISTING.validate_json(self.files.read(f"{place}/{FILES}") or b"")
        except ValidationError:
            raise Damaged(f"its {FILES} is missing or cannot be read") from None
        if any(Path(file).is_absolute() or ".." in Path(file).parts for file in listing):
            raise Damaged(f"its {FILES} names files outside of it")
        astray = next((file for file, info in manifest.items() if listing.get(file) != info), None)
        if astray:
            raise Damaged(f"{RESULT} and {FILES} disagree on {astray}")
        folder = run_dir / FETCHING
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted fetch
        for file in [*listing, last]:
            try:
                self.files.get(f"{place}/{file}", folder / file)
            except StoreFault:
                if Path(file).name in self.files.names(Path(place, file).parent.as_posix()):
                    raise
                shutil.rmtree(folder)
                raise Damaged(f"{file} is missing") from None
            info = listing.get(file)
            if info and (
                (folder / file).stat().st_size != info.size or file_digest(folder / file) != info.sha256
            ):
                shutil.rmtree(folder)
                raise Damaged(f"{file} is not what was stored")
        return folder

    def _result(self, name: str) -> StageResult | None:
        try:
            result = StageResult.model_validate_json(self.files.read(f"stages/{name}/{RESULT}") or b"")
        except ValidationError:
            return None  # missing or truncated
        return result if name == f"{result.name}-{result.digest}" else None

    def _states(self, name: str) -> list[str]:
        found = self.files.names(f"states/{name}")
        return [step for step in found if step.startswith("step-") and step.removeprefix("step-").isdigit()]


def store_of(recipe: Recipe) -> Store | None:
    """Returns the store of a recipe; None when the recipe has no store."""
    return Store(recipe.store, recipe.store_checkpoints) if recipe.store else None


def _collect(run: RunDir, step: str, folder: Path) -> None:
    """Puts everything that a resume state needs at the same paths below `folder`: folders as hard links, and
    files as copies, because the stage may append to them. Leaves out exports and answers of later iterations,
    which may be incomplete and which a resumed stage writes again."""
    link_tree(run / STATE / step, folder / STATE / step)
    best = json.loads((folder / STATE / step / LOOP).read_text()).get("best")
    if best:
        link_tree(
            run / STATE / "best" / f"iteration{best[0]}", folder / STATE / "best" / f"iteration{best[0]}"
        )
    past = {f"iteration{number}" for number in range(int(step.removeprefix("step-")) + 1)}
    found = [
        made
        for name in (EXPORTS, ROLLOUTS, KEPT_FOLDER, VALIDATION)
        for made in (run / name).glob("iteration*")
        if made.stem in past
    ]
    for source in [*found, run / METRICS]:
        target = folder / source.relative_to(run.path)
        if source.is_dir():
            link_tree(source, target)
        elif source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _move(source: Path, target: Path, last: str) -> None:
    """Moves all files below `source` to the same relative paths below `target`. Moves the file `last` after
    all others."""
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    sync_to_disk(source)
    for file in sorted(files, key=lambda file: file.as_posix() == last):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / file, target / file)
    shutil.rmtree(source)
