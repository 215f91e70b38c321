"""Reads an artifacts folder: its stages, the differences between two runs, and the files that no run needs.
Torch-free.

Records are read as plain JSON, not with the config classes, so that records of other versions can be read.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flows.cli.results.named_runs import is_record, recipe_folder
from rlhf_core.config import KINDS
from rlhf_core.recipe.loops import loop_record
from rlhf_core.recipe.yaml_text import parse
from rlhf_core.records import EvalReport
from rlhf_core.runs.differences import RunDifference, changed, stage_differences
from rlhf_core.runs.lineage import Ancestor, lineage, stage_of
from rlhf_core.runs.run_dir import LOCK, REQUEST, RESULT, STATE, RunDir
from rlhf_core.runs.run_records import PAGE, RUN, RUNS, RunRecord, kept, read, records
from rlhf_core.system.files import is_locked, locked, read_json

STAGES = "stages"
RECIPE = "recipe.yaml"


class ListedStage(NamedTuple):
    """A run directory. `metric`: its main metric, such as `eval/loss 1.23`; `seconds`: None if it is not
    done; `when`: time of its last record."""

    path: Path
    name: str
    kind: str
    digest: str
    state: str  # done, running, unfinished
    when: datetime
    seconds: float | None
    metric: str


class SurveyedItem(NamedTuple):
    """An item that `gc` removes or keeps: a run directory, its resume states, or the page of a run. `size` is
    in bytes; `why`: which runs keep the item or stopped keeping it."""

    path: Path
    size: int
    why: str


Keeping = Callable[[Sequence[RunRecord]], set[str]]  # returns the ids of runs that keep their stages


def stages(artifacts: Path) -> list[ListedStage]:
    """Returns the stages in an artifacts folder, oldest first. Raises ValueError when it has no `stages`
    folder."""
    return sorted(
        (_found(folder, record) for folder, record in _stages(artifacts)), key=lambda found: found.when
    )


def differences(before: Path, after: Path) -> list[RunDifference]:
    """Returns the differences between two run directories (or checkpoints) or two runs. A run is given by its
    record, or by a recipe's folder, which means the last run. Raises ValueError for other paths."""
    recipes = [(place / RUN).is_file() or is_record(place) for place in (before, after)]
    if all(recipes):
        return list(_recipe_differences(before, after))
    stages = [stage_of(folder) for folder in (before, after)]
    problems = [
        f"{folder}: {_why_no_stage(folder)}: give two of <artifacts>/stages/<stage>-<digest>, or two of"
        f" <artifacts>/<recipe> with a {RUN}"
        for folder, stage in zip((before, after), stages, strict=True)
        if stage is None
    ]
    if problems:
        raise ValueError("\n".join(problems))
    (first, record), (second, _) = (stage for stage in stages if stage is not None)
    return list(stage_differences(record["name"], first, second))


def _why_no_stage(folder: Path) -> str:
    if not folder.exists():
        return "this folder does not exist"
    if is_record(folder):
        return "this is a run, but the other argument is not"
    if (folder / RUN).is_file():
        return "this is a recipe's folder, but the other argument is not"
    return (
        "this is neither the folder of a stage nor of a recipe that has run"
        if folder.is_dir()
        else "this is a file"
    )


def lineage_of(place: str) -> Ancestor:
    """Returns the lineage of a checkpoint (`runs.lineage`). Raises ValueError when `place` is neither a
    local path nor a Hub id."""
    ancestor = lineage(place)
    if ancestor.kind == "unknown":
        raise ValueError(
            f"{place}: this file or folder does not exist: give a checkpoint, a stage's directory or a Hub id"
        )
    return ancestor


