"""What is called whole is on the disk before it is: a state, a result, what came from a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.config import SFT, Data
from rlhf_core.runs import resume_state
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import RESULT, STATE, Outcome, RunDir, StageRequest
from rlhf_core.system.files import sync_to_disk
from tests.support.stage_request import stage_request


class Written:
    """`when[name]`: which files and folders were on the disk when something got this name, by the names they
    had."""

    def __init__(self) -> None:
        self.settled: set[str] = set()
        self.when: dict[str, set[str]] = {}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    seen = Written()
    fsync = os.fsync
    replace = os.replace

    def synced(handle: int) -> None:
        fsync(handle)
        seen.settled.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    def replaced(source: Path, target: Path) -> None:
        seen.when.setdefault(Path(target).name, set(seen.settled))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return seen


def request() -> StageRequest:
    return stage_request(SFT(model="base", data=Data(sources="d.jsonl")), digest="0" * 16)


def fill(folder: Path) -> None:
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights.safetensors").write_bytes(b"w" * 1000)
    (folder / "loader.json").write_text("{}")


def done(run: RunDir) -> None:
    run.prepare(request())
    fill(run / "model")
    run.finish(request(), Outcome({}, {"model": "model", "table": "model/loader.json"}), 1.0)


FILES = {"actor", "weights.safetensors", "loader.json"}


def test_a_state(tmp_path: Path, written: Written) -> None:
    resume_state.save(RunDir(tmp_path), 3, 1, {"epoch": 1}, fill).wait()
    assert written.when["step-3"] >= FILES
    found = resume_state.latest(RunDir(tmp_path))
    assert found is not None
    assert found.step == 3
    assert found.loop == {"epoch": 1}
    assert os.listdir(tmp_path / STATE) == ["step-3"]


def test_a_result(tmp_path: Path, written: Written) -> None:
    done(RunDir(tmp_path))
    assert written.when[RESULT] >= FILES | {"model"}


def test_what_came_from_a_store(tmp_path: Path, written: Written) -> None:
    run = RunDir(tmp_path / "a" / "sft-0000000000000000")
    elsewhere = RunDir(tmp_path / "b" / "sft-0000000000000000")
    store = tmp_path / "store"
    done(run)
    Store(str(store), False).put(run)
    written.settled.clear()
    written.when.clear()
    elsewhere.prepare(request())
    assert Store(str(store), False).fetch(elsewhere, request())
    assert written.when["weights.safetensors"] >= FILES
    assert written.when[RESULT] >= FILES
    assert elsewhere.result() is not None


def test_file_systems_without_folders_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written of a file is told, of a folder is not."""
    fill(tmp_path / "model")

    def refuses(which: Callable[[Path], bool]) -> None:
        def fsync(handle: int) -> None:
            if which(Path(os.readlink(f"/proc/self/fd/{handle}"))):
                raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "fsync", fsync)

    refuses(Path.is_dir)
    sync_to_disk(tmp_path / "model")
    refuses(Path.is_file)
    with pytest.raises(OSError, match="Invalid argument"):
        sync_to_disk(tmp_path / "model")
