"""A state is copied, then written beside the next steps; what fails there is raised where training goes
on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from rlhf_core.models.checkpoint.weight_files import fill
from rlhf_core.runs import resume_state
from rlhf_core.runs.resume_state import rank_file
from rlhf_core.runs.run_dir import STATE, RunDir
from rlhf_core.training import state_writer
from rlhf_core.training.state_files import KINDS, WeightPart, read_parts
from rlhf_core.training.state_writer import StateWriter

WAIT = 30.0  # seconds, at most


def parts(value: float) -> list[WeightPart]:
    return [
        WeightPart(name, 0, {kind: torch.full(shape, value + i) for i, kind in enumerate(KINDS)})
        for name, shape in SHAPES.items()
    ]


SHAPES = {"a": (3, 5), "b": (7,), "none": (0,)}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Files are filled once this is set."""
    go = Event()

    def later(*args: Any) -> None:
        assert go.wait(WAIT)
        fill(*args)

    monkeypatch.setattr("rlhf_core.training.state_files.fill", later)
    yield go
    go.set()


@pytest.mark.parametrize("chunk", [4, 2**26])
def test_a_state_is_that_of_the_moment_at_which_it_was_copied(
    chunk: int, held: Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "CHUNK", chunk)
    writer = StateWriter(0, 1)
    trained = parts(1)
    for value in (1, 5):  # the second one takes the memory of the first
        for tensor in (tensor for part in trained for tensor in part.tensors.values()):
            tensor += value - 1
        expected = [{kind: tensor.clone() for kind, tensor in part.tensors.items()} for part in trained]
        writer.start(tmp_path, value, trained)
        assert not (tmp_path / rank_file(0)).exists(), "the file has its name once it is complete"
        for tensor in (tensor for part in trained for tensor in part.tensors.values()):
            tensor -= 17  # the next step
        held.set()
        writer.finish()
        held.clear()
        read_parts(tmp_path, found := parts(0), SHAPES)
        for part, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(part.tensors[kind], wanted[kind]) for kind in KINDS)
        (tmp_path / rank_file(0)).unlink()


def test_a_full_disk_is_told_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("rlhf_core.training.state_files.fill", full)
    writer = StateWriter(0, 1)
    writer.check()
    writer.start(tmp_path, 1, parts(1))
    with pytest.raises(OSError, match="no space left"):
        writer.finish()
    writer.start(tmp_path, 1, parts(1))
    assert writer._thread is not None
    writer._thread.join(WAIT)
    with pytest.raises(OSError, match="no space left"):
        writer.check()
    assert not (tmp_path / rank_file(0)).exists()


def test_without_memory_for_a_copy_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state_writer, "free_memory", lambda: 2**8)
    StateWriter(0, 2).start(tmp_path, 1, parts(1))
    assert (tmp_path / rank_file(0)).exists()
    assert "training waits while the resume state is written" in capsys.readouterr().out


def test_a_state_is_published_once_all_have_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    files = ["actor/rank-00000.safetensors", "actor/rank-00001.safetensors"]
    commit = resume_state.save(run, 2, 1, {"a": 1}, lambda folder: (folder / "actor").mkdir(), files)
    folder = tmp_path / STATE / ".step-2"
    (folder / files[0]).touch()
    commit._thread.join(5 * resume_state.LOOK_SECONDS)
    assert resume_state.latest(run) is None and commit._thread.is_alive()
    (folder / files[1]).touch()
    commit.wait()
    found = resume_state.latest(run)
    assert found is not None and found.step == 2 and all((found.folder / file).exists() for file in files)


def test_what_keeps_a_state_from_being_published_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        resume_state, "sync_to_disk", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "the disk is gone"))
    )
    with pytest.raises(OSError, match="the disk is gone"):
        resume_state.save(RunDir(tmp_path), 2, 1, {}, lambda folder: None).wait()
    assert resume_state.latest(RunDir(tmp_path)) is None
