"""Checkpoints that PPO exports on its way: when, where, and again after a kill. The roles are doubles; loop
and outputs are real."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rlhf_core.cluster.work_log import GroupWork
from rlhf_core.config import PPO, Data
from rlhf_core.rewards.clients import Rewards
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.runs.timeline import Timeline
from rlhf_core.stages.ppo import iteration_loop, train
from rlhf_core.stages.ppo.iteration import Carried, Iteration
from rlhf_core.stages.ppo.measured.probe import Probe
from rlhf_core.stages.ppo.sampling import validation
from rlhf_core.stages.ppo.sampling.validation import HIGH, LOW, REWARD
from tests.support.stage_request import stage_request
from tests.support.states import wait_until_complete


class Roles:
    """Stands for the fleet and its engines: its weights are the number of iterations done."""

    adapters_alone = False

    def __init__(self, unwritten: int | None = None, unsaved: bool = False) -> None:
        self.weights = 0
        self.zero_stage = 3
        self.unwritten = unwritten
        self.sleeps = False
        self.unsaved = unsaved
        self.revivals = 0
        self.loaded = list[str]()
        self.reference = 0  # the iteration whose actor it is

    @property
    def engines(self) -> Roles:
        return self

    def take_work(self) -> dict[str, GroupWork]:
        return {}

    def close(self) -> None: ...

    def decode(self, tokens: object, skip: bool) -> str:
        return str(tokens)

    token_texts = None

    def trained_parameters(self) -> int:
        return 1

    def try_export(self, folder: Path) -> None:
        assert self.weights == 0, "before the first iteration"
        if self.unsaved:
            raise ValueError(f"{folder.name}: the actor could not be saved")

    def export_actor(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.weights))

    def export_average(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(f"average of {self.weights}")

    def save_state(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.weights))

    def state_files(self) -> list[str]:
        return ["weights"] if self.weights != self.unwritten else ["weights", "another rank's"]

    def finish_saving(self) -> None: ...

    def load_state(self, folder: Path) -> None:
        self.weights = int((folder / "weights").read_text())

    def reset_reference(self, folder: Path) -> None:
        self.reference = int((folder / "weights").read_text())

    def load(self, checkpoint: Path) -> None:
        self.loaded.append(checkpoint.name)

    def sync_weights(self, version: int = 0) -> None: ...

    def probe(self, documents: object, synced: bool = True) -> Probe:
        return Probe(0.0, 0.0)


def ppo(
    material: Path,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int | None = None,
    unwritten: int | None = None,
    doubles: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> list[int]:
    """Runs the stage; returns the iterations it did. `killed_at`: the iteration that ends in a kill;
    `unwritten`: the one whose state a rank never finishes; `doubles`: of functions that validate."""
    roles = Roles(unwritten)
    done = []

    def iteration(fleet: Roles, setup: object, carried: Carried, *rest: object) -> Iteration:
        if roles.weights + 1 == killed_at:
            if unwritten is None:
                wait_until_complete()
            raise KeyboardInterrupt
        roles.weights += 1
        done.append(roles.weights)
        metrics = {"reward/mean": 0.1 * roles.weights}
        return Iteration(metrics, 0.0, carried, [], Rewards({}, {}), Timeline(0.0, []), {})

    with monkeypatch.context() as patch:
        usual: dict[str, Any] = {"start_fleet": lambda *_: roles, "ppo_iteration": iteration}
        usual["answer_again"] = lambda engines, fleet, held_out, run: {REWARD: -9.0}
        usual["answer_as"] = lambda engines, fleet, held_out, run, checkpoint: {REWARD: -9.0}
        usual["validate"] = lambda engines, fleet, held_out, run, at: {
            REWARD: -abs(at - 5.0),
            "eval/response/length": 1.0,
        }
        for name, double in (usual | dict(doubles)).items():
            patch.setattr(train if name in ("start_fleet", "Engines") else iteration_loop, name, double)
        prompts = Data.model_validate({"sources": str(material / "prompts.jsonl"), "max_samples": 40})
        sizes = dict(
            rollout_batch_size=8, train_batch_size=8, micro_train_batch_size=8, n_samples_per_prompt=1
        )
        requested = PPO(prompts=prompts, prompt_max_len=48, generate_max_len=24, **sizes, **config)
        inputs = dict.fromkeys(("sft", "reward_model"), str(material / "base"))
        run.prepare(stage_request(requested, inputs))
        run_in_directory(
            run.path, lambda request, run: train.train(request, run, dict.fromkeys(("actor", "sampler")), 0.0)
        )
    return done


def exported(run: RunDir) -> dict[str, str]:
    return {folder.name: (folder / "weights").read_text() for folder in (run / "exports").iterdir()}


def test_the_actor_is_exported_at_the_requested_iterations(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    assert ppo(material, run, monkeypatch, export_at=(2, 5)) == [1, 2, 3, 4, 5]
    assert exported(run) == {"iteration2": "2", "iteration5": "5"}
    assert (run / "checkpoint" / "weights").read_text() == "5"
    result = run.result()
    assert result is not None
    assert result.outputs["exports"] == "exports"
    assert "exports/iteration2/weights" in result.files
    (run / "exports" / "iteration2" / "weights").unlink()
    assert run.result() is None, "a run that lost an export is not done"


def test_the_moving_average_of_the_actor_is_exported_at_the_end(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    ppo(material, run, monkeypatch, ema=0.9, export_at=(2,))
    assert exported(run) == {"iteration2": "2", "ema": "average of 5"}
    result = run.result()
    assert result is not None and "exports/ema/weights" in result.files


def test_an_actor_that_cannot_be_saved_is_not_trained(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles = {"start_fleet": lambda *_: Roles(unsaved=True), "ppo_iteration": pytest.fail}
    with pytest.raises(ValueError, match="export_trial: the actor could not be saved"):
        ppo(material, RunDir(tmp_path / "run"), monkeypatch, doubles=doubles)


def test_a_bug_in_a_reward_function_is_told_before_a_model_is_loaded(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checks.py").write_text("def score(responses):\n    return [scor(r) for r in responses]\n")
    (tmp_path / "world.py").write_text(
        "class World:\n    async def rollout(self, task, model):\n        return nothing\n"
    )
    doubles = {"start_fleet": pytest.fail}
    with pytest.raises(ValueError, match=r"score: a call with a made-up .* NameError: .*checks\.py, line 2"):
        ppo(
            material,
            RunDir(tmp_path / "run"),
            monkeypatch,
            doubles=doubles,
            reward=("reward_model", f"{tmp_path}/checks.py:score"),
        )
    doubles["Engines"] = lambda *_: None
    asked = {
        "reward": ("reward_model", "environment"),
        "environment": f"{tmp_path}/world.py:World",
        "advantage_estimator": "reinforce_pp",
    }
    with pytest.raises(ValueError, match=r"World: an episode with made-up .* NameError: .*world\.py, line 3"):
        ppo(material, RunDir(tmp_path / "other"), monkeypatch, doubles=doubles, **asked)


def test_after_a_kill_every_export_is_that_of_its_iteration(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for killed_at in (2, 3, 4):
        run = RunDir(tmp_path / f"run-{killed_at}")
        with pytest.raises(KeyboardInterrupt):
            ppo(material, run, monkeypatch, killed_at, export_at=(2, 3), save_steps=2)
        # as an export leaves it that a kill ended, or one of other weights
        cut_off = run / "exports" / "iteration3"
        cut_off.mkdir(parents=True, exist_ok=True)
        (cut_off / "weights").write_text("half")
        (cut_off / "model-00002.safetensors").write_text("")
        assert ppo(material, run, monkeypatch, export_at=(2, 3), save_steps=2)[0] == (
            1 if killed_at == 2 else 3
        )
        assert exported(run) == {"iteration2": "2", "iteration3": "3"}
        assert [file.name for file in cut_off.iterdir()] == ["weights"]


def test_an_export_is_on_the_disk_before_the_state_after_it(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    with pytest.raises(KeyboardInterrupt):
        ppo(material, RunDir(tmp_path / "run"), monkeypatch, killed_at=3, export_at=(2,), save_steps=2)
    export, state = (
        next(i for i, path in enumerate(synced) if part in path)
        for part in ("exports/iteration2/weights", "/state/")
    )
    assert export < state


@pytest.mark.parametrize("best_at", [0, 3, 5])
def test_the_result_is_of_answers_that_nothing_was_chosen_by(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best_at: int
) -> None:
    """Engines load the best iteration unless it is the last. What it was chosen by has another name."""
    run = RunDir(tmp_path / "run")
    roles = list[Any]()
    answered = list[str]()

    def again(engines: Any, fleet: Any, held_out: Any, run: Any) -> dict[str, float]:
        roles.append(fleet)
        answered.append("anew")
        return {REWARD: 0.25, "eval/pass@1": 0.5}

    monkeypatch.setattr(validation, "answer_again", again)
    doubles = {"answer_again": again, "answer_as": validation.answer_as}
    doubles["validate"] = lambda engines, fleet, held_out, run, at: {
        REWARD: 1.0 - abs(at - best_at),
        LOW: 0.9,
        HIGH: 1.1,
        "eval/old": 1.0,
    }
    ppo(
        material,
        run,
        monkeypatch,
        eval_prompts={"sources": str(material / "prompts.jsonl")},
        eval_steps=1,
        doubles=doubles,
    )
    result = run.result()
    assert result is not None and answered == ["anew"]
    assert roles[0].loaded == ([] if best_at == 5 else [f"iteration{best_at}"])
    of_best = {name: value for name, value in result.metrics.items() if name.startswith("eval/")}
    assert of_best == {REWARD: 0.25, "eval/pass@1": 0.5, "eval/best_iteration": best_at}
    chosen_by = {name: value for name, value in result.metrics.items() if name.startswith("selection/")}
    assert chosen_by == {
        f"selection/reward/{name}": value
        for name, value in (("mean", 1.0), ("ci_low", 0.9), ("ci_high", 1.1))
    }
    assert (run / "checkpoint" / "weights").read_text() == str(best_at)


def test_engines_with_adapters_answer_again_while_they_have_the_best(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a run is killed after it: the state has the answers' metrics."""
    run = RunDir(tmp_path / "run")
    weights = list[int]()

    def again(engines: Any, fleet: Any, held_out: Any, run: Any) -> dict[str, float]:
        weights.append(fleet.weights)
        return {REWARD: float(fleet.weights)}

    monkeypatch.setattr(Roles, "adapters_alone", True)
    doubles = {
        "answer_again": again,
        "validate": lambda engines, fleet, held_out, run, at: {REWARD: -abs(at - 2.0)},
    }
    how: dict[str, Any] = dict(
        eval_prompts={"sources": str(material / "prompts.jsonl")}, eval_steps=1, save_steps=1
    )
    with pytest.raises(KeyboardInterrupt):
        ppo(material, run, monkeypatch, killed_at=5, doubles=doubles, **how)
    ppo(material, run, monkeypatch, doubles=doubles, **how)
    result = run.result()
    assert result is not None and result.metrics[REWARD] == 2.0 and weights == [0, 1, 2]


