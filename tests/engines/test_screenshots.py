"""PPO and GRPO in an environment that answers with images, with all their engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.stages.ppo.sampling.stored import AHEAD
from tests.engines.test_ppo import SAVED, SHARE, finish, kill_past_checkpoint, write_request
from tests.support.pictured_models import COLOURS, make_pictured, square, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
CODE = """
import io
from PIL import Image

COLOURS = [(220, 20, 20), (20, 200, 20), (20, 20, 220)]

class Screen:
    async def rollout(self, task, model):
        first = await model.answer()
        content = io.BytesIO()
        colour = model.random.choice(COLOURS)
        Image.new("RGB", (16 + task["number"] % 5, 16), colour).save(content, "PNG")
        image = {"type": "image", "image": content.getvalue()}
        second = await model.answer({"role": "user", "content": [image, {"type": "text", "text": "Now?"}]})
        third = await model.answer("And then?")
        return sum(letter.islower() for letter in first.text + second.text + third.text) / 10
"""


def prepare(folder: Path, data: Path, base: Path, **fields: Any) -> Path:
    config = PPO.model_validate(
        {
            "actor": "base",
            "prompts": Data(sources=str(data)),
            "environment": {
                "path": f"{data.parent / 'screen.py'}:Screen",
                "images": True,
                "max_turns": 3,
                "answer_max_len": 8,
            },
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "train_batch_size": 16,
            "micro_train_batch_size": 4,
            "micro_rollout_batch_size": 4,
            "max_steps": 4,
            "num_episodes": 4,
            "save_steps": 2,
            "prompt_max_len": 64,
            "generate_max_len": 120,
            "actor_learning_rate": 1e-3,
            "timeout": 300,
            "dtype": "float32",
            "actor_ranks": Ranks(cpus=SHARE),
            "reference_ranks": Ranks(cpus=SHARE),
            "engine": EngineConfig(kind="transformers", cpus=SHARE),
            **fields,
        }
    )
    write_request(folder, config, {"base": str(base)})
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of which every other one has an image."""
    (tmp_path / "screen.py").write_text(CODE)
    rows: list[dict[str, Any]] = []
    for number in range(8):
        content: Any = "Look."
        if number % 2:
            (tmp_path / f"{number}.png").write_bytes(square(list(COLOURS)[number % 3], 16, 24))
            content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Look."}]
        rows.append({"prompt": [{"role": "user", "content": content}], "number": number})
    return write_rows(tmp_path / "rows.jsonl", rows)


def shown_in(run: Path, iteration: int) -> list[dict[str, Any]]:
    lines = (run / "rollouts" / f"iteration{iteration}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def test_grpo_trains_on_what_its_engines_saw(family: str, data: Path, tmp_path: Path) -> None:
    base = make_pictured(family, tmp_path / "base", initializer_range=0.05)
    run = prepare(tmp_path / "run", data, base, advantage_estimator="grpo", max_steps=2)
    finish(run)
    lines = read_metrics(run)
    assert len(lines) == 2
    for line in lines:
        assert line["sampler/gap"] <= 1e-5 and line["sync/probe_gap"] <= 1e-5
        assert line["reward/environment/failed"] == 0
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-6) != lines[1]["kl/mean"], (
        "the reference sees them too"
    )
    sent = [row["messages"][2]["content"][0] for row in shown_in(run, 1)]
    assert sent and all(part["type"] == "image" and len(part["image"]) == 32 for part in sent)


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_images_of_its_state(data: Path, tmp_path: Path) -> None:
    """Episodes are sampled one iteration ahead, so a resume state holds some; the critic sees the images too."""
    base = make_pictured("qwen3_vl", tmp_path / "base", initializer_range=0.05)
    how = {"critic": "base", "critic_ranks": Ranks(cpus=SHARE), "max_staleness": 1, "export_at": ()}
    run = prepare(tmp_path / "run", data, base, **how)
    kill_past_checkpoint(run)
    rows = (run / "state" / f"step-{SAVED}" / AHEAD).read_text().splitlines()[1:]
    known = [json.loads(row)["messages"] for row in rows]
    assert len(known) == 16 and all(json.loads(row)["images"] for row in rows)
    finish(run)
    assert f"resumed after iteration {SAVED}" in (run / "log.txt").read_text()
    trained = shown_in(run, SAVED + 1)
    assert trained and all(row["messages"] in known for row in trained)
    lines = read_metrics(run)
    assert len(lines) == 4
    for line in lines:
        assert line["sampler/gap"] <= (1e-5 if line["step"] == 1 else 1) and line["sync/probe_gap"] <= 1e-5
        assert line["reward/environment/failed"] == 0
