"""The shipped recipe with images, as a user runs it: SFT, GRPO, evaluation and publication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "tiny-vision-cpu.yaml"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def run(folder: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_tiny_model_learns_to_look(tmp_path: Path) -> None:
    """Held-out images: a model that does not see them answers a quarter of the questions."""
    script = str(ROOT / "deployments" / "demo" / "make_vision_material.py")
    run(tmp_path, script, "--out", "vision")
    (tmp_path / "recipe.yaml").write_text(RECIPE.read_text().replace("../../demo/vision", "vision"))
    (tmp_path / "checks.py").write_text((RECIPE.parent / "checks.py").read_text())
    run(tmp_path, "-m", "flows.cli", "run", "--plain", "recipe.yaml")

    (report,) = tmp_path.glob("artifacts/stages/evaluation-*/report/eval.json")
    right = json.loads(report.read_text())["right"]
    print(f"right answers: {right}")
    error = (0.25 * 0.75 / 256) ** 0.5
    assert right["grpo"] > right["sft"] and right["grpo"] > 0.25 + 5 * error
    assert 'class="seen"' in (tmp_path / "artifacts/tiny-vision-cpu/report.html").read_text()
    (published,) = tmp_path.glob("artifacts/stages/publication-*/published")
    model = AutoModelForImageTextToText.from_pretrained(published)
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "vision" / "base")
    weights = before.state_dict()
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed and not any("visual" in name for name in changed)
    assert "image-text-to-text" in (published / "README.md").read_text()
