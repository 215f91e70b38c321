"""Asks a person about a stage whose gate requires an approval.

A run of a deployment is suspended: its process ends, Prefect's page of the run shows a form, and the decision
resumes the run. Any other run ends with ApprovalAwaited and continues when it is run again after `alignflow
approve`.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from prefect import get_run_logger, runtime
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput

from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.gate_checks import ApprovalAwaited
from rlhf_core.recipe.plan import Plan
from rlhf_core.runs.approval_record import FILE, Approval, ask, decide, mark_notified
from tasks.notify import notify_approval

KEY = "approval-"  # prefix of the name of a stage's directory


class Decision(RunInput):
    """The form on Prefect's page of a suspended run."""

    approve: bool
    reason: str = ""
    by: str = ""


def asked_by_this_run(run_dir: Path) -> bool:
    """Returns whether this run of a deployment has asked about a stage, in which case its form may have been
    answered before the deadline."""
    question = Approval.read(run_dir / FILE)
    return bool(
        runtime.deployment.id
        and question
        and question.decision is None
        and question.run == str(runtime.flow_run.id)
    )


def ask_about(planned: Plan, verdicts: Sequence[Verdict]) -> list[tuple[Path, Approval]]:
    """Asks once about each stage of these verdicts and sends a message. Returns the run directories and
    questions."""
    ours = str(runtime.flow_run.id) if runtime.deployment.id else None
    asked = []
    for verdict in verdicts:
        assert verdict.gate.approve is not None
        node = planned[verdict.stage]
        question = ask(node.run_dir, node.name, planned.folder, verdict.gate.approve.time, ours)
        if not question.notified:
            notify_approval(planned.recipe, question, planned.folder / "report.html")
            question = mark_notified(node.run_dir)
        asked.append((node.run_dir, question))
    return asked


def await_approvals(planned: Plan, verdicts: Sequence[Verdict]) -> None:
    """Asks about the waiting stages of these verdicts. Returns when a person has decided about one of them in
    this run.

    In a run of a deployment, raises the Prefect signal that suspends it. Raises ApprovalAwaited in other
    runs, or if another run has asked.
    """
    ours = str(runtime.flow_run.id) if runtime.deployment.id else None
    asked = ask_about(planned, verdicts)
    mine = [(run_dir, question) for run_dir, question in asked if ours is not None and question.run == ours]
    if not mine:
        told = [
            v.model_copy(update={"said": question.told()})
            for v, (_, question) in zip(verdicts, asked, strict=True)
        ]
        raise ApprovalAwaited(told, str(planned.folder))
    if any(question.decision is not None for _, question in mine):
        return  # decided with `alignflow approve` after these verdicts
    run_dir, question = mine[0]
    given = _suspended(question, run_dir.name, f"{planned.folder}/report.html")
    made = decide(run_dir, given.approve, given.by or getpass.getuser(), given.reason, late=True)
    get_run_logger().info("stage %s: %s", question.stage, made.told())


def _suspended(question: Approval, key: str, page: str) -> Decision:
    """Suspends this run. Once the run is resumed, returns the person's decision."""
    about = f"Publish what depends on **{question.stage}**? Its report: {page}"
    # no default, because resuming a run without an answer must not count as a refusal
    form = Decision.with_initial_data(description=about)
    seconds = max(1, int((question.until - datetime.now(UTC)).total_seconds()))
    given = suspend_flow_run(wait_for_input=form, timeout=seconds, key=f"{KEY}{key}")
    assert isinstance(given, Decision)
    return given
