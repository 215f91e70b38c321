"""A resume state that other ranks or another ZeRO stage cannot read is refused before any of them starts, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PPO, SFT
from rlhf_core.forecast.zero_stage import layout_of as layout_of_ppo
from rlhf_core.runs import resume_state
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.ppo import run as ppo
from rlhf_core.training.ranks import on_ranks
from rlhf_core.training.train_loop import layout_of


def started(*_: Any) -> Outcome:
    raise AssertionError("ranks were started")


def sft(**changed: Any) -> SFT:
    return SFT.model_validate({"data": {"sources": "rows.jsonl"}, "ranks": {"num_ranks_per_node": 2}, "zero_stage": 2} | changed)


def request(config: SFT | PPO) -> StageRequest:
    return StageRequest(name="stage", digest="d", config=config, inputs={"sft": "nowhere"}, seed=0)


def with_state(folder: Path, layout: dict[str, int | str]) -> RunDir:
    run = RunDir(folder)
    resume_state.save(run, 3, 1, {"layout": layout}, lambda _: None)
    return run


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ranks": {"num_ranks_per_node": 4}}, "ranks 2, which ranks 4 cannot read: set it back to 2 to resume, or remove that folder"),
        ({"ranks": {}, "zero_stage": "auto"}, "ranks 2, which ranks 1 cannot read"),
        ({"zero_stage": 3}, "zero_stage 2, which zero_stage 3 cannot read"),
    ],
)
def test_training_by_other_ranks_is_refused_and_the_state_kept(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    run = with_state(tmp_path, layout_of(sft()))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/state holds the state of a stage with {reason}"):
        on_ranks(started, request(sft(**changed)), run)
    assert resume_state.latest(run) is not None


def test_a_state_that_was_cut_off_is_not_resumed(tmp_path: Path) -> None:
    """`loop.json` is written last."""
    run = with_state(tmp_path, {})
    (tmp_path / "state" / "step-9").mkdir()
    found = resume_state.latest(run)
    assert found is not None and found.step == 3


def test_a_stage_left_open_takes_that_of_the_state(tmp_path: Path) -> None:
    run = with_state(tmp_path, layout_of(sft()))
    with pytest.raises(ValueError, match="zero_stage 2"):
        resume_state.require_layout(run, layout_of(sft(zero_stage=3)))
    resume_state.require_layout(run, layout_of(sft(zero_stage="auto")))
    resumed = resume_state.latest(run)
    assert resumed is not None and resumed.loop["layout"]["zero_stage"] == 2


def test_ppo_by_other_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "start_processes", started)
    config = PPO.model_validate({"prompts": {"sources": "rows.jsonl"}})
    run = with_state(tmp_path, layout_of_ppo(config) | {"zero_stage": 3})
    changed = config.model_copy(update={"critic_ranks": config.critic_ranks.model_copy(update={"num_ranks_per_node": 2})})
    with pytest.raises(ValueError, match="critic_ranks 1, which critic_ranks 2 cannot read"):
        ppo.run(request(changed), run)
    with pytest.raises(AssertionError, match="ranks were started"):
        ppo.run(request(config), run)
