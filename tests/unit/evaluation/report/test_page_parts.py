"""Parts of the report page: the DAG, charts, numbers, remote models, the alignment tax and the time of an iteration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from evaluation.alignment_tax.tax_report import TAX, TaxReport, TaxRow
from evaluation.report.drawing.charts import StageCurves, stage_chart
from evaluation.report.drawing.dag import HEIGHT, WIDTH, draw
from evaluation.report.run_page import write_report
from evaluation.report.stage_sections import phases_of
from evaluation.report.summary import StageView
from evaluation.report.template import duration, number, percent
from rlhf_core.config import AlignmentTax
from rlhf_core.records import Answering, StageResult
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.runs.timeline import Timeline, TimelineRow, write_timeline
from tests.support.finished_run import (
    CONFIGS,
    PARENTS,
    ROUND1,
    finished,
    report,
    run_dir,
)
from tests.support.stage_request import stage_request
from tests.unit.evaluation.report.test_page import page


def test_the_dag_draws_nodes_apart_and_edges_forward() -> None:
    parents = {name: tuple(dict.fromkeys(above.values())) for name, above in PARENTS.items()}
    drawing = draw(parents)
    boxes = {box.name: box for box in drawing.boxes}
    assert set(boxes) == set(CONFIGS)
    for name, above in parents.items():
        assert all(boxes[parent].x + WIDTH < boxes[name].x for parent in above)
    for a in drawing.boxes:
        assert 0 <= a.x <= drawing.width - WIDTH and 0 <= a.y <= drawing.height - HEIGHT
        assert all(a is b or abs(a.x - b.x) >= WIDTH or abs(a.y - b.y) >= HEIGHT for b in drawing.boxes)
    assert sum(edge.arrow for edge in drawing.edges) == sum(map(len, parents.values()))
    assert boxes[f"{ROUND1}.preferences"].lines == ("iterative_dpo.", "round1.", "preferences")
    assert draw({}).boxes == ()
    assert draw({"a": ("elsewhere",)}).edges == ()


def test_a_line_that_only_rounding_moves_is_flat_and_steps_are_whole() -> None:
    curve = [(float(step), 1 + 1e-8 * (-1) ** step) for step in (1, 2, 3)]
    chart = stage_chart("sft", "sft", [StageCurves("", {"loss": curve})])
    assert chart is not None
    numbers = [text for text in re.findall(r">([^<>]+)</text>", chart) if re.fullmatch(r"[\d.]+", text)]
    steps = numbers[:3]
    assert steps == ["1", "2", "3"], numbers
    heights = numbers[3:]
    assert len(heights) == len(set(heights)) > 2, heights


def test_a_chart_without_points_is_none_and_many_points_stay_small() -> None:
    assert stage_chart("sft", "sft", [StageCurves("", {"loss": [(1.0, float("nan"))]})]) is None
    assert stage_chart("publication", "publication", [StageCurves("", {})]) is None
    assert stage_chart("sft", "sft", [StageCurves("", {"loss": [(1.0, 2.0), (2.0, 1.0)]})]) is not None
    long = [(float(i), float(i % 7)) for i in range(50_000)]
    curves = {"reward/mean": long, "reward/std": long, "phase/generate": long, "phase/score": long}
    svg = stage_chart("ppo", "ppo", [StageCurves("", curves)])
    assert svg is not None and len(svg) < 150_000


def test_numbers_for_people() -> None:
    assert percent(0.7149) == "71 %"
    assert percent(0.7149, 1) == "71.5 %"
    assert percent(None) == "–"
    assert percent(float("nan")) == "–"
    assert duration(1.42) == "1.4 s"
    assert duration(59.7) == "1 min 00 s"
    assert duration(131.7) == "2 min 12 s"
    assert duration(7384) == "2 h 03 min"
    assert duration(None) == "–"
    assert number(98214.0) == "98,214"
    assert number(0.01234) == "0.0123"
    assert number(3.0) == "3"
    assert number(float("inf")) == "–"


def refinish(stages: list[StageView], name: str) -> None:
    """Writes a stage's manifest again, after a test has changed its files."""
    run = RunDir(next(stage.run_dir for stage in stages if stage.name == name))
    result = run.result() or StageResult.model_validate_json((run / "result.json").read_text())
    run.finish(run.request(), Outcome(result.metrics, result.outputs), result.seconds)


def test_remote_models_are_told_with_their_sampling_and_their_cost(tmp_path: Path) -> None:
    stages = finished(tmp_path, lines=1)
    asked = Answering(
        model="gpt-x", url="https://me:secret@host/v1", settings={"temperature": 0.0, "max_tokens": 64}, questions=300, failed=2,
        requests=298, input_tokens=54_321, output_tokens=9_876, cost=1.234,
    )  # fmt: skip
    told = report("rule", 0.0).model_copy(update={"answering": {"ppo": asked}})
    (run_dir(tmp_path, "evaluation") / "report" / "eval.json").write_text(told.model_dump_json())
    refinish(stages, "evaluation")
    made = page(tmp_path, stages)
    assert "Remote models" in made.text and "temperature=0.0, max_tokens=64" in made.text
    assert (
        "54,321 / 9,876" in made.text and "1.23 USD" in made.text and "gpt-x https://***@host/v1" in made.text
    )
    assert "secret" not in (tmp_path / "demo" / "report.html").read_text()
    assert "Remote models" not in page(tmp_path / "plain", finished(tmp_path / "plain", lines=1)).text


