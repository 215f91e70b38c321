"""Checks the alarms on top of the page, charts of one point, labels of axes, and that no table is empty."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evaluation.report.alarms import alarms
from evaluation.report.drawing.charts import StageCurves, single_values, stage_chart
from evaluation.report.run_page import write_report
from evaluation.report.summary import Evidence, StageView, read, read_evaluation
from rlhf_core.records import StageResult
from rlhf_core.runs.run_dir import METRICS
from tests.support.finished_run import finished, run_dir
from tests.unit.evaluation.report.test_page_parts import refinish

EMPTY = re.compile(r"<table>\s*<tr>(?:<th[^>]*>[^<]*</th>)*</tr>\s*</table>")


def found_in(steps: Mapping[str, list[float]], metrics: Mapping[str, float] | None = None) -> list[str]:
    """Returns the alarms of a PPO stage with these curves and final metrics."""
    result = StageResult.model_construct(metrics=dict(metrics or {}))
    curves = {
        name: [(float(step), value) for step, value in enumerate(values)] for name, values in steps.items()
    }
    stage = Evidence(StageView("ppo", "ppo", (), Path("ppo-0"), "done"), None, result, curves)
    return [alarm.sentence for alarm in alarms([stage], None)]


def change_report(stages: list[StageView], change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the report of the evaluation, whose result then has the new sizes."""
    evaluated = read_evaluation([read(view) for view in stages])
    assert evaluated is not None
    file = evaluated.folder / "eval.json"
    report = json.loads(file.read_text())
    change(report)
    file.write_text(json.dumps(report))
    refinish(stages, evaluated.stage.view.name)


def test_cut_answers_and_missing_signals_are_alarms() -> None:
    assert found_in({}, {"response/truncated": 1.0})[0].startswith("all of the sampled answers are cut at")
    assert found_in({}, {"response/truncated": 0.992})[0].startswith("99.2 % of the sampled answers are cut")
    assert found_in({"reward/std": [0, 0]})[0].startswith("all answers have the same reward, so there is")
    assert found_in({"policy/grad_norm": [0, 0]})[0].startswith("the gradient is zero in every step")
    healthy = {"reward/std": [0, 0.1], "policy/grad_norm": [0, 0.2], "grad_norm": []}
    assert found_in(healthy, {"response/truncated": 0.9, "reward/std": 0.3}) == []


def test_alarms_are_on_top_of_the_page(tmp_path: Path) -> None:
    stages = finished(tmp_path / "artifacts")
    assert (
        'class="card alarm"' not in write_report(tmp_path / "artifacts" / "demo", "demo", stages).read_text()
    )
    change_report(stages, lambda report: report["truncated"].update(ppo=1.0))
    html = write_report(tmp_path / "artifacts" / "demo", "demo", stages).read_text()
    told = "<b>ppo</b>: all of its answers in the evaluation are cut at the length limit"
    assert html.index("verdict") < html.index(told) < html.index("Is it better?")


def test_curves_say_what_their_x_axis_counts() -> None:
    line = [(1.0, 2.0), (2.0, 3.0)]
    sft = stage_chart("sft", "sft", [StageCurves("", {"loss": line, "grad_norm": line})])
    ppo = stage_chart("ppo", "ppo", [StageCurves("", {"reward/mean": line, "phase/generate": line})])
    assert sft is not None and sft.count(">step<") == 2
    assert ppo is not None and ppo.count(">iteration<") == 2, "also where an iteration's time goes"


def test_one_point_is_a_number_and_no_chart(tmp_path: Path) -> None:
    runs = [StageCurves("", {"loss": [(1.0, 0.25)], "grad_norm": [(1.0, 2.0), (2.0, 3.0)]})]
    assert single_values("sft", runs) == {"Loss (training)": 0.25}
    drawn = stage_chart("sft", "sft", runs)
    assert drawn is not None and ">Gradient norm<" in drawn and ">Loss<" not in drawn
    rounds = [StageCurves("round 1", {"loss": [(1.0, 0.5)]}), StageCurves("round 2", {"loss": [(1.0, 0.4)]})]
    assert stage_chart("loop", "dpo", rounds) is None
    assert single_values("dpo", rounds) == {"Loss (round 1 training)": 0.5, "Loss (round 2 training)": 0.4}
    stages = finished(tmp_path / "artifacts")
    file = run_dir(tmp_path / "artifacts", "sft") / METRICS
    file.write_text(file.read_text().splitlines()[0] + "\n")
    html = write_report(tmp_path / "artifacts" / "demo", "demo", stages).read_text()
    assert re.search(r'<div class="tile"><span>Loss \(training\)</span><b>[\d.]+</b></div>', html)


def test_a_table_without_rows_is_left_out(tmp_path: Path) -> None:
    stages = finished(tmp_path / "artifacts")
    before = write_report(tmp_path / "artifacts" / "demo", "demo", stages).read_text()
    assert "Effect of style" in before and not EMPTY.search(before)
    change_report(
        stages,
        lambda report: [effect.update(effect=0.0, ci_low=0.0, ci_high=0.0) for effect in report["style"]],
    )
    html = write_report(tmp_path / "artifacts" / "demo", "demo", stages).read_text()
    assert "Judges" in html and "Effect of style" not in html and not EMPTY.search(html)
