"""A stage is refused where a file that decides its result is not what it was when the run was planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.launch import StageFailed
from rlhf_core.system.files import Digests
from tasks.stages import require_unchanged

TEXT = """
name: tiny
base_model: base
stages:
  sft: {data: {sources: train.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}, reward: ["reward.py:score"], advantage_estimator: reinforce_pp}
"""


def test_data_models_and_code_that_change_after_the_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    files = {
        "recipe.yaml": TEXT,
        "base/config.json": "{}",
        "train.jsonl": '{"a": 1}\n',
        "reward.py": "def score(): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    # prompts.jsonl is not there yet: the check before a run says so
    planned = plan(load_recipe("recipe.yaml", ()))
    requests = [planned.request(planned[name]) for name in ("sft", "ppo")]
    assert [set(request.contents) for request in requests] == [
        {str(tmp_path / "train.jsonl"), str(tmp_path / "base")},
        {str(tmp_path / "reward.py")},
    ]
    for name, stage in (("train.jsonl", "sft"), ("base/config.json", "sft"), ("reward.py", "ppo")):
        for request in requests:
            require_unchanged(request, Digests())
        (tmp_path / name).write_text(files[name] + " ")
        with pytest.raises(
            StageFailed, match=f"stage {stage}: .*changed since the run was planned: run again"
        ) as caught:
            for request in requests:
                require_unchanged(request, Digests())
        assert not caught.value.can_retry
        (tmp_path / name).write_text(files[name])