def survey(artifacts: Path, keeping: Keeping = kept) -> tuple[list[SurveyedItem], list[SurveyedItem]]:
    """Returns what is kept and what can be removed: stages to which no kept run refers, directly or through
    parents, and resume states of finished stages.

    Stages that a process works on or a loop needs are kept, with their ancestors. Raises ValueError when a
    record cannot be read.
    """
    keepers, former = _claims(artifacts, keeping)
    used = []
    garbage = []
    for folder, _ in _stages(artifacts):
        size = size_of(folder)
        if folder not in keepers:
            why = (
                f"of {_few(former[folder])}, which no longer keeps it"
                if former[folder]
                else "no recorded run refers to it"
            )
            garbage.append(SurveyedItem(folder, size, why))
            continue
        if (folder / STATE).is_dir() and not is_locked(folder / LOCK) and RunDir(folder).result() is not None:
            garbage.append(
                SurveyedItem(folder / STATE, size_of(folder / STATE), "resume states of a finished stage")
            )
            size -= garbage[-1].size
        used.append(SurveyedItem(folder, size, _few(keepers[folder])))
    runs = records(artifacts)
    keep = keeping(runs)
    for run in runs:
        page = run.file.with_suffix(PAGE)
        if run.id not in keep and page.is_file():
            garbage.append(
                SurveyedItem(
                    page,
                    page.stat().st_size,
                    f"the page of run {run.label}, which no longer keeps its stages",
                )
            )
    return used, garbage


def remove(item: SurveyedItem, keeping: Keeping = kept) -> bool:
    """Removes a folder unless a process works in it or a run now keeps it; for a page, removes it unless its
    run is kept. Returns whether the item was removed."""
    if item.path.suffix == PAGE:
        return _remove_page(item.path, keeping)
    folder = item.path.parent if item.path.name == STATE else item.path
    with locked(folder / LOCK) as ours:
        if not ours or (
            item.path == folder and folder in _claims(folder.parents[1], keeping, locks=False)[0]
        ):
            return False
        if item.path == folder:
            # first, so that a partly removed stage does not count as done
            (folder / RESULT).unlink(missing_ok=True)
        shutil.rmtree(item.path)
    return True


def _remove_page(page: Path, keeping: Keeping) -> bool:
    if page.stem in keeping(records(page.parents[2])):
        return False
    page.unlink(missing_ok=True)
    return True


def stores(artifacts: Path) -> list[str]:
    """Returns the stores named by the recipes in an artifacts folder. `stages` and `survey` do not read
    them."""
    found = (_top(file.parent).get("store") for file in sorted(artifacts.glob(f"*/{RECIPE}")))
    return list(dict.fromkeys(str(store) for store in found if store))


def size_of(folder: Path) -> int:
    """Returns the total size in bytes of all files below a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() or file.is_symlink())


def _stages(artifacts: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the run directories with their `config.json`; other folders are ignored. Raises ValueError if
    there is no `stages` folder."""
    if not (artifacts / STAGES).is_dir():
        raise ValueError(f"{artifacts} has no folder {STAGES}: give the `artifacts` folder of a recipe")
    for folder in sorted((artifacts / STAGES).resolve().iterdir()):
        stage = stage_of(folder) if (folder / REQUEST).is_file() and not folder.is_symlink() else None
        if stage is not None and folder.name == f"{stage[1]['name']}-{stage[1]['digest']}":
            yield stage


def _found(folder: Path, record: Mapping[str, Any]) -> ListedStage:
    result = RunDir(folder).result()
    config = record["config"]
    kind = KINDS.get(config["stage"])
    names = () if kind is None else kind.main_metrics(config)
    metrics = result.metrics if result else {}
    metric = next((f"{name} {metrics[name]:.4g}" for name in names if name in metrics), "")
    state = "running" if is_locked(folder / LOCK) else "unfinished"
    if result:
        state = "done"
    when = datetime.fromtimestamp((folder / (RESULT if result else REQUEST)).stat().st_mtime)
    return ListedStage(
        folder,
        record["name"],
        config["stage"],
        record["digest"],
        state,
        when,
        result.seconds if result else None,
        metric,
    )


def _recipe_differences(before: Path, after: Path) -> Iterator[RunDifference]:
    records_of_runs = is_record(before) or is_record(after)
    files = [_record_of(place) for place in (before, after)]
    old, new = ({stage.name: stage for stage in read(file).require_whole().stages} for file in files)
    recipes = map(_recipe_of_run, files) if records_of_runs else map(_top, (before, after))
    yield from (RunDifference("", "recipe", *change) for change in changed(*recipes))
    for name in {**old, **new}:
        if name not in old or name not in new:
            yield RunDifference(
                name, "stages", "", *("there" if name in side else "not there" for side in (old, new))
            )
            continue
        sides = ((files[0], old), (files[1], new))
        paths = [recipe_folder(file).absolute().parent / stages[name].run_dir for file, stages in sides]
        if paths[0].resolve() != paths[1].resolve():
            yield from stage_differences(name, *paths)
            yield from _win_rates(name, *paths)


