"""Our own vLLM server, for real: it judges a battle between two tiny checkpoints, and lm-eval measures what a
damaged model lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.alignment_tax.tax_report import TaxReport
from evaluation.alignment_tax.tax_stage import run as tax
from evaluation.evaluation_stage import run as evaluate
from evaluation.judges.judge_prompt import judge_prompt
from evaluation.judges.offline import Match
from rlhf_core.config import AlignmentTax, EngineConfig, Evaluation, Gate, RuleJudge, Source, VllmJudge
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.questions import Question
from rlhf_core.recipe.gate_checks import check
from rlhf_core.records import EvalReport
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from tests.support.stage_request import stage_request
from tests.support.tiny_models import fit

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parents[2] / "deployments" / "tasks"
COUNT = 10  # documents and questions
ROWS = [json.loads(line) for line in (TASKS / "digits.jsonl").read_text().splitlines()][:COUNT]
SMALL = EngineConfig(kv_cache_gib=0.5, start_timeout=180.0)


def chat(tokenizer: Any, messages: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def stage(folder: Path, config: Any, inputs: dict[str, Path]) -> RunDir:
    run = RunDir(folder)
    named = {name: str(path) for name, path in inputs.items()}
    run.prepare(stage_request(config, named))
    return run


@pytest.fixture(scope="module")
def good(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the answers by heart, asked as plain text and in a chat."""
    tokenizer = AutoTokenizer.from_pretrained(material / "base")
    plain = [(row["prompt"], row["answer"]) for row in ROWS]
    asked = [(chat(tokenizer, [{"role": "user", "content": prompt}]), answer) for prompt, answer in plain]
    return fit(material / "base", tmp_path_factory.mktemp("good") / "model", plain + asked, 40)


