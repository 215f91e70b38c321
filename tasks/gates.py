"""Checks the gates of a finished stage, and shows the verdicts in the log and as an artifact."""

from __future__ import annotations

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.gates import gates_of
from rlhf_core.recipe.plan import Node
from tasks.stages import artifact_key


def check_gates(node: Node) -> tuple[Verdict, ...]:
    """Returns the verdicts on a stage, and shows them; empty when it is not done or has no gates."""
    verdicts = gates_of(node)
    if not verdicts:
        return ()
    logger = get_run_logger()
    for verdict in verdicts:
        if verdict.passed:
            logger.info("gate passed: %s", verdict.summary)
        else:
            logger.warning("gate failed (%s): %s. %s", verdict.gate.on_fail, verdict.summary, verdict.meaning)
    rows = [
        f"| {v.gate.metric} | {'' if v.value is None else f'{v.value:.6g}'} | {v.gate.bound} | {'passed' if v.passed else 'failed'} "
        f"| {v.gate.on_fail} | {v.meaning} |"
        for v in verdicts
    ]
    head = "| metric | value | bound | verdict | if it fails | what that means |\n|---|---|---|---|---|---|\n"
    create_markdown_artifact(head + "\n".join(rows) + "\n", key=f"{artifact_key(node.name)}-gates", description=f"gates of {node.name}")
    return verdicts
