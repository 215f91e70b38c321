"""Command `alignflow approve`: a person's decision on stages that wait for one."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from flows.cli.show import OK, require_folder, say
from rlhf_core.runs.approval_record import Approval, asked_in, decide


def approve(
    folder: Path,
    *,
    stage: str | None = None,
    refuse: bool = False,
    reason: str = "",
    by: str | None = None,
    late: bool = False,
) -> int:
    """Approve (or refuse) the stages of a recipe that wait for a person; a run suspended on a server resumes.

    Args:
        folder: the recipe's folder, ARTIFACTS/NAME, which holds its report.
        stage: decide only on this stage, named as in the report.
        refuse: refuse instead; dependent stages do not start, and a loop continues from the previous model.
        reason: stored with the decision.
        by: who decides; default: your user name on this machine.
        late: decide although the gate's deadline has passed.
    """
    require_folder(folder)
    asked = asked_in(folder.absolute())
    if stage is not None and stage not in {question.stage for _, question in asked}:
        named = ", ".join(dict.fromkeys(question.stage for _, question in asked)) or "none"
        raise ValueError(f"{folder}: no approval of {stage} was requested; stages with a request: {named}")
    wanted = ("asked", "late") if late or stage is not None else ("asked",)
    chosen = [(run_dir, question) for run_dir, question in asked if stage in (None, question.stage)]
    chosen = [item for item in chosen if item[1].state() in wanted] or (
        chosen[-1:] if stage is not None else []
    )
    if not chosen:
        told = (
            "; ".join(f"{question.stage}: {question.told()}" for _, question in asked)
            or "its gates have not requested any yet"
        )
        raise ValueError(f"{folder}: no stage waits for an approval ({told})")
    for run_dir, _ in chosen:
        made = decide(run_dir, not refuse, by or getpass.getuser(), reason, late)
        say(f"{made.stage}: {made.told()}")
        say(_going_on(made, run_dir))
    return OK


def _going_on(made: Approval, run_dir: Path) -> str:
    """Resumes the run that was suspended for this stage, if a server knows it. Returns a sentence about what
    happens next."""
    if made.run is None or "PREFECT_API_URL" not in os.environ:
        return (
            "run the recipe again to continue"
            if made.run is None
            else "its run continues when the loop or the recipe runs again"
        )
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.flow_runs import resume_flow_run

    from tasks.decisions.approval import KEY

    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(made.run).state  # type: ignore[arg-type]
        if state is not None and state.is_paused():
            if state.state_details.pause_key != f"{KEY}{run_dir.name}":
                return "its suspended run waits for another stage's approval"
            resume_flow_run(
                made.run,  # type: ignore[arg-type,unused-ignore]
                run_input={"approve": made.decision == "approved", "reason": made.reason, "by": made.by},
            )
            return "its suspended run continues"
    except (PrefectException, OSError, RuntimeError) as error:
        return (
            f"its suspended run could not be reached ({type(error).__name__}): the loop's next run starts the"
            " stage again"
        )
    return "its run has ended: run the recipe again to continue"
