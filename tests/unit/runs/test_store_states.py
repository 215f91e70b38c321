"""Resume states: their layout, and their copies in a store."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PPO, SFT
from rlhf_core.runs import resume_state
from rlhf_core.runs.remote.remote_files import RemoteFiles, StoreFault
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.resume_state import kept_zero_stage, layout_of
from rlhf_core.runs.run_dir import RunDir
from tasks.stored_stages import states_uploaded


def sft(**changed: Any) -> SFT:
    return SFT.model_validate(
        {"data": {"sources": "rows.jsonl"}, "ranks": {"num_ranks_per_node": 2}, "zero_stage": 2} | changed
    )


def with_state(folder: Path, layout: dict[str, int | str]) -> RunDir:
    run = RunDir(folder)
    resume_state.save(run, 3, 1, {"layout": layout}, lambda _: None).wait()
    return run


def test_a_state_that_was_cut_off_is_not_resumed(tmp_path: Path) -> None:
    """`loop.json` is written last."""
    run = with_state(tmp_path, {})
    (tmp_path / "state" / "step-9").mkdir()
    found = resume_state.latest(run)
    assert found is not None and found.step == 3


def test_what_killed_attempts_wrote_of_a_state_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "state" / ".step-2").mkdir(parents=True)
    (tmp_path / "state" / ".step-2" / "rank-00000.safetensors").write_bytes(b"cut off")
    with_state(tmp_path, {})
    assert [folder.name for folder in (tmp_path / "state").iterdir()] == ["step-3"]


def test_a_stage_left_open_takes_that_of_a_state_of_as_many_ranks(tmp_path: Path) -> None:
    run = with_state(tmp_path, layout_of(sft()))
    assert kept_zero_stage(run, sft(zero_stage="auto")) == 2
    assert kept_zero_stage(run, sft(zero_stage="auto", ranks={"num_ranks_per_node": 4})) is None
    assert kept_zero_stage(RunDir(tmp_path / "new"), sft()) is None


def test_ppo_asks_for_the_ranks_of_both_models(tmp_path: Path) -> None:
    config = PPO.model_validate({"prompts": {"sources": "rows.jsonl"}})
    run = with_state(tmp_path, layout_of(config) | {"zero_stage": 3})
    changed = config.model_copy(
        update={"critic_ranks": config.critic_ranks.model_copy(update={"num_ranks_per_node": 2})}
    )
    assert kept_zero_stage(run, config) == 3
    assert kept_zero_stage(run, changed) is None


def test_a_state_is_copied_whole_while_the_stage_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage logs, exports, validates and removes the state, whenever a file is sent."""
    here = RunDir(tmp_path / "stages" / "ppo-00ff")
    send = RemoteFiles.send
    store = Store(f"file://{tmp_path}/store", attempts=1)

    def write(name: str, text: str) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        with (here / name).open("a") as file:
            file.write(text)

    def save(step: int) -> None:
        best = here / f"state/best/iteration{step}"
        best.mkdir(parents=True, exist_ok=True)
        (best / "model").write_text(f"best {step}")
        resume_state.save(
            here, step, 1, {"best": [step, {}]}, lambda folder: write_state(folder / "rank", step)
        ).wait()

    def write_state(file: Path, step: int) -> None:
        file.write_text(f"state {step}")

    def goes_on(self: RemoteFiles, file: Path, place: str) -> None:
        write("metrics.jsonl", '{"step": 10}\n')
        write("exports/iteration10/model", "cut")
        save(10)
        shutil.rmtree(here / "state/best/iteration9", ignore_errors=True)
        send(self, file, place)

    write("metrics.jsonl", '{"step": 9}\n')
    write("exports/iteration9/model", "whole")
    write("exports/iteration10/model", "cut")
    for folder in ("kept_rollouts", "rollouts", "validation"):
        write(f"{folder}/iteration9.jsonl", "{}\n")
        write(f"{folder}/.iteration9.jsonl.ff", "cut")
    write("kept_rollouts/iteration9.npz", "experts")
    write("kept_rollouts/iteration10.jsonl", "cut")
    save(9)
    monkeypatch.setattr(RemoteFiles, "send", goes_on)
    store.put_state(here, "step-9")
    assert not list((here / "state").glob(".*")), "the links are removed"
    there = RunDir(tmp_path / "other" / "stages" / "ppo-00ff")
    assert store.fetch_state(there) == "step-9"
    found = sorted(
        file.relative_to(there.path).as_posix() for file in there.path.rglob("*") if file.is_file()
    )
    state_files = ["state/best/iteration9/model", "state/step-9/loop.json", "state/step-9/rank"]
    answers = ["rollouts/iteration9.jsonl", *state_files, "validation/iteration9.jsonl"]
    kept = ["kept_rollouts/iteration9.jsonl", "kept_rollouts/iteration9.npz"]
    assert found == ["exports/iteration9/model", *kept, "metrics.jsonl", *answers]
    assert (there / "metrics.jsonl").read_text() == '{"step": 9}\n'
    shutil.rmtree(here / "state/best")
    with pytest.raises(OSError, match="best"):
        store.put_state(here, "step-10")
    # a state without its best iteration is not copied
    assert store.files.names("states/ppo-00ff") == ["step-9"]


@pytest.mark.parametrize("meanwhile", ["nothing", "a newer state", "a result"])
def test_a_failed_copy_is_told_unless_its_state_is_not_needed_any_more(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "sft-0")
    told = []
    tried = threading.Event()

    def save(step: int) -> None:
        resume_state.save(run, step, 2, {}, lambda folder: None).wait()

    def put_state(run: RunDir, name: str) -> None:
        if name == "step-1":
            if meanwhile == "a newer state":
                save(2)
            if meanwhile == "a result":
                monkeypatch.setattr(RunDir, "result", lambda _: SimpleNamespace())
            tried.set()
            raise StoreFault("gone")

    save(1)
    store: Any = SimpleNamespace(checkpoints=True, put_state=put_state)
    with states_uploaded(store, run, lambda *words: told.append(words), every=0.01):
        assert tried.wait(60)
    assert bool(told) is (meanwhile == "nothing")


def test_copies_that_newer_states_overtake_are_told_from_the_second_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "sft-0")
    told = []
    tried = []

    def put_state(run: RunDir, name: str) -> None:
        tried.append(name)
        if len(tried) <= 2:
            resume_state.save(run, len(tried) + 1, 1, {}, lambda folder: None).wait()
            raise StoreFault("gone")
        ended.set()

    ended = threading.Event()
    resume_state.save(run, 1, 1, {}, lambda folder: None).wait()
    left = run / "state" / ".copying-step-1-killed"
    left.mkdir()
    store: Any = SimpleNamespace(checkpoints=True, put_state=put_state)
    with states_uploaded(store, run, lambda text, *values: told.append(text % values), every=0.01):
        assert ended.wait(60)
    assert tried == ["step-1", "step-2", "step-3"]
    assert told == ["the resume state step-2 of sft-0 was not copied: gone"]
    assert not left.exists(), "what a killed run left is removed"


def test_a_commit_ends_when_another_attempt_removes_its_state(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "stage")
    resume_state.open_state(run, 1, clear=True)
    killed = resume_state.StateCommit(run, 1, 1, {}, ["a rank that never writes"])
    resume_state.open_state(run, 2, clear=True)
    with pytest.raises(FileNotFoundError, match="was removed before all of it was written"):
        killed.wait()
