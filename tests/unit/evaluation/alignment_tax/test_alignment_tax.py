"""The alignment tax: task files, lm-eval's results as records, losses with intervals, the recipe's side.
lm-eval itself: tests/engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from evaluation.alignment_tax.harness import give_arguments, rows_of, scores_of
from evaluation.alignment_tax.tax_report import (
    ModelScores,
    Score,
    TaskScores,
    TaxReport,
    compare,
    log_lines,
    loss_of,
    tax_metrics,
)
from rlhf_core.config import KINDS, AlignmentTax, StageConfig
from rlhf_core.config.judging.lm_eval_tasks import read_task, task_name
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.recipe.gate_checks import meaning_of
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.plan import Plan, plan
from tasks.stages import tax_table
from tests.support.templates import save_tokenizer

TASKS = Path(__file__).parents[4] / "deployments" / "tasks"


def score(
    values: dict[str, float] | None,
    value: float | None = None,
    stderr: float | None = 0.05,
    higher: bool = True,
) -> Score:
    mean = float(np.mean(list(values.values()))) if values else 0.0
    return Score(
        value=mean if value is None else value, stderr=stderr, higher_is_better=higher, documents=values
    )


def answers(right: int, of: int = 100) -> dict[str, float]:
    return {f"d{n}": float(n < right) for n in range(of)}


# --- losses ---


def test_a_loss_is_what_the_baseline_had_more_and_its_interval_is_paired() -> None:
    loss = loss_of(score(answers(80)), score(answers(70)), 2000, 0)
    assert loss.tax == pytest.approx(0.1) and loss.paired
    # Ten documents of a hundred changed: the standard error of their share is 0.03, that of two independent
    # models would be 0.061.
    assert loss.ci_low is not None and loss.ci_high is not None
    assert 0.1 - 1.96 * 0.03 == pytest.approx(loss.ci_low, abs=0.012)
    assert 0.1 + 1.96 * 0.03 == pytest.approx(loss.ci_high, abs=0.012)


def test_the_same_answers_lose_nothing_and_swapped_models_gain_what_was_lost() -> None:
    same = loss_of(score(answers(60)), score(answers(60)), 200, 0)
    assert same.tax == 0 and same.ci_low == pytest.approx(-same.ci_high, abs=1e-9)  # type: ignore[operator]
    assert 0.02 < (same.ci_high or 0) < 0.04, "100 documents without a loss leave losses below 3 % possible"
    there, back = (loss_of(score(answers(a)), score(answers(b)), 500, 3) for a, b in ((80, 60), (60, 80)))
    assert there.tax == -back.tax and there.ci_low == pytest.approx(-back.ci_high, abs=0.03)  # type: ignore[operator]


@pytest.mark.parametrize(("documents", "least"), [(1, -1.0), (3, -0.5), (20, 0.5)])
def test_a_loss_on_each_of_few_documents_is_not_certain(documents: int, least: float) -> None:
    loss = loss_of(score(answers(documents, documents)), score(answers(0, documents)), 1000, 0)
    assert loss.tax == 1 == loss.ci_high and loss.ci_low is not None
    assert least < loss.ci_low < least + 0.3


def test_less_can_be_better() -> None:
    loss = loss_of(
        score({"a": 2.0, "b": 3.0}, higher=False), score({"a": 4.0, "b": 5.0}, higher=False), 100, 0
    )
    assert loss.tax == 2.0 and loss.ci_low is None, "two equal differences say nothing about their spread"


@pytest.mark.parametrize("largest", [0.99, 1.2])
def test_small_differences_of_losses_are_seen_whether_a_document_is_above_one_or_not(largest: float) -> None:
    """As of bits per byte: about 0.8, and 0.004 more after training."""
    noise = np.random.default_rng(0).normal(0.004, 0.005, 500)
    before = {f"d{n}": 0.8 for n in range(499)} | {"d499": largest}
    after = {name: value + delta for (name, value), delta in zip(before.items(), noise, strict=True)}
    loss = loss_of(score(before, higher=False), score(after, higher=False), 1000, 0)
    assert loss.ci_low is not None and 0.003 < loss.ci_low < loss.tax < 0.005


def test_metrics_that_are_no_mean_and_other_documents_are_compared_by_their_errors() -> None:
    for one, other in (
        (score(None, 10.0, 0.3), score(None, 8.0, 0.4)),
        (score({"a": 10.0}, stderr=0.3), score({"b": 8.0}, stderr=0.4)),
    ):
        loss = loss_of(one, other, 100, 0)
        assert not loss.paired
        assert (loss.ci_low, loss.ci_high) == pytest.approx((2 - 1.96 * 0.5, 2 + 1.96 * 0.5), abs=1e-3)
    assert loss_of(score(None, 10.0, None), score(None, 8.0), 100, 0).ci_low is None


def scores(model: str, right: int, second: float = 0.5) -> ModelScores:
    metrics = {"acc,none": score(answers(right)), "other,strict": score(None, second, None)}
    return ModelScores(
        model=model,
        identity=model,
        tasks={"sums": TaskScores(metrics=metrics, documents=100)},
        lm_eval="0.4.13",
    )


def report(**models: int) -> TaxReport:
    rows = [
        row
        for name, right in models.items()
        for row in compare(scores("sft", 80), scores(name, right), 200, 0)
    ]
    about = {"lm_eval": "0.4.13", "chat_template": False, "num_fewshot": None}
    return TaxReport(baseline="sft", models=tuple(models), tasks=("sums",), rows=tuple(rows), **about)


def test_the_first_metric_is_the_main_one_and_the_largest_loss_is_the_tasks() -> None:
    found = report(dpo=80, ppo=50)
    assert [(row.model, row.metric, row.main) for row in found.rows] == [
        ("dpo", "acc", True), ("dpo", "other,strict", False), ("ppo", "acc", True), ("ppo", "other,strict", False),
    ]  # fmt: skip
    metrics = tax_metrics(found)
    assert metrics["tax/sums"] == metrics["tax/sums/ppo"] == pytest.approx(0.3)
    assert metrics["tax/sums/dpo"] == 0.0
    assert metrics["tax_low/sums"] == metrics["tax_low/sums/ppo"] > 0.2 and metrics["score/sums/sft"] == 0.8
    config = AlignmentTax(models=("dpo", "ppo"), tasks=("sums",))
    assert [name for name in metrics if not has_metric(config, name)] == []
    assert "ppo against sft on sums: acc 0.800 -> 0.500, lost +0.300" in log_lines(found)[1]
    assert "| sums | acc | ppo | 0.800 | 0.500 | +0.300 |" in tax_table(found)


# --- lm-eval's results ---


def sample(number: int, filtered: str = "none", **values: Any) -> dict[str, Any]:
    return {
        "doc_id": number, "doc_hash": f"{number:064d}", "filter": filtered, "metrics": list(values), "target": 1,
        "arguments": [(f"prompt {number}", {"until": []})], "filtered_resps": ["yes"], **values,
    }  # fmt: skip


def test_results_become_records_with_filters_kept_apart_and_only_means_paired() -> None:
    values = {"none": [1.0, 0.0, 1.0, 1.0], "strict": [0.0, 0.0, 1.0, 0.0]}
    samples = [
        sample(n, f, acc=np.float64(v), odd=[True, False])
        for f, found in values.items()
        for n, v in enumerate(found)
    ]
    result = {
        "alias": "t",
        "acc,none": 0.75,
        "acc_stderr,none": 0.25,
        "acc,strict": 0.25,
        "acc_stderr,strict": "N/A",
        "odd,none": 0.4,
    }
    found = {
        "results": {"t": result},
        "samples": {"t": samples},
        "higher_is_better": {"t": {"acc": True, "odd": False}},
    }
    (task,) = scores_of(found, {"t": ["t"]}).values()
    assert list(task.metrics) == ["acc,none", "acc,strict", "odd,none"] and task.documents == 4
    first, strict, odd = task.metrics.values()
    assert (first.value, first.stderr, strict.stderr) == (0.75, 0.25, None)
    assert first.documents is not None and list(first.documents.values()) == values["none"]
    assert odd.documents is None and not odd.higher_is_better
    rows = rows_of(found["samples"])
    assert rows[0]["prompt"] == "prompt 0"
    assert rows[0]["metrics"] == {"acc": 1.0, "odd": None}
    assert json.dumps(rows)


def test_a_group_is_the_mean_over_the_documents_of_its_tasks() -> None:
    parts = {"a": [1.0, 0.0], "b": [1.0] * 6}
    found = {
        "results": {
            name: {"acc,none": float(np.mean(v)), "acc_stderr,none": 0.1} for name, v in parts.items()
        },
        "samples": {name: [sample(n, acc=value) for n, value in enumerate(v)] for name, v in parts.items()},
        "higher_is_better": {},
    }
    pooled = scores_of(found, {"group": ["a", "b"]})["group"].metrics["acc,none"]
    assert (
        pooled.value == pytest.approx(7 / 8) and pooled.documents is not None and len(pooled.documents) == 8
    )
    assert pooled.stderr == pytest.approx(np.hypot(2 * 0.1, 6 * 0.1) / 8)


# --- task files ---


def write_task(folder: Path, text: str = "", name: str = "own.yaml", data: str = "rows.jsonl") -> str:
    (folder / "rows.jsonl").write_text('{"q": 1}\n')
    (folder / name).write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n{text}"
    )
    return str(folder / name)


def test_the_shipped_tasks_are_whole_and_their_answers_are_right() -> None:
    for name in ("digits_choice", "digits_answer"):
        task = read_task(str(TASKS / f"{name}.yaml"), trust_code=False)
        assert task.name == name and task.data_files == (TASKS / "digits.jsonl",)
    rows = [json.loads(line) for line in (TASKS / "digits.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) == 96
    solutions = {"copy": str, "reverse": lambda d: d[::-1], "sort": lambda d: "".join(sorted(d)), "first": lambda d: d[0],
                 "last": lambda d: d[-1], "count": lambda d: str(len(d))}  # fmt: skip
    for row in rows:
        digits = "".join(character for character in row["prompt"] if character.isdigit())
        assert row["answer"] == solutions[row["category"]](digits) == row["choices"][row["label"]]
        assert len(set(row["choices"])) == 4


def test_a_task_file_brings_its_data_its_includes_and_its_code(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("output_type: generate_until\n")
    (tmp_path / "helpers.py").write_text("def f(doc): return doc\n")
    path = write_task(tmp_path, "include: base.yaml\ndoc_to_text: !function helpers.f\n")
    assert {file.name for file in read_task(path).files} == {
        "own.yaml",
        "base.yaml",
        "rows.jsonl",
        "helpers.py",
    }
    with pytest.raises(ValueError, match=r"own.yaml runs Python \(helpers.f\): .* then set trust_task_code"):
        read_task(path, trust_code=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [a, b]", "must be one task"),
        ("- a", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("include: gone.yaml\ntask: x", "cannot be read"),
        ("task: x\ninclude: own.yaml", "includes itself"),
        ("task: x\ndataset_kwargs: {data_files: gone.jsonl}", "gone.jsonl, which does not exist:"),
    ],
)
def test_a_wrong_task_file_is_told_in_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_task(str(tmp_path / "own.yaml"))
    assert "\n" not in str(caught.value)


def test_data_of_a_task_may_lie_where_lm_eval_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    # beside the file comes first
    assert read_task(write_task(tmp_path / "deep")).data_files == (tmp_path / "deep" / "rows.jsonl",)
    (tmp_path / "deep" / "rows.jsonl").unlink()
    assert read_task("deep/own.yaml").data_files == (tmp_path / "rows.jsonl",)


# --- in a recipe ---


def planned(**changes: Any) -> Plan:
    tax = {"models": ["dpo"], "tasks": ["gsm8k"]} | changes
    stages = {
        "sft": {"data": {"sources": "s.jsonl"}},
        "dpo": {"data": {"sources": "p.jsonl"}},
        "alignment_tax": tax,
    }
    return plan(recipe_of({"name": "r", "base_model": "org/base", "stages": stages}))


def test_models_are_parents_and_the_task_files_content_decides_the_digest(tmp_path: Path) -> None:
    node = planned()["alignment_tax"]
    assert node.parents == ("dpo", "sft") and KINDS[node.kind].package == "evaluation"
    path = write_task(tmp_path)
    before = planned(tasks=[path])["alignment_tax"].digest
    assert before == planned(tasks=[path], concurrency=3, engine={"start_timeout": 7})["alignment_tax"].digest
    (tmp_path / "rows.jsonl").write_text('{"q": 22}\n')
    changed = planned(tasks=[path])["alignment_tax"].digest
    assert len({before, changed, node.digest, planned(limit=5)["alignment_tax"].digest}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ["ppo"]}, r"stages.alignment_tax.models: unknown name 'ppo'"),
        ({"models": ["sft"]}, r"stages.alignment_tax: models names only the baseline 'sft'"),
        ({"tasks": ["gsm8k", "a/gsm8k.yaml"]}, r"stages.alignment_tax: tasks names 'gsm8k' twice"),
        ({"tasks": []}, r"stages.alignment_tax.tasks"),
        (
            {"gates": [{"metric": "tax/mmlu", "max": 0.1}]},
            r"gates.0.metric: unknown metric 'tax/mmlu'; valid: tax/gsm8k,",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        planned(**changes)
    assert "\n" not in str(caught.value)


def test_task_files_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    found = planned(
        tasks=[write_task(tmp_path, "doc_to_text: !function helpers.f\n"), str(tmp_path / "gone.yaml")]
    )
    told_of = [problem for problem in check_inputs(found, [found["alignment_tax"]]) if ".tasks" in problem]
    assert len(told_of) == 2 and "trust_task_code" in told_of[0] and "gone.yaml cannot be read" in told_of[1]


def test_a_failed_gate_on_the_tax_has_a_meaning_and_a_task_a_name() -> None:
    config: StageConfig = AlignmentTax(models=("dpo",), tasks=("x/own.yaml",))
    assert has_metric(config, "tax/own/dpo") and task_name("x/own.yaml") == "own"
    assert "Alignment made the model" in meaning_of("alignment_tax", "tax/own/dpo")
    assert "certain" in meaning_of("alignment_tax", "tax_low/own")


# --- the chat template ---


def test_the_arguments_of_the_chat_template_reach_lm_evals_prompts(tmp_path: Path) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="needs alignflow[tax]")
    save_tokenizer("hermes", tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.chat_template = "{% if effort is defined %}{{ effort }}{% endif %}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    question = [{"role": "user", "content": "2 + 2?"}]
    for given, text in (({"effort": "low"}, "low2 + 2?"), ({}, "2 + 2?")):
        address = "http://127.0.0.1:9/v1/completions"
        model = completions.LocalCompletionsAPI(base_url=address, model="m", tokenizer=str(tmp_path))
        give_arguments(model, given)
        assert model.apply_chat_template(question) == text


def test_arguments_need_questions_in_the_chat_template() -> None:
    about: dict[str, Any] = {"models": ("dpo",), "tasks": ("sums",), "template_args": {"effort": "low"}}
    with pytest.raises(ValidationError, match="set chat_template to true"):
        AlignmentTax(**about)
    assert AlignmentTax(**about, chat_template=True).template_args == {"effort": "low"}
