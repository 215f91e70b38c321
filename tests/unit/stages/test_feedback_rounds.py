"""Two rounds of training on feedback, by DPO on edits and rankings and by KTO on thumbs: real stages, a tiny
model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
from rlhf_core.config import Recipe
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import ReceivedRow, receive
from rlhf_core.recipe.loops.loop_state import loop_state
from rlhf_core.recipe.loops.round_steps import begin, finish
from rlhf_core.runs.run_dir import RunDir, run_in_directory

WORK = {"dpo": rlhf_core.stages.dpo.run, "kto": rlhf_core.stages.kto.run}


def feedback(material: Path, method: str, first: int, count: int) -> list[ReceivedRow]:
    pairs = [
        json.loads(line)
        for line in (material / "preferences.jsonl").read_text().splitlines()[first : first + count]
    ]
    rows: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs):
        prompt = pair["prompt"]
        good = pair["chosen"]
        bad = pair["rejected"]
        if method == "kto":
            rows += [
                {"prompt": prompt, "response": good, "thumb": "up"},
                {"prompt": prompt, "response": bad, "thumb": "down"},
            ]
        else:
            rows.append(
                {"prompt": prompt, "response": bad, "edited": good}
                if number % 2
                else {"prompt": prompt, "ranking": [good, bad]}
            )
    return [ReceivedRow(f"row {number}", row) for number, row in enumerate(rows)]


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_each_round_learns_what_is_new_from_the_round_before(
    material: Path, tmp_path: Path, method: str
) -> None:
    inbox = Inbox(tmp_path / "chat.inbox")
    size = dict(train_batch_size=8, micro_train_batch_size=8, max_len=96, learning_rate=1e-3, max_epochs=3)
    loop = {
        "stage": "iterative_feedback",
        "method": method,
        "policy": "base",
        "feedback": {"sources": str(inbox.folder)},
        "rounds": 1,
        **size,
    }
    recipe = Recipe(
        name="town",
        base_model=str(material / "base"),
        artifacts=str(tmp_path / "artifacts"),
        stages={"loop": loop},
    )
    for number in (1, 2):
        done = receive(inbox, feedback(material, method, 16 * number, 16), Questions(()))
        assert (done.new, done.wrong) == (16 if method == "dpo" else 32, 0)
        found = begin(recipe, loop_state(recipe, "loop"))
        (node,) = found.plan.stages_of(f"loop.round{number}")
        run = RunDir(node.run_dir)
        run.prepare(found.plan.request(node))
        result = run_in_directory(node.run_dir, WORK[method])
        finish(found)
        report = json.loads((run / "data_report.json").read_text())["data"]
        assert report["rows"] == done.new
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert (
            lines[-1]["margin"] > lines[0]["margin"]
            if method == "dpo"
            else lines[-1]["loss"] < lines[0]["loss"]
        )
        assert (run / result.outputs["checkpoint"]).is_dir()
    inputs = found.plan.request(node).inputs
    assert any("loop.round1" in place for place in inputs.values())
