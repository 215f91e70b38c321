"""Deletes one person's feedback from the inbox, the files that stages read, run directories and their copies
in stores.

The inbox is changed last, so that an interrupted deletion can be repeated from the start. A checkpoint cannot
forget a row that it was trained on, so the affected stages are listed. Torch-free.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.take import FOLDER
from rlhf_core.records import FileInfo, StageResult
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import LOCK, METRICS, REQUEST, RESULT, STATE, RunDir
from rlhf_core.system.files import file_digest, is_locked, read_json, write_text

ALL_KINDS = ("thumb", "edit", "ranking")


class Forgotten(NamedTuple):
    """The results of a deletion. `rows`: number of rows deleted from the inbox. `files`: changed files that
    held copies of rows. `trained`: stages that read the rows, and stages that used their outputs."""

    rows: int
    files: list[str]
    trained: list[str]


def forget(
    inbox: Inbox, annotator: str, artifacts: Sequence[Path] = (), stores: Sequence[Store] = ()
) -> Forgotten:
    """Deletes one person's rows and returns what was affected. Raises ValueError while a stage that reads
    them is running or another process holds the inbox, and StoreFault when a store cannot be used."""
    with inbox.changing() if inbox.exists else nullcontext(True) as ours:  # no stage takes rows meanwhile
        if not ours:
            raise ValueError(
                f"{inbox.folder}: another process takes or deletes rows of it: try again when it has ended"
            )
        return _forget(inbox, annotator, artifacts, stores)


def _forget(inbox: Inbox, annotator: str, artifacts: Sequence[Path], stores: Sequence[Store]) -> Forgotten:
    rows = [stored for stored in inbox.rows(ALL_KINDS) if stored.row.annotator == annotator]
    gone = {stored.seq for stored in rows}
    texts = {json.dumps([message["content"] for message in stored.row.prompt]) for stored in rows}
    for cut_off in (inbox.folder / FOLDER).glob(".*"):  # left by a killed `take`
        cut_off.unlink(missing_ok=True)
    taken = [file for file in sorted((inbox.folder / FOLDER).glob("*.jsonl")) if _holds(file, gone)]
    runs = [
        RunDir(folder)
        for place in artifacts
        for folder in sorted((place / "stages").glob("*"))
        if (folder / REQUEST).is_file()
    ]
    real = {file.resolve() for file in taken}
    readers = [
        run
        for run in runs
        if real & {Path(place).resolve() for place in _sources(read_json(run / REQUEST).get("config"))}
    ]
    busy = next((run for run in readers if is_locked(run / LOCK)), None)
    if busy:
        raise ValueError(
            f"stage {busy.path.name} is running on these rows: cancel its run, or wait until it ends"
        )
    families = _descendants(readers, runs)
    files = [str(file) for run in families for file in _clean(run, texts, stores, run in readers)]
    for file in taken:
        _filter(file, lambda line: json.loads(line).get("feedback") not in gone)
        files.append(str(file))
    inbox.delete(annotator)
    return Forgotten(len(rows), files, [run.path.name for run in families])


def _holds(file: Path, gone: Collection[int]) -> bool:
    return any(json.loads(line).get("feedback") in gone for line in _lines(file))


def _descendants(readers: Sequence[RunDir], runs: Sequence[RunDir]) -> list[RunDir]:
    """Returns the stages that read the rows, and all stages that use their outputs directly or indirectly."""
    found = list(readers)
    for run in found:
        inside = f"{run.path}{os.sep}"
        for other in runs:
            if all(other.path != known.path for known in found):
                inputs = read_json(other / REQUEST).get("inputs", {})
                if any(str(place).startswith(inside) for place in inputs.values()):
                    found.append(other)
    return found


def _clean(run: RunDir, prompts: Collection[str], stores: Sequence[Store], reader: bool) -> Iterator[Path]:
    """Removes rows with these prompts from a run directory's JSON lines, and the state of an unfinished stage
    that read them. Yields changed files. Then updates the manifest in the stage's result and the copies in
    stores."""
    result = StageResult.read(run / RESULT)
    if result is None and reader and (run / STATE).is_dir():
        shutil.rmtree(run / STATE)  # the stage restarts, because its state has seen the rows
        yield run / STATE
    for file in sorted(run.path.rglob("*.jsonl")):
        if file.name != METRICS and _filter(file, lambda line: _prompt_of(line) not in prompts):
            yield file
    changed = (
        {name: _info(run / name) for name, info in result.files.items() if _is_shorter(run / name, info)}
        if result
        else {}
    )
    if result is not None and changed:  # also true after an interrupted deletion
        write_text(
            run / RESULT,
            result.model_copy(update={"files": {**result.files, **changed}}).model_dump_json(indent=2),
        )
    for store in stores:
        if store.differs(run):
            store.replace(run)


def _is_shorter(file: Path, info: FileInfo) -> bool:
    return file.suffix == ".jsonl" and file.is_file() and file.stat().st_size < info.size


def _sources(config: Any) -> Iterator[str]:
    """Yields the paths of the data sources in a stage's config."""
    if isinstance(config, dict):
        if isinstance(config.get("path"), str):
            yield config["path"]
        config = list(config.values())
    for part in config if isinstance(config, list) else ():
        yield from _sources(part)


def _prompt_of(line: str) -> str:
    """Returns the contents of a row's prompt as JSON; '' for a row without a prompt."""
    try:
        row: Any = json.loads(line)
    except ValueError:
        return ""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if isinstance(prompt, str):
        return json.dumps([prompt])
    return (
        json.dumps([message.get("content") for message in prompt])
        if isinstance(prompt, list) and prompt
        else ""
    )


def _lines(file: Path) -> Iterator[str]:
    with file.open() as lines:
        yield from lines


def _filter(file: Path, keep: Callable[[str], bool]) -> bool:
    """Removes the lines of a file that `keep` rejects. Returns whether there were any such lines."""
    if all(keep(line) for line in _lines(file)):
        return False
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w") as out:
        out.writelines(line for line in _lines(file) if keep(line))
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    return True


def _info(file: Path) -> FileInfo:
    return FileInfo(size=file.stat().st_size, sha256=file_digest(file))