def test_a_kill_while_a_state_is_written_loses_no_best_iteration(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    how = {"eval_prompts": {"sources": str(material / "prompts.jsonl")}, "eval_steps": 1, "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        ppo(material, run, monkeypatch, killed_at=4, unwritten=3, **how)
    # that of iteration 3 is not complete
    assert [folder.name for folder in (run / "state").glob("step-*")] == ["step-2"]
    best = {folder.name: (folder / "weights").read_text() for folder in (run / "state" / "best").iterdir()}
    assert best == {"iteration2": "2", "iteration3": "3"}, "those that the two states name"
    assert ppo(material, run, monkeypatch, **how) == [3, 4, 5]
    assert (run / "checkpoint" / "weights").read_text() == "5"


def test_without_exports_nothing_changes_and_an_iteration_beyond_the_end_is_refused(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    ppo(material, run, monkeypatch)
    result = run.result()
    assert result is not None
    assert set(result.outputs) == {"checkpoint", "data_report", "rollouts"}
    assert not (run / "exports").exists()
    with pytest.raises(
        ValueError,
        match=r"^export_at names iteration 6, but the last iteration of this run is 5: lower it, or add prompts$",
    ):
        ppo(material, RunDir(tmp_path / "more"), monkeypatch, export_at=(2, 6))
