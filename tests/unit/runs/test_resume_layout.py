"""Which resume state a stage goes on from, and under which ZeRO stage where the recipe leaves it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config import PPO, SFT
from rlhf_core.runs import resume_state
from rlhf_core.runs.resume_state import kept_zero_stage, layout_of
from rlhf_core.runs.run_dir import RunDir


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
