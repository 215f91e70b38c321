"""Records which published model of a recipe is in use, the champion. The record consists of `champion.json`
and the link `champion`, both next to the recipe's report. It also includes the branch `champion` of the
recipe's repository on the Hub, and a copy in the store.

A move is first written to the record, then made on the Hub and in the store, and only then takes effect. If
it is interrupted, the next command or run completes it. The Hub moves a branch in one request (a tag can only
be deleted and recreated), so it always has exactly one champion.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

from rlhf_core.hub.api import RETRIES, Retries, client_options, with_retries, write_refusal
from rlhf_core.records import Frozen
from rlhf_core.runs.lineage import stage_of
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.publication.publication_stage import read_token
from rlhf_core.stages.publication.upload import RECEIPT
from rlhf_core.system.files import locked, read_json, write_text

FILE = "champion.json"
LOCK = ".champion.lock"
LINK = "champion"
BRANCH = "champion"
WAIT_SECONDS = 600.0  # time to wait for another process that moves the champion


class Reign(Frozen):
    """Describes the time that a model is in use. `run` is the name of the publication's run directory.
    `commit` is the commit on the Hub in `repo_id`, or None if the model was published only to a folder.
    `ended` is why it was rolled back, or "" if it was not."""

    run: str
    model: str
    repo_id: str | None
    commit: str | None
    at: datetime
    why: str
    by: str = ""
    ended: str = ""


class Champions(Frozen):
    """Holds the content of `champion.json`: all champions, newest last; the pending move; and the store's
    URL."""

    reigns: tuple[Reign, ...] = ()
    moving: Reign | None = None
    store: str | None = None

    @property
    def now(self) -> Reign | None:
        """Returns the current champion, or None if there has been none."""
        return self.reigns[-1] if self.reigns else None


def champions_of(folder: Path) -> Champions:
    """Reads the record in the folder of a recipe's report. Raises ValueError if it is damaged."""
    if not (folder / FILE).exists():
        return Champions()
    found = Champions.read(folder / FILE)
    if found is None:
        raise ValueError(f"{folder / FILE} cannot be read: restore it from a copy, such as the store's")
    return found


def promote(
    folder: Path,
    run_dir: Path,
    why: str,
    by: str = "",
    store: Store | None = None,
    retries: Retries = RETRIES,
) -> Reign:
    """Makes a published model the champion, and returns its reign.

    Raises ValueError if the run directory has no finished publication of a model, if the Hub rejects the
    request, or if a token is missing. Raises ConnectionError or StoreFault if the Hub or the store cannot be
    reached; the next call of this function or `complete` then finishes the move.
    """
    new = _reign(run_dir, why, by)
    with _moving(folder, store, retries):
        _move(folder, champions_of(folder), new, store, retries)
    return new


def _reign(run_dir: Path, why: str, by: str) -> Reign:
    run = RunDir(run_dir)
    result = run.result()
    request = run.request() if result else None
    model = request.config.published_model if request else None
    if result is None or request is None or model is None:
        raise ValueError(f"{run_dir.name} is no finished publication of a model: give the name of one")
    receipt = read_json(run / RECEIPT) if "hub" in result.outputs else {}
    made = stage_of(request.inputs[model])
    return Reign(
        run=run.path.name,
        model=str(made[1]["name"]) if made else model,
        repo_id=receipt.get("repo_id"),
        commit=receipt.get("commit"),
        at=datetime.now(UTC),
        why=why,
        by=by,
    )


@contextmanager
def _moving(folder: Path, store: Store | None, retries: Retries) -> Iterator[None]:
    """Holds the record's lock, after completing any interrupted move."""
    with locked(folder / LOCK, WAIT_SECONDS) as ours:
        if not ours:
            raise ValueError(
                f"another process moves the champion of {folder.name}: try again when it has ended"
            )
        with suppress(ValueError):  # the Hub refused that move permanently, and this move replaces it
            _complete(folder, store, retries)
        yield


def _move(folder: Path, record: Champions, new: Reign, store: Store | None, retries: Retries) -> None:
    if new.commit:
        read_token(new.repo_id)
    place = {"store": store.files.url} if store else {}
    _write(folder, record.model_copy(update={"moving": new, **place}))
    _complete(folder, store, retries)


