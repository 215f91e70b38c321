"""What lies in an artifacts folder: runs, what two of them differ in, what nothing refers to. Torch-free; reads records as plain JSON,
so that those of an older version can still be told.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

from rlhf_core import loops
from rlhf_core.lineage import Ancestor, lineage, stage_of
from rlhf_core.passwords import without_passwords
from rlhf_core.stage import LOCK, REQUEST, RESULT, STATE, RunDir, read_json
from rlhf_core.tax_tasks import task_name

STAGES, RUN, RECIPE = "stages", "run.json", "recipe.yaml"
MAIN = {
    "sft": ("eval/loss", "loss"),
    "reward_model": ("eval/accuracy", "accuracy"),
    "dpo": ("eval/accuracy", "accuracy"),
    "kto": ("eval/accuracy", "accuracy"),
    "preferences": ("pairs", "answers"),
    "ppo": ("reward/last_fifth", "reward/mean"),
    "publication": ("files",),
}  # by kind: the first of these metrics that the result has


class Found(NamedTuple):
    """A stage's directory. `metric` is the main one, such as `eval/loss 1.23`; `seconds` None: not done; `when` of its last record."""

    path: Path
    name: str
    kind: str
    digest: str
    state: str  # done, running, unfinished
    when: datetime
    seconds: float | None
    metric: str


class Difference(NamedTuple):
    """One thing two runs differ in. `part`: stages, recipe, configuration, inputs, versions, metrics or digest."""

    stage: str
    part: str
    key: str
    before: str
    after: str


class Garbage(NamedTuple):
    """What may go. `path` is a stage's directory or its resume states, `size` in bytes."""

    path: Path
    size: int
    why: str


def runs(artifacts: Path) -> list[Found]:
    """The stages of an artifacts folder, the oldest first. ValueError when it is none."""
    return sorted((_found(folder, record) for folder, record in _stages(artifacts)), key=lambda found: found.when)


def differences(before: Path, after: Path) -> list[Difference]:
    """What changed between two stages' directories (or checkpoints), or two recipe folders. ValueError when they are neither."""
    recipes = [(folder / RUN).is_file() for folder in (before, after)]
    if all(recipes):
        return list(_recipe_differences(before, after))
    stages = [stage_of(folder) for folder in (before, after)]
    for folder, stage in zip((before, after), stages, strict=True):
        if stage is None:
            raise ValueError(
                f"{folder} is no stage's directory: give two of <artifacts>/stages/<stage>-<digest>, or two recipe folders with a {RUN}"
            )
    (first, record), (second, _) = (stage for stage in stages if stage is not None)
    return list(_stage_differences(record["name"], first, second))


def lineage_of(place: str) -> Ancestor:
    """As `rlhf_core.lineage.lineage`; ValueError for what is neither here nor a Hub id."""
    ancestor = lineage(place)
    if ancestor.kind == "unknown":
        raise ValueError(f"{place}: there is no such file or folder; give a checkpoint, a stage's directory or a Hub id")
    return ancestor


def garbage(artifacts: Path) -> list[Garbage]:
    """Stages that no recipe folder of `artifacts` refers to, not even by way of parents, and resume states of stages that are done.

    What a process works on, and whatever that needs, is never among them. ValueError when a recipe folder cannot be read: then
    nobody knows what it refers to.
    """
    stages = dict(_stages(artifacts))
    kept = _closure([*_referred(artifacts), *(folder for folder in stages if is_locked(folder))])
    found = []
    for folder in stages:
        if folder not in kept:
            found.append(Garbage(folder, size_of(folder), "no recipe here refers to it"))
        elif (folder / STATE).is_dir() and not is_locked(folder) and RunDir(folder).result() is not None:
            found.append(Garbage(folder / STATE, size_of(folder / STATE), "resume states of a stage that is done"))
    return found


def remove(item: Garbage) -> bool:
    """Removes it unless a process works there or a recipe has come to refer to it. Returns whether it is gone."""
    folder = item.path.parent if item.path.name == STATE else item.path
    with _lock(folder) as ours:
        if not ours or (item.path == folder and folder in _referred(folder.parents[1])):
            return False
        if item.path == folder:
            (folder / RESULT).unlink(missing_ok=True)  # first: what is half gone must not look done
        shutil.rmtree(item.path)
    return True


def stores(artifacts: Path) -> list[str]:
    """The stores that the recipes of an artifacts folder name. `runs` and `garbage` do not look into them."""
    found = (_top(file.parent).get("store") for file in sorted(artifacts.glob(f"*/{RECIPE}")))
    return list(dict.fromkeys(str(store) for store in found if store))


