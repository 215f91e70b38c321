"""Runs the alignment_tax stage, which runs lm-eval's tasks on every model, served by a local vLLM server, and
compares the results with the baseline.

`report/tax.json` holds the comparison. `report/scores/<model>.json` holds a model's scores and is written
once they are complete, so that a resumed stage does not measure the model again.
`report/documents/<model>.jsonl` holds every question with the model's answer, and `servers/` the logs of the
servers. Models with identical files are measured once.
"""

from __future__ import annotations

import json
import time

from evaluation.alignment_tax.harness import MeasuredModel, Tasks, measure
from evaluation.alignment_tax.tax_report import TAX, ModelScores, TaxReport, compare, log_lines, tax_metrics
from evaluation.answers.local_answers import file_name
from evaluation.answers.served_models import LocalModel, local_model, served
from rlhf_core.config import AlignmentTax
from rlhf_core.config.judging.lm_eval_tasks import task_name
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system.files import write_text

REPORT = "report"
LOGS = "servers"


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Measures the baseline and all models. Reuses the scores of an earlier attempt that was killed. Raises
    ValueError for the same reasons as `Tasks` and `measure`."""
    config = request.config
    assert isinstance(config, AlignmentTax), f"alignment_tax got the config of a {config.stage} stage"
    names = list(dict.fromkeys((config.baseline, *config.models)))
    files = {name: run / REPORT / "scores" / f"{file_name(name)}.json" for name in names}
    scores = {name: found for name in names if (found := ModelScores.read(files[name])) is not None}
    missing = [name for name in names if name not in scores]
    if missing:
        tasks = Tasks(config.tasks, config.trust_task_code)
        for name in missing:
            start = time.monotonic()
            where = f"alignment_tax of {name}"
            model = local_model(where, request.inputs[name], config, run, request.trust_remote_code)
            twin = next((known for known in scores.values() if known.identity == model.identity), None)
            if twin:
                scores[name] = twin.model_copy(update={"model": name})
                print(f"{name}: the same files as {twin.model}, so its scores are reused", flush=True)
                continue
            measured = measure_one(name, model, request, config, tasks, run)
            documents = "".join(json.dumps(row, default=str) + "\n" for row in measured.rows)
            for file, text in (
                (run / REPORT / "documents" / f"{file_name(name)}.jsonl", documents),
                # written last: it marks the model as finished
                (files[name], measured.scores.model_dump_json(indent=1)),
            ):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, text)
            scores[name] = measured.scores
            print(f"{name}: {len(measured.rows)} documents in {time.monotonic() - start:.1f} s", flush=True)
    models = [name for name in names if name != config.baseline]
    rows = [
        row
        for name in models
        for row in compare(scores[config.baseline], scores[name], config.bootstrap_rounds, request.seed)
    ]
    report = TaxReport(
        baseline=config.baseline,
        models=tuple(models),
        tasks=tuple(map(task_name, config.tasks)),
        lm_eval=scores[config.baseline].lm_eval,
        chat_template=config.chat_template,
        num_fewshot=config.num_fewshot,
        rows=tuple(rows),
    )
    write_text(run / REPORT / TAX, report.model_dump_json(indent=2))
    metrics = tax_metrics(report)
    tracker = Tracker(run, total_steps=1)
    tracker.log(1, metrics)
    tracker.close()
    print("\n".join(log_lines(report)), flush=True)
    return Outcome(metrics, {"report": REPORT})


def measure_one(
    name: str, model: LocalModel, request: StageRequest, config: AlignmentTax, tasks: Tasks, run: RunDir
) -> MeasuredModel:
    """Serves one model and returns its scores on all tasks."""
    trust = request.trust_remote_code
    with served(
        model, file_name(name), run / LOGS / f"{file_name(name)}.log", config.engine, request.seed, trust
    ) as server:
        return measure(name, model, server, tasks, config, request.seed, trust)