def rollback(
    folder: Path,
    why: str,
    by: str = "",
    store: Store | None = None,
    retries: Retries = RETRIES,
    expected: str | None = None,
) -> Reign:
    """Restores the most recent earlier champion that was not rolled back itself. Returns it.

    `expected` is the run of the champion to roll back. If another champion is in use, it stays, and the
    record notes that `expected` was rolled back. Raises ValueError if there is no earlier champion to
    restore, and every error that `promote` raises.
    """
    with _moving(folder, store, retries):
        record = champions_of(folder)
        now = record.now
        if now is None:
            raise ValueError(f"{folder} has no champion to roll back")
        if expected is not None and now.run != expected:
            record = _with_end(record, expected, why)
            _copy(folder, record, store)
            _write(folder, record)
            return now
        gone = {reign.run for reign in record.reigns if reign.ended} | {now.run}
        before = next((reign for reign in reversed(record.reigns) if reign.run not in gone), None)
        if before is None:
            raise ValueError(
                f"{now.run} is the only champion of {folder.name} there was: there is none to go back to"
            )
        new = _reign(folder.parent / "stages" / before.run, f"in place of {now.run}: {why}", by)
        _move(folder, _with_end(record, now.run, why), new, store, retries)
    return new


def _with_end(record: Champions, run: str, why: str) -> Champions:
    """Returns the record with a run's last reign marked as rolled back. A reign that was already rolled back
    keeps its reason."""
    reigns = list(record.reigns)
    at = next((at for at in reversed(range(len(reigns))) if reigns[at].run == run), None)
    if at is not None and not reigns[at].ended:
        reigns[at] = reigns[at].model_copy(update={"ended": why})
    return record.model_copy(update={"reigns": tuple(reigns)})


def runs_kept(folder: Path) -> list[str]:
    """Returns the names of the run directories in the record: for the champion, for earlier champions that
    were not rolled back, and for a pending move."""
    record = champions_of(folder)
    kept = [reign.run for reign in record.reigns if not reign.ended or reign == record.now]
    return list(dict.fromkeys(kept + ([record.moving.run] if record.moving else [])))


def complete(folder: Path, store: Store | None = None, retries: Retries = RETRIES) -> None:
    """Completes an interrupted move, if there is one. Raises the same errors as `promote`."""
    if champions_of(folder).moving is not None:
        with locked(folder / LOCK, WAIT_SECONDS) as ours:
            if ours:
                _complete(folder, store, retries)


def _complete(folder: Path, store: Store | None, retries: Retries) -> None:
    record = champions_of(folder)
    new = record.moving
    if new is None:
        return
    if new.repo_id and new.commit:
        _move_branch(new.repo_id, new.commit, retries)
    done = record.model_copy(update={"reigns": (*record.reigns, new), "moving": None})
    _copy(folder, done, store)
    _link(folder, folder.parent / "stages" / new.run)
    _write(folder, done)


def _copy(folder: Path, record: Champions, store: Store | None) -> None:
    if store is not None:
        store.files.write(record.model_dump_json(indent=2).encode(), f"champions/{folder.name}.json")


def _move_branch(repo_id: str, commit: str, retries: Retries) -> None:
    """Points the branch `champion` at a commit in one request. The Hub's API supports this with the field
    `overwrite`, which its Python client does not offer."""
    api = HfApi(**client_options())
    url = f"{api.endpoint}/api/models/{repo_id}/branch/{BRANCH}"

    def move() -> None:
        headers = build_hf_headers(token=api.token, library_name=api.library_name)
        hf_raise_for_status(
            get_session().post(url, headers=headers, json={"startingPoint": commit, "overwrite": True})
        )
        there = str(api.repo_info(repo_id, revision=BRANCH).sha)
        if there != commit:
            raise ConnectionError(f"the branch {BRANCH} is at {there}, not at {commit}")

    with_retries("move the branch champion", repo_id, move, retries, write_refusal)


def _link(folder: Path, run_dir: Path) -> None:
    """Points the link `champion` at the published folder."""
    result = RunDir(run_dir).result()
    if result is not None:
        new = folder / f".{LINK}.{secrets.token_hex(8)}"
        new.symlink_to(
            os.path.relpath(run_dir / result.outputs["published"], folder), target_is_directory=True
        )
        os.replace(new, folder / LINK)


def _write(folder: Path, record: Champions) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, record.model_dump_json(indent=2) + "\n")