def tax_view(artifacts: Path, rows: list[TaxRow]) -> StageView:
    config = AlignmentTax(models=("dpo", "ppo"), tasks=("gsm8k", "own.yaml"))
    run = RunDir(artifacts / "stages" / "tax-0")
    request = stage_request(config, name="tax")
    run.prepare(request)
    (run / "report").mkdir()
    about = {"lm_eval": "0.4.13", "chat_template": True, "num_fewshot": None}
    told = TaxReport(baseline="sft", models=("dpo", "ppo"), tasks=("gsm8k", "own"), rows=tuple(rows), **about)
    (run / "report" / TAX).write_text(told.model_dump_json())
    run.finish(request, Outcome({}, {"report": "report"}), 1.0)
    return StageView("tax", "alignment_tax", (), run.path, "done")


def tax_row(
    task: str, model: str, tax: float, metric: str = "acc", scale: float = 1.0, **changes: Any
) -> TaxRow:
    values = {
        "value": scale * (0.6 - tax),
        "baseline_value": scale * 0.6,
        "tax": scale * tax,
        "stderr": 0.02,
        "baseline_stderr": None,
    }
    bounds = dict(
        ci_low=scale * (tax - 0.05), ci_high=scale * (tax + 0.05), paired=True, main=True, documents=1319
    )
    return TaxRow.model_validate(
        {"task": task, "metric": metric, "model": model, **values, **bounds, **changes}
    )


def test_the_alignment_tax_is_a_table_and_a_chart(tmp_path: Path) -> None:
    rows = [
        tax_row(task, model, tax)
        for task in ("gsm8k", "own")
        for model, tax in (("dpo", 0.02), ("ppo", 0.125))
    ]
    rows.append(
        tax_row(
            "gsm8k", "dpo", 0.0, "exact_match,strict", main=False, ci_low=None, ci_high=None, paired=False
        )
    )
    rows.append(tax_row("own", "ppo", -0.01, "<f1>", main=False, paired=False))
    made = page(tmp_path, [tax_view(tmp_path, rows)])
    assert "What did it cost?" in made.text and "lm-eval 0.4.13, with the chat template" in made.text
    assert "gsm8k acc ppo 0.600 0.475 ± 0.020 +0.125 +0.075 to +0.175 1,319" in made.text
    # escaped: it is text, not an element
    assert "-0.010 -0.060 to +0.040 *" in made.text and "<f1>" in made.text
    assert "Lost against sft (percentage points)" in made.text
    assert "What did it cost?" not in page(tmp_path / "none", finished(tmp_path / "none", lines=1)).text


def test_metrics_that_are_no_shares_keep_their_unit(tmp_path: Path) -> None:
    made = page(tmp_path, [tax_view(tmp_path, [tax_row("gsm8k", "dpo", -0.5, "perplexity", scale=10.0)])])
    assert "Lost against sft (in the metric's own unit)" in made.text and "-5.000" in made.text


def test_the_page_says_where_an_iterations_time_went(tmp_path: Path) -> None:
    found = phases_of({"phase/generate": 3.0, "phase/score": 1.0, "floor/generate": 1.5, "loss": 9.0})
    assert [(phase.name, phase.share, phase.times) for phase in found] == [
        ("generate", 0.75, 2.0),
        ("score", 0.25, None),
    ]
    page = write_report(tmp_path / "demo", "demo", finished(tmp_path)).read_text(encoding="utf-8")
    table = page[page.index("Where an iteration's time goes") :].split("</details>")[0]
    assert "times the floor" in table and "sampler 70 %" in table and table.count("<tr>") == 6
    assert "<svg" not in table, "no timeline was stored"


def test_the_page_draws_the_last_iteration_as_a_timeline(tmp_path: Path) -> None:
    stages = finished(tmp_path)
    ppo = next(view for view in stages if view.kind == "ppo")
    rows = [
        TimelineRow("stage", [], [("generate", 0.0, 3.0), ("train", 3.0, 4.0)]),
        TimelineRow("actor", [0, 1], [("train", 3.0, 3.9)]),
        TimelineRow("<reward>", [], []),
    ]
    write_timeline(ppo.run_dir, 12, Timeline(4.0, rows))
    page = write_report(tmp_path / "demo", "demo", stages).read_text(encoding="utf-8")
    part = page[page.index("Where an iteration's time goes") :].split("</details>")[0]
    assert "Iteration 12: what the stage waited for" in part
    assert "actor · GPU 0, 1" in part and "&lt;reward&gt;" in part and part.count("generate") > 1
    write_timeline(ppo.run_dir, 13, Timeline(0.0, []))
    assert "Iteration 13" not in write_report(tmp_path / "demo", "demo", stages).read_text(encoding="utf-8")
