"""`alignflow serve` on an empty home: a manual run and scheduled runs, checked with Prefect's API."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.runs.run_dir import StageRequest
from tests.support import micro
from tests.support.micro import Serve, ask, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def completed(api: str) -> list[dict[str, Any]]:
    """Returns the runs that trained a round, oldest first."""
    runs = ask(
        api,
        "/flow_runs/filter",
        {"sort": "START_TIME_ASC", "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}},
    )
    return [run for run in runs if "is done" in str(run["state"]["message"])]


def request_of(folder: Path, stage: str) -> StageRequest:
    (file,) = (folder / "artifacts/stages").glob(f"{stage}-*/config.json")
    return StageRequest.model_validate_json(file.read_text())


def test_scheduled_runs_before_and_after_a_manual_run(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    serve = Serve(folder, micro.build(folder), "--every", "20")
    try:
        api = serve.ready()
        wait_until(lambda: completed(api), "the schedule to fire by itself", told=serve.told)
        asked = serve.run(api, "loop/micro", overrides=["loop.beta=0.3"])
        serve.reaches(api, asked, "COMPLETED")
        rounds = len(completed(api))
        wait_until(lambda: len(completed(api)) > rounds, "the schedule to fire again", told=serve.told)
        runs = completed(api)
        by_itself = [run for run in runs if run["auto_scheduled"]]
        assert len(by_itself) >= 2 and asked in {run["id"] for run in runs}
        numbers = [int(run["state"]["message"].split("round ")[1].split()[0]) for run in runs]
        assert numbers == list(range(1, len(runs) + 1)), "no round twice, none left out"
        (deployment,) = {run["deployment_id"] for run in by_itself}
        assert ask(api, f"/deployments/{deployment}")["name"] == "micro-scheduled"
        artifacts = {artifact["key"] for artifact in ask(api, "/artifacts/filter", {"limit": 200})}
        assert {
            "loop-round1-dpo-checkpoint",
            "loop-round2-dpo-checkpoint",
            "evaluation-win-rates",
            "report",
        } <= artifacts
    finally:
        code = serve.stop()
    assert code == 130, serve.told()
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))
    requests = [request_of(folder, f"loop.round{number}.dpo") for number in numbers]
    for number, (before, after) in enumerate(pairwise(requests), start=1):
        made = f"loop.round{number}.dpo-{before.digest}/made/checkpoint"
        # a round starts from the result of the one before it
        assert after.inputs[f"loop.round{number}.dpo"].endswith(made)
    betas = [request.config.model_dump()["beta"] for request in requests]
    manual = [run["id"] for run in runs].index(asked)
    # the changed parameter is that of the run that was asked for alone
    assert betas[manual] == 0.3 and betas.count(0.3) == 1
    trained = [name for name in micro.begun(folder) if name.startswith("loop.")]
    assert len(trained) == len(set(trained)), "no stage of a round twice"


def test_a_manual_run_does_not_wait_for_late_ones(tmp_path: Path) -> None:
    """The late runs, as after a machine was off for a weekend, are older than the manual one."""
    folder = tmp_path / "here"
    serve = Serve(folder, micro.build(folder), "--cron", "0 2 * * *")
    try:
        api = serve.ready()
        nightly = ask(api, "/deployments/name/loop/micro-scheduled")["id"]
        for day in range(1, 11):
            body = {
                "state": {
                    "type": "SCHEDULED",
                    "state_details": {"scheduled_time": f"2026-01-{day:02d}T02:00:00+00:00"},
                }
            }
            ask(api, f"/deployments/{nightly}/create_flow_run", body)
        asked = serve.run(api, "alignment/micro", overrides=["seed=3"])
        serve.reaches(api, asked, "COMPLETED")
        late = ask(
            api, "/flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [nightly]}}, "limit": 100}
        )
        ended = [
            run["state_type"]
            for run in late
            if run["state_type"] in ("COMPLETED", "CANCELLED", "FAILED", "CRASHED")
        ]
        assert set(ended) <= {"COMPLETED", "CANCELLED"}
        # missed nights are one round, not ten
        assert len([name for name in micro.begun(folder) if name == "loop.round2.dpo"]) == 0
    finally:
        serve.stop()