def _record_of(place: Path) -> Path:
    """Returns the record of a run: the given one, or the record of a recipe folder's last run, from `runs/`
    if it is there."""
    if is_record(place):
        return place
    last = read(place / RUN)
    own = (run for run in map(read, (place / RUNS).glob("*.json")) if run.started == last.started)
    return next((run.file for run in own), place / RUN)


def _recipe_of_run(record: Path) -> dict[str, Any]:
    """Returns a recipe's top-level fields as used by a run, without its stages; if the record has none,
    returns the fields of the last run."""
    config = read_json(record).get("config")
    if not isinstance(config, dict):
        return _top(recipe_folder(record))
    return {key: value for key, value in config.items() if key != "stages"}


def _win_rates(name: str, before: Path, after: Path) -> Iterator[RunDifference]:
    """Yields the win rates that differ between two evaluations, with their 95 % intervals."""
    for model, *texts in changed(*map(_win_rate_texts, (before, after))):
        yield RunDifference(name, "win rate", model, *texts)


def _win_rate_texts(run_dir: Path) -> dict[str, str]:
    result = RunDir(run_dir).result()
    place = result.outputs.get("report") if result else None
    report = EvalReport.read(run_dir / place / "eval.json") if place else None
    rates = [rate for rate in report.win_rates if rate.judge == report.judge] if report else []
    return {rate.model: f"{rate.win_rate:.1%} ({rate.ci_low:.1%} to {rate.ci_high:.1%})" for rate in rates}


def _claims(
    artifacts: Path, keeping: Keeping, locks: bool = True
) -> tuple[dict[Path, list[str]], dict[Path, list[str]]]:
    """Returns, for each run directory, the reasons for keeping it, and the runs that stopped keeping it.
    `locks`: whether a process that works in a directory keeps it."""
    runs = [run.require_whole() for run in records(artifacts)]
    parents = cache(_parents)
    keep = keeping(runs)
    claims = []
    for run in runs:
        what = ", running" if run.state == "running" else ""
        if run.pinned:
            what = ", pinned"
        claims.append(
            (
                f"run {run.label}{what}",
                run.id in keep,
                [(artifacts / stage.run_dir).resolve() for stage in run.stages],
            )
        )
    for file in sorted(artifacts.glob(f"*/{loop_record.FILE}")):
        rounds = [(artifacts / STAGES / name).resolve() for name in loop_record.directories(file.parent)]
        claims.append((f"the loop of {file.parent.name}", True, rounds))
    for file in sorted(artifacts.glob("*/champion.json")):
        from rlhf_core.stages.publication.champion_record import runs_kept  # imports the Hub's client

        reigns = [(artifacts / STAGES / name).resolve() for name in runs_kept(file.parent)]
        claims.append((f"the champions of {file.parent.name}", True, reigns))
    if locks:
        claims += [
            ("a process that is working on it", True, [folder])
            for folder, _ in _stages(artifacts)
            if is_locked(folder / LOCK)
        ]
    keepers = defaultdict[Path, list[str]](list)
    former = defaultdict[Path, list[str]](list)
    for label, keeps, folders in claims:
        for folder in _closure(folders, parents):
            (keepers if keeps else former)[folder].append(label)
    return keepers, former


def _few(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _closure(folders: list[Path], parents: Callable[[Path], list[Path]]) -> set[Path]:
    """Returns the run directories and the run directories of all their ancestors."""
    kept: set[Path] = set()
    while folders:
        folder = folders.pop()
        if folder not in kept:
            kept.add(folder)
            folders += parents(folder)
    return kept


def _parents(folder: Path) -> list[Path]:
    found = (stage_of(place) for place in read_json(folder / REQUEST).get("inputs", {}).values())
    return [parent[0].resolve() for parent in found if parent is not None]


def _top(folder: Path) -> dict[str, Any]:
    """Returns a recipe's top-level fields, without its stages; {} when it cannot be read."""
    try:
        recipe = parse((folder / RECIPE).read_text(), RECIPE)
    except (OSError, ValueError):
        return {}
    return (
        {key: value for key, value in recipe.items() if key != "stages"} if isinstance(recipe, dict) else {}
    )