def test_a_checkpoint_judges_two_others_over_http_and_nothing_twice(
    good: Path, material: Path, tmp_path: Path, capfd: Any
) -> None:
    """The judge always prefers the answer it sees first: one half for everybody, and no verdict survives the
    swap."""
    base = material / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    questions = [{"uid": f"q{n}", "category": row["category"], **row} for n, row in enumerate(ROWS)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    wrong = [(chat(tokenizer, [{"role": "user", "content": row["prompt"]}]), "?") for row in ROWS]
    unknowing = fit(base, tmp_path / "unknowing", wrong, 40)
    pairs = [pair for row in ROWS[:4] for pair in ((row, row["answer"], "?"), (row, "?", row["answer"]))]
    seen = [
        Match(Question("q", "digits", ({"role": "user", "content": row["prompt"]},), {}), a, b)
        for row, a, b in pairs
    ]
    prompts = [(chat(tokenizer, judge_prompt(match)), "[[A>B]]") for match in seen]
    judge = fit(
        base,
        tmp_path / "judge",
        prompts,
        50,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        max_position_embeddings=2048,
    )

    asked = VllmJudge(model="judge", max_tokens=16, max_model_len=2048, concurrency=8, engine=SMALL)
    config = Evaluation(
        models=("good",), baseline="base", questions=Source(path=str(tmp_path / "questions.jsonl")), judges=(asked, RuleJudge()),
        prompt_max_len=64, generate_max_len=24, engine=SMALL, bootstrap_rounds=200,
    )  # fmt: skip
    run = stage(tmp_path / "run", config, {"good": good, "base": unknowing, "judge": judge})
    result = run_in_directory(run.path, evaluate)
    report = EvalReport.model_validate_json((run / "report" / "eval.json").read_text())
    (rate,) = report.win_rates
    assert (report.judge, rate.win_rate, rate.swap_consistency, rate.num_failed) == ("judge", 0.5, 0.0, 0)
    assert report.right["good"] == 1.0 and report.right["base"] < 0.2
    assert report.judging is not None and report.judging.games == 2 * COUNT
    assert report.judging.input_tokens > 2 * COUNT * 300 and report.judging.output_tokens >= 2 * COUNT * 3
    assert [name for name in result.metrics if not has_metric(config, name)] == []
    log = run / "servers" / "judge.log"
    before = log.stat().st_size
    assert "max_model_len" in log.read_text() and "127.0.0.1" in log.read_text()

    (run / "result.json").unlink()
    capfd.readouterr()
    run_in_directory(run.path, evaluate)
    assert f"judge judge: {2 * COUNT} games, 0 to ask" in capfd.readouterr().out
    assert log.stat().st_size == before  # no verdict was missing, so no server was started


def expected(path: Path) -> dict[str, float]:
    """What lm-eval should find, by transformers: the share of likeliest choices and of greedy answers that
    are right."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    found = {"digits_choice": 0.0, "digits_answer": 0.0}
    for row in ROWS:
        prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        sums = []
        for choice in row["choices"]:
            answer = tokenizer(row["prompt"] + choice, add_special_tokens=False).input_ids[len(prompt) :]
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            sums.append(sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(answer)))
        found["digits_choice"] += (sums.index(max(sums)) == row["label"]) / COUNT
        greedy = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0)[
            0, len(prompt) :
        ]
        text = tokenizer.decode(greedy, skip_special_tokens=True).split("\n")[0].strip()
        found["digits_answer"] += (text == row["answer"]) / COUNT
    return found


def test_lm_eval_sees_a_planted_regression_and_the_gate_trips(good: Path, tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("lm_eval", reason="alignflow's extra `tax` is not installed")
    same = tmp_path / "same"
    worse = tmp_path / "worse"
    shutil.copytree(good, same)
    model = AutoModelForCausalLM.from_pretrained(good)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=2 * float(parameter.std()) if parameter.dim() > 1 else 0.0
            )
    model.save_pretrained(worse)
    AutoTokenizer.from_pretrained(good).save_pretrained(worse)

    gates = (
        Gate(metric="tax_low/digits_choice", max=0.1),
        Gate(metric="tax/digits_answer", max=0.1),
        Gate(metric="tax_high/digits_choice/same", max=0.3),  # ten equal documents show no more than that
    )
    tasks = tuple(str(TASKS / f"{name}.yaml") for name in ("digits_choice", "digits_answer"))
    limits = {"limit": COUNT, "max_model_len": 128, "bootstrap_rounds": 200, "engine": SMALL, "gates": gates}
    config = AlignmentTax(models=("same", "worse"), baseline="good", tasks=tasks, **limits)
    run = stage(tmp_path / "run", config, {"good": good, "same": same, "worse": worse})
    result = run_in_directory(run.path, tax)

    assert [verdict.passed for verdict in check("alignment_tax", config, result)] == [False, False, True]
    assert result.metrics["tax/digits_answer"] == result.metrics["tax/digits_answer/worse"] > 0.5
    for name, path in (("good", good), ("worse", worse)):
        by_hand = expected(path)
        assert {task: result.metrics[f"score/{task}/{name}"] for task in by_hand} == pytest.approx(
            by_hand, abs=1e-6
        )
    assert result.metrics["score/digits_choice/good"] == 1.0
    assert result.metrics["tax/digits_choice/same"] == 0 < result.metrics["tax_high/digits_choice/same"]
    assert [name for name in result.metrics if not has_metric(config, name)] == []
    report = TaxReport.model_validate_json((run / "report" / "tax.json").read_text())
    assert all(row.paired and row.documents == COUNT for row in report.rows) and len(report.rows) == 4
    assert len((run / "report" / "documents" / "good.jsonl").read_text().splitlines()) == 2 * COUNT

    # A killed stage: the models that were finished are not asked again.
    (run / "result.json").unlink()
    sizes = {log: log.stat().st_size for log in (run / "servers").iterdir()}
    assert sorted(log.name for log in sizes) == ["good.log", "worse.log"]  # `same` has the files of `good`
    capfd.readouterr()
    assert run_in_directory(run.path, tax).metrics == result.metrics
    assert {log: log.stat().st_size for log in sizes} == sizes and "is ready" not in capfd.readouterr().out
