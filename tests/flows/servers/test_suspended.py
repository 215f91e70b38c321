"""A run of `alignflow serve` that waits for a person: its process ends, and the form on Prefect's page starts
it again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_core.runs.approval_record import FILE, Approval
from tests.crash.points import command_of
from tests.support import micro
from tests.support.micro import RECIPE, Serve, ask, wait_until
from tests.support.programs import captured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GATED = RECIPE.replace(
    "questions: {path: q.jsonl}}", "questions: {path: q.jsonl}, gates: [{approve: {within: 2h}}]}"
)
GATED += "  publication: {model: loop, evaluation: evaluation, folder: published}\n"


def question(folder: Path) -> Approval:
    (file,) = (folder / "artifacts/stages").glob(f"evaluation-*/{FILE}")
    found = Approval.read(file)
    assert found is not None
    return found


def flows_running(folder: Path) -> list[str]:
    commands = [" ".join(command_of(process)) for process in micro.left(folder)]
    return [
        command
        for command in commands
        if "prefect.engine" in command or "flow-run execute" in command or "flow_run" in command
    ]


def test_a_form_starts_a_suspended_run_again_also_after_a_restart_of_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = micro.build(folder, GATED)
    serve = Serve(folder, environment, "--no-schedule")
    try:
        api = serve.ready()
        run = serve.run(api, "alignment/micro")
        serve.reaches(api, run, "PAUSED")
        wait_until(lambda: not flows_running(folder), "the process of the suspended run to end")
        assert question(folder).run == run and "publication" not in micro.begun(folder)
    finally:
        assert serve.stop() == 130
    serve = Serve(folder, environment, "--no-schedule")
    try:
        api = serve.ready()
        assert serve.state(api, run) == "PAUSED"
        given = {"run_input": {"approve": True, "reason": "better than before", "by": "ann"}}
        assert ask(api, f"/flow_runs/{run}/resume", given)["status"] == "ACCEPT"
        serve.reaches(api, run, "COMPLETED")
        assert question(folder).told() == "approved by ann (better than before)"
        begun = micro.begun(folder)
        assert begun[-1] == "publication" and len(begun) == len(set(begun)), "nothing was run twice"
    finally:
        serve.stop()
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))


@pytest.mark.long
def test_a_no_in_the_form_and_a_yes_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = micro.build(folder, GATED)
    serve = Serve(folder, environment, "--no-schedule")
    try:
        api = serve.ready()
        run = serve.run(api, "alignment/micro")
        serve.reaches(api, run, "PAUSED")
        other = serve.run(api, "alignment/micro")
        serve.reaches(api, other, "FAILED")
        command = [sys.executable, "-m", "flows.cli", "approve", "artifacts/micro", "--by", "bob"]
        told = captured(command, cwd=folder, env=environment | micro.client(api))
        assert told.returncode == 0 and "its suspended run continues" in told.stdout, told
        serve.reaches(api, run, "COMPLETED")
        assert question(folder).told() == "approved by bob"
        changed = serve.run(api, "alignment/micro", overrides=["loop.beta=0.4"])
        serve.reaches(api, changed, "PAUSED")
        refusal = {"run_input": {"approve": False, "reason": "", "by": "ann"}}
        assert ask(api, f"/flow_runs/{changed}/resume", refusal)["status"] == "ACCEPT"
        serve.reaches(api, changed, "FAILED")
        assert "refused by ann" in ask(api, f"/flow_runs/{changed}")["state"]["message"]
        assert micro.begun(folder).count("publication") == 1
    finally:
        serve.stop()
