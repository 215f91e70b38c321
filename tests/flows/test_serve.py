"""From nothing: `alignflow serve`, a run that somebody asks for, and the schedule that fires by itself, all seen through Prefect's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.stage import StageRequest
from tests import micro
from tests.micro import Serve, ask, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def completed(api: str) -> list[dict[str, Any]]:
    """Runs that trained a round, the first first."""
    runs = ask(api, "/flow_runs/filter", {"sort": "START_TIME_ASC", "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}})
    return [run for run in runs if "is done" in str(run["state"]["message"])]


def request_of(folder: Path, stage: str) -> StageRequest:
    (file,) = (folder / "artifacts/stages").glob(f"{stage}-*/config.json")
    return StageRequest.model_validate_json(file.read_text())


def test_a_manual_run_and_two_rounds_by_the_schedule(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    serve = Serve(folder, micro.build(folder), "--every", "8")
    try:
        api = serve.ready()
        asked = serve.run(api, "loop/micro", overrides=["loop.beta=0.3", "loop.learning_rate=1e-6"])
        wait_until(lambda: len(completed(api)) >= 3, "three rounds", 240, serve.told)
        runs = completed(api)
        wait_until(lambda: serve.state(api, asked) == "COMPLETED", "the run that was asked for", 60, serve.told)
        by_itself = [run for run in runs if run["auto_scheduled"]]
        assert len(by_itself) >= 2, "the schedule fires by itself"
        numbers = [int(run["state"]["message"].split("round ")[1].split()[0]) for run in runs]
        assert numbers == list(range(1, len(runs) + 1)), "no round twice, none left out"
        (deployment,) = {run["deployment_id"] for run in by_itself}
        assert ask(api, f"/deployments/{deployment}")["name"] == "micro-scheduled"
        artifacts = {artifact["key"] for artifact in ask(api, "/artifacts/filter", {"limit": 200})}
        assert {"loop-round1-dpo-checkpoint", "loop-round2-dpo-checkpoint", "evaluation-win-rates", "report"} <= artifacts
    finally:
        code = serve.stop()
    assert code == 130, serve.told()
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))
    first, second = (request_of(folder, f"loop.round{k}.dpo") for k in (1, 2))
    assert second.inputs["loop.round1.dpo"].endswith(f"loop.round1.dpo-{first.digest}/made/checkpoint"), "round 2 starts from round 1"
    record = json.loads((folder / "artifacts/micro/loop.json").read_text())
    assert [done["stages"]["loop.round1.dpo"] for done in record["rounds"][:1]] == [first.digest]
    assert len([name for name in micro.begun(folder) if name == "loop.round1.dpo"]) == 1
    asked_for = 0.3 if asked in {run["id"] for run in runs} else 0.1  # unless a scheduled run was quicker, and trained a round meanwhile
    assert asked_for in {request_of(folder, f"loop.round{k}.dpo").config.beta for k in numbers}  # type: ignore[union-attr]


def test_a_manual_run_does_not_wait_for_late_ones(tmp_path: Path) -> None:
    """Runs that are late, as after a machine was off for a weekend, are older than the one somebody asks for."""
    folder = tmp_path / "here"
    serve = Serve(folder, micro.build(folder), "--cron", "0 2 * * *")
    try:
        api = serve.ready()
        nightly = ask(api, "/deployments/name/loop/micro-scheduled")["id"]
        for day in range(1, 31):
            body = {"state": {"type": "SCHEDULED", "state_details": {"scheduled_time": f"2026-01-{day:02d}T02:00:00+00:00"}}}
            ask(api, f"/deployments/{nightly}/create_flow_run", body)
        asked = serve.run(api, "alignment/micro", overrides=["seed=3"])
        wait_until(lambda: serve.state(api, asked) == "COMPLETED", "the run that was asked for", 120, serve.told)
        late = ask(api, "/flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [nightly]}}, "limit": 100})
        ended = [run["state_type"] for run in late if run["state_type"] in ("COMPLETED", "CANCELLED", "FAILED", "CRASHED")]
        assert set(ended) <= {"COMPLETED", "CANCELLED"}
        assert len([name for name in micro.begun(folder) if name == "loop.round2.dpo"]) == 0, "missed nights are one round, not thirty"
    finally:
        serve.stop()
