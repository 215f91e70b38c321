"""What a run does that waits for a person: who decided meanwhile, and what no answer means."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from flows.cli.operate import approve
from rlhf_core.runs.approval_record import Approval, ask
from tasks.decisions import approval

RUN = "8d0f2a64-0000-4000-8000-000000000001"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Approval]]:
    """Two stages that a run of a deployment has asked about."""
    monkeypatch.setattr(
        approval,
        "runtime",
        SimpleNamespace(deployment=SimpleNamespace(id="d"), flow_run=SimpleNamespace(id=RUN)),
    )
    found = []
    for stage in ("a", "b"):
        run_dir = tmp_path / f"{stage}-0123"
        run_dir.mkdir()
        found.append((run_dir, ask(run_dir, stage, tmp_path, timedelta(hours=1), RUN)))
    return found


def test_a_decision_made_meanwhile_suspends_nothing(
    asked: list[tuple[Path, Approval]], monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended: list[str] = []
    run_dir, question = asked[1]
    decided = [asked[0], (run_dir, question.model_copy(update={"decision": "approved"}))]
    planned: Any = SimpleNamespace(folder=run_dir.parent)
    monkeypatch.setattr(approval, "_suspended", lambda question, key, page: suspended.append(key))
    monkeypatch.setattr(approval, "ask_about", lambda planned, verdicts: decided)
    approval.await_approvals(planned, [])
    assert suspended == []


def test_no_answer_is_no_refusal() -> None:
    form = approval.Decision.with_initial_data(description="Publish?")
    with pytest.raises(ValidationError, match="approve"):
        form()


class Client:
    """A server with one suspended run."""

    def __init__(self, key: str):
        self.state = SimpleNamespace(is_paused=lambda: True, state_details=SimpleNamespace(pause_key=key))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read_flow_run(self, run: str) -> SimpleNamespace:
        return SimpleNamespace(state=self.state)


@pytest.mark.parametrize(
    ("stage", "told", "resumed"),
    [(0, "its suspended run continues", 1), (1, "its suspended run waits for another stage's approval", 0)],
)
def test_the_command_answers_only_the_form_of_its_stage(
    asked: list[tuple[Path, Approval]], stage: int, told: str, resumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[dict[str, Any]] = []
    client = Client(f"approval-{asked[0][0].name}")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda sync_client: client)
    monkeypatch.setattr("prefect.flow_runs.resume_flow_run", lambda run, run_input: answers.append(run_input))
    run_dir, question = asked[stage]
    now = question.model_copy(update={"decision": "approved", "by": "ann", "at": datetime.now(UTC)})
    assert approve._going_on(now, run_dir) == told and len(answers) == resumed