def is_locked(folder: Path) -> bool:
    """Whether a process works in a stage's directory, or nobody may tell."""
    if not (folder / LOCK).exists():
        return False
    with _lock(folder) as ours:
        return not ours


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() or file.is_symlink())


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Holds a stage's lock for a moment, if it is free."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _stages(artifacts: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The stages' directories with their requests. Whatever else lies there is left alone."""
    if not (artifacts / STAGES).is_dir():
        raise ValueError(f"{artifacts} has no folder {STAGES}: give the `artifacts` folder of a recipe")
    for folder in sorted((artifacts / STAGES).resolve().iterdir()):
        stage = stage_of(folder) if (folder / REQUEST).is_file() and not folder.is_symlink() else None
        if stage is not None and folder.name == f"{stage[1]['name']}-{stage[1]['digest']}":
            yield stage


def _found(folder: Path, record: Mapping[str, Any]) -> Found:
    result = RunDir(folder).result()
    config = record["config"]
    names = _main(config)
    metrics = result.metrics if result else {}
    metric = next((f"{name} {metrics[name]:.4g}" for name in names if name in metrics), "")
    state = "done" if result else "running" if is_locked(folder) else "unfinished"
    when = datetime.fromtimestamp((folder / (RESULT if result else REQUEST)).stat().st_mtime)
    return Found(folder, record["name"], config["stage"], record["digest"], state, when, result.seconds if result else None, metric)


def _main(config: Mapping[str, Any]) -> Sequence[str]:
    """The metric that says most about a stage; the first one that it has counts."""
    if config["stage"] == "evaluation":
        return (f"win_rate/{config['models'][-1]}",)
    if config["stage"] == "alignment_tax":
        return [f"tax/{task_name(task)}" for task in config["tasks"]]
    return MAIN.get(config["stage"], ())


def _recipe_differences(before: Path, after: Path) -> Iterator[Difference]:
    old, new = ({stage["name"]: stage for stage in _read_run(folder)["stages"]} for folder in (before, after))
    yield from (Difference("", "recipe", *change) for change in _changed(_top(before), _top(after)))
    for name in {**old, **new}:
        if name not in old or name not in new:
            yield Difference(name, "stages", "", *("there" if name in side else "not there" for side in (old, new)))
            continue
        paths = [folder.absolute().parent / stages[name]["run_dir"] for folder, stages in ((before, old), (after, new))]
        if paths[0].resolve() != paths[1].resolve():
            yield from _stage_differences(name, *paths)


def _stage_differences(name: str, before: Path, after: Path) -> Iterator[Difference]:
    old, new = (read_json(folder / REQUEST) for folder in (before, after))
    results = [read_json(folder / RESULT) for folder in (before, after)]
    parts = {
        "configuration": [{"seed": request.get("seed"), **request.get("config", {})} for request in (old, new)],
        "inputs": [{key: _content(place) for key, place in request.get("inputs", {}).items()} for request in (old, new)],
        "versions": [result.get("environment", {}) for result in results],
        "metrics": [result.get("metrics", {}) for result in results],
    }
    changes = [Difference(name, part, *change) for part, (first, second) in parts.items() for change in _changed(first, second)]
    digests = [request.get("digest", folder.name.rpartition("-")[2]) for request, folder in ((old, before), (new, after))]
    if digests[0] != digests[1]:
        told = any(change.part in ("configuration", "inputs") for change in changes)
        yield Difference(name, "digest", "" if told else "its data, its base model or the stage's code", *digests)
    yield from changes
    for side, result in zip(("before", "after"), results, strict=True):
        if not result:
            yield Difference(name, "metrics", f"no result {side}", *(("not done", "") if side == "before" else ("", "not done")))


def _changed(old: object, new: object, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, before, after) of all leaves that differ; '-' where there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _changed(old.get(name, "-"), new.get(name, "-"), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, _text(old), _text(new)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return without_passwords(text)


def _content(place: str) -> str:
    """An input as it can be compared: a stage by name and digest, else the place."""
    stage = stage_of(place)
    return f"{stage[1]['name']}-{stage[1]['digest']}" if stage else place


def _referred(artifacts: Path) -> list[Path]:
    """The stages' directories that the recipe folders name, and those of finished rounds of loops."""
    folders = sorted(file.parent for file in artifacts.glob(f"*/{RUN}"))
    named = [(artifacts / stage["run_dir"]).resolve() for folder in folders for stage in _read_run(folder)["stages"]]
    rounds = [name for file in sorted(artifacts.glob(f"*/{loops.FILE}")) for name in loops.directories(file.parent)]
    return named + [(artifacts / STAGES / name).resolve() for name in rounds]


def _closure(folders: list[Path]) -> set[Path]:
    """Stages' directories, and those of all their ancestors."""
    kept: set[Path] = set()
    while folders:
        folder = folders.pop()
        if folder not in kept:
            kept.add(folder)
            parents = (stage_of(place) for place in read_json(folder / REQUEST).get("inputs", {}).values())
            folders += [parent[0].resolve() for parent in parents if parent is not None]
    return kept


def _read_run(folder: Path) -> dict[str, Any]:
    run = read_json(folder / RUN)
    if not isinstance(run.get("stages"), list):
        raise ValueError(f"{folder / RUN} cannot be read: run the recipe again, or remove {folder} if nothing needs it")
    return run


def _top(folder: Path) -> dict[str, Any]:
    """A recipe's own fields, without its stages."""
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return {key: value for key, value in recipe.items() if key != "stages"} if isinstance(recipe, dict) else {}
