"""The end of a run: the verdict, the metrics that its table shows, gates that failed, and the page's path."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flows.cli.terminal import ending
from rlhf_core.config import PPO, Evaluation, Source
from rlhf_core.config.gates import Gate
from tests.support.finished_run import CONFIGS, finished


def test_win_rates_are_shown_in_the_order_of_the_recipe() -> None:
    node: Any = SimpleNamespace(
        kind="evaluation", config=Evaluation(models=("sft", "dpo"), questions=Source(path="q.jsonl"))
    )
    metrics = {"answers": 1.0, "ci_low/sft": 0.4, "questions": 9.0, "win_rate/dpo": 0.6, "win_rate/sft": 0.5}
    assert ending.main_metrics(node, metrics) == ["win_rate/sft", "win_rate/dpo"]


def test_the_main_metric_is_followed_by_those_with_gates() -> None:
    config = CONFIGS["ppo"].model_copy(
        update={"gates": (Gate(metric="kl/mean", max=1), Gate(metric="reward/mean", min=0))}
    )
    node: Any = SimpleNamespace(kind="ppo", config=config)
    metrics = dict.fromkeys(("learning_rate", "reward/mean", "reward/last_fifth", "kl/mean", "tokens"), 1.0)
    assert ending.main_metrics(node, metrics) == ["reward/last_fifth", "kl/mean", "reward/mean"]


def test_what_a_distillation_shows_is_its_kl() -> None:
    how = {"reference": "teacher", "reward": "none", "kl_in": "reward", "init_kl_coef": 1.0, "critic": None}
    config = PPO.model_validate(
        {"actor": "base", "advantage_estimator": "reinforce_pp", "prompts": {"sources": "p.jsonl"}, **how}
    )
    node: Any = SimpleNamespace(kind="ppo", config=config)
    metrics = {"reward/mean": 0.0, "reward/last_fifth": 0.0, "kl/mean": 0.4}
    assert ending.main_metrics(node, metrics) == ["kl/mean"]


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    views = finished(tmp_path / "artifacts")
    gates = {
        "sft": (Gate(metric="loss", max=0.0001, on_fail="warn"), Gate(metric="loss", min=0)),
        "ppo": (Gate(metric="kl/mean", min=0),),
    }
    nodes = []
    for view in views:
        config = CONFIGS[view.name].model_copy(update={"gates": gates.get(view.name, ())})
        nodes.append(
            SimpleNamespace(
                name=view.name, kind=view.kind, config=config, parents=view.parents, run_dir=view.run_dir
            )
        )
    folder = tmp_path / "artifacts" / "demo"
    folder.mkdir()
    (folder / "report.html").touch()
    return SimpleNamespace(nodes=tuple(nodes), folder=folder)


def end(planned: Any, **options: Any) -> str:
    console = Console(file=io.StringIO(), record=True, soft_wrap=True, **options)
    ending.show_end(console, planned, dict.fromkeys(CONFIGS, "done") | {"sft": "skipped"})
    return console.export_text()


def test_the_end_of_a_run(planned: Any) -> None:
    told = end(planned, width=160)
    assert told.startswith("\nThe final model (iterative_dpo.round2) is better than SFT: it won ")
    assert "(95 % interval" in told.split("\n")[1]
    rows = {line.split()[0]: line for line in told.split("\n") if line.strip()}
    assert rows["sft"].split()[1:5] == ["skipped", "21", "1", "failed"] and rows["ppo"].split()[1:5] == [
        "done",
        "132",
        "1",
        "passed",
    ]
    assert "reward/mean " in rows["ppo"] and ", kl/mean " in rows["ppo"] and "eval/loss " in rows["sft"]
    assert told.count("gate failed") == 1
    assert "gate failed (warn) stage sft: loss is" in told
    assert "gate passed" not in told
    assert told.rstrip().endswith(f"report: {planned.folder / 'report.html'}")
    assert told.count("report.html") == 1


def test_each_stage_has_one_row_on_a_terminal_of_80_columns(planned: Any) -> None:
    told = end(planned, width=80, force_terminal=True)
    sentence = told[: told.index("stage ")].split("\n")
    assert max(map(len, sentence)) <= 80 and " ".join(" ".join(sentence).split()).endswith("judge: rule).")
    table = told[told.index("stage ") :].split("\n")[1 : 1 + len(CONFIGS)]
    assert [row.split()[0] for row in table] == list(CONFIGS) and max(map(len, table)) <= 80
