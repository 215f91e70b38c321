"""A calibration in a flow: its own process asks a judge played here; a failed gate keeps the evaluation that
names it from starting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tasks.stages
from flows.alignment import alignment
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import GateFailed
from rlhf_core.runs.launch import launch
from tests.support.chat_endpoint import completion, serving
from tests.support.labels import label, write_labels
from tests.support.writing_stages import TEXT, artifacts, attempts, statuses

pytestmark = pytest.mark.usefixtures("prefect", "judge_key")

JUDGE = "{kind: openai, model: judge, base_url: URL, api_key_env: JUDGE_KEY}"
STAGES = f"""
  calibration:
    judge: {JUDGE}
    labels: labels.jsonl
    gates: [{{metric: position_bias/ci_high, max: 0.1, on_fail: branch}}]
"""


def test_a_planted_position_bias_keeps_the_evaluation_from_starting(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(package: str, path: Path, name: str, *rest: Any) -> Any:
        return launch("evaluation" if name == "calibration" else "stage_for_flows", path, name, *rest)

    monkeypatch.setattr(tasks.stages, "launch", started)
    write_labels(Path("labels.jsonl"), *(label(i, ("A>B", "B>A")[i % 2], uid=f"q{i}") for i in range(12)))
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:  # the answer shown first always wins
        waiting = TEXT.replace(
            "evaluation: {models: [loop]",
            f"evaluation: {{models: [loop], calibration: calibration, judges: [{JUDGE}]",
        )
        Path("recipe.yaml").write_text((waiting + STAGES).replace("URL", endpoint.url))
        with pytest.raises(
            GateFailed,
            match=r"stage calibration: position_bias/ci_high is 1, and the gate requires at most 0\.1",
        ):
            alignment(recipe())
        assert len(endpoint.requests) == 24
        assert statuses()["calibration"] == "done"
        assert statuses()["evaluation"] == "not run"
        assert "evaluation" not in attempts()
        shown = artifacts()["calibration-calibration"]
        assert "| position bias: wins of the answer shown first minus shown second | 1.000 |" in shown
        page = Path("artifacts/tiny/report.html").read_text()
        assert "Can the judge be believed?" in page
        assert "failed: the stages that depend on calibration were left out" in page

        alignment(recipe("calibration.gates=[]"))
        assert len(endpoint.requests) == 24 and attempts()[-1] == "evaluation"
        page = Path("artifacts/tiny/report.html").read_text()
        assert "names the same winner as people in 0 % of 12 pairs (kappa 0.00" in page
