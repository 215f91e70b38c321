"""A recipe whose stages only write the files of their kind, for the fixture `recipe` of tests/flows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client

TEXT = """
name: tiny
base_model: org/model
stages:
  evaluation: {models: [loop], questions: {path: q.jsonl}}
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  loop: {stage: iterative_dpo, prompts: {sources: prompts.jsonl}, rounds: 2}
"""
ORDER = [
    "sft",
    "reward_model",
    "loop.round1.preferences",
    "loop.round1.dpo",
    "loop.round2.preferences",
    "loop.round2.dpo",
    "evaluation",
]
# Writes the files of a stage of its kind; `<stage>.faults.json` in the working directory has a fault
# for each attempt.
STAGE = """
import json, os, signal, sys, time
from pathlib import Path
from rlhf_core.runs.run_dir import Outcome, run_in_directory, write_text
from rlhf_core.records import EvalReport, WinRate

def work(request, run):
    with Path("attempts.txt").open("a") as file:
        file.write(request.name + "\\n")
    print("working on", request.name, flush=True)
    for place in request.inputs.values():
        assert not place.startswith("/") or Path(place).exists(), place
    file = Path(request.name + ".faults.json")
    fault, *later = json.loads(file.read_text()) if file.exists() else [None]
    if fault:
        file.write_text(json.dumps(later or [None]))
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault == "waits" and not Path("go").exists():
        time.sleep(0.1)
    if fault == "refuses":
        print("the data has no rows: give some", file=sys.stderr)
        sys.exit(2)
    kind = request.config.stage
    if kind == "evaluation":
        rates = tuple(
            WinRate(model=m, baseline="sft", judge="rule", win_rate=0.6, ci_low=0.55, ci_high=0.65, num_questions=300, num_failed=0,
                    swap_consistency=1.0, by_category={}) for m in request.config.models)
        (run / "report").mkdir(exist_ok=True)
        report = EvalReport(baseline="sft", judge="rule", win_rates=rates, right={}, mean_tokens={}, truncated={})
        write_text(run / "report" / "eval.json", report.model_dump_json())
        return Outcome({"win_rate": 0.6}, {"report": "report"})
    name = {"preferences": "pairs", "publication": "published"}.get(kind, "checkpoint")
    (run / "made").mkdir(exist_ok=True)
    write_text(run / "metrics.jsonl", "".join(json.dumps({"step": step, "loss": 2 / step}) + "\\n" for step in range(1, 9)))
    write_text(run / "made" / name, request.digest)
    return Outcome({"loss": 1.5}, {name: f"made/{name}"})

run_in_directory(sys.argv[1], work)
"""


def attempts() -> list[str]:
    return Path("attempts.txt").read_text().splitlines() if Path("attempts.txt").exists() else []


def statuses() -> dict[str, str]:
    summary = json.loads(Path("artifacts/tiny/summary.json").read_text())
    return {entry["name"]: entry["status"] for entry in summary["stages"]}


def fault(**faults: list[str]) -> None:
    for name, attempts in faults.items():
        Path(f"{name}.faults.json").write_text(json.dumps(attempts))


def artifacts() -> dict[str, Any]:
    """Returns the newest artifact of each key. (The list of all has 200 at most, and the tests of a process
    share a server.)"""
    with get_client(sync_client=True) as client:
        return {artifact.key: artifact.data for artifact in client.read_latest_artifacts() if artifact.key}
