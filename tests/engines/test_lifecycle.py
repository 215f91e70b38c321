"""The whole lifecycle through the command, on the real engines, run again when it is done; and killed in the
middle of PPO and run again.

It is the demo's own recipe with less of everything: a few steps of each stage.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core.config.kinds import has_metric, metrics_of
from rlhf_core.config.metrics.shared_metrics import BALANCE
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.demo_recipe import demo_recipe
from tests.support.programs import logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
SMALL = (
    "sft.data.max_samples=160",
    "sft.save_steps=4",
    "reward_model.data.max_samples=128",
    "ppo.max_steps=4",
    "ppo.save_steps=1",
    "ppo.rollout_batch_size=16",
    "ppo.train_batch_size=32",
    "iterative_dpo.prompts_per_round=24",
    "iterative_dpo.n_samples_per_prompt=3",
    "iterative_dpo.train_batch_size=8",
    "iterative_dpo.micro_train_batch_size=8",
    "evaluation.max_questions=12",
    # so little training passes none
    *(f"{stage}.gates=[]" for stage in ("sft", "reward_model", "ppo", "evaluation")),
)
STAGES = [
    "sft",
    "reward_model",
    "ppo",
    *(f"iterative_dpo.round{k}.{part}" for k in (1, 2) for part in ("preferences", "dpo")),
    "evaluation",
    "publication",
]


def alignflow(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flows.cli", "run", str(demo_recipe(folder)), *SMALL]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return logged(command, folder / "out.txt", cwd=folder, env=environment, start_new_session=True)


def finish(folder: Path) -> dict[str, Any]:
    code = alignflow(folder).wait(timeout=1200)
    assert code == 0, (folder / "out.txt").read_text()[-4000:]
    return json.loads((folder / "artifacts/tiny-cpu/summary.json").read_text())


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that is done."""
    folder = with_material(tmp_path_factory.mktemp("lifecycle"), material)
    assert [stage["status"] for stage in finish(folder)["stages"]] == ["done"] * 9
    return folder


def with_material(folder: Path, material: Path) -> Path:
    (folder / "demo").mkdir()
    (folder / "demo" / "material").symlink_to(material)
    return folder


def stage_folder(folder: Path, name: str) -> Path:
    (found,) = (path for path in (folder / "artifacts/stages").glob(f"{name}-*"))
    return found


@pytest.mark.long
def test_a_killed_lifecycle_goes_on(material: Path, tmp_path: Path) -> None:
    folder = with_material(tmp_path, material)
    process = alignflow(folder)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        found = list((folder / "artifacts/stages").glob("ppo-*"))
        if found and len(read_metrics(found[0])) >= 2:
            break
        time.sleep(0.2)
    assert process.poll() is None, (folder / "out.txt").read_text()[-4000:]
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 5, "PPO's roles are processes"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = psutil.wait_procs(children, timeout=40)[1]
    assert not left, f"processes survived the kill: {left}"
    assert not (stage_folder(folder, "ppo") / "result.json").exists()
    before = {
        name: (stage_folder(folder, name) / "result.json").stat().st_mtime_ns
        for name in ("sft", "reward_model")
    }

    summary = finish(folder)
    assert [stage["name"] for stage in summary["stages"]] == STAGES
    assert [stage["status"] for stage in summary["stages"]] == ["skipped"] * 2 + ["done"] * 7
    assert before == {
        name: (stage_folder(folder, name) / "result.json").stat().st_mtime_ns for name in before
    }, "stages were repeated"
    assert "resumed after iteration" in (stage_folder(folder, "ppo") / "log.txt").read_text()
    assert len(read_metrics(stage_folder(folder, "ppo"))) == 4


def test_a_lifecycle_ends_with_its_evidence(folder: Path) -> None:
    summary = json.loads((folder / "artifacts/tiny-cpu/summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == STAGES
    evaluation = summary["evaluation"]
    assert evaluation["model"] == "iterative_dpo.round2" and evaluation["num_questions"] == 12
    assert 0 <= evaluation["ci_low"] <= evaluation["win_rate"] <= evaluation["ci_high"] <= 1
    assert {stage["name"] for stage in summary["stages"] if stage["evaluation"]} == {
        "ppo",
        *(f"iterative_dpo.round{k}.dpo" for k in (1, 2)),
    }
    page = (folder / "artifacts/tiny-cpu/report.html").read_text()
    assert all(name in page for name in STAGES) and str(folder) not in page


def test_what_is_published_loads_and_is_the_last_rounds_model(folder: Path) -> None:
    published = stage_folder(folder, "publication") / "published"
    last = load_file(stage_folder(folder, "iterative_dpo.round2.dpo") / "checkpoint/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(published)
    state = model.state_dict()
    assert all((state[name] == weight).all() for name, weight in last.items())
    tokenizer = AutoTokenizer.from_pretrained(published)
    assert tokenizer.chat_template and tokenizer.apply_chat_template(
        [{"role": "user", "content": "Copy this number: 12"}], tokenize=False
    )
    card = (published / "README.md").read_text()
    assert "license: apache-2.0" in card and "iterative_dpo.round2" in card and str(folder) not in card
    AutoModelForSequenceClassification.from_pretrained(
        stage_folder(folder, "reward_model") / "checkpoint", num_labels=1
    )


def test_a_second_run_skips_every_stage(folder: Path) -> None:
    first = json.loads((folder / "artifacts/tiny-cpu/summary.json").read_text())
    again = finish(folder)
    assert {stage["status"] for stage in again["stages"]} == {"skipped"}
    assert [stage["digest"] for stage in again["stages"]] == [stage["digest"] for stage in first["stages"]]
    assert again["evaluation"] == first["evaluation"]


def test_gates_may_name_just_what_the_stages_write(folder: Path) -> None:
    for run in map(RunDir, (folder / "artifacts/stages").iterdir()):
        result = run.result()
        config = run.request().config
        assert result is not None
        known = [name for name in metrics_of(config) if "*" not in name and BALANCE not in name]
        assert [name for name in known if name not in result.metrics] == [], result.name
        assert [name for name in result.metrics if not has_metric(config, name)] == [], result.name
