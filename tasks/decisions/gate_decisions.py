"""Checks the gates of a finished stage, and shows the verdicts in the log and as an artifact.

`OpenStages` in flows/alignment.py stops the run, or the dependent stages, when a gate fails.
"""

from __future__ import annotations

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.gate_checks import gates_of
from rlhf_core.recipe.plan import Node
from rlhf_core.system.markdown_table import table
from tasks.decisions.approval import asked_by_this_run
from tasks.stages import artifact_key


def check_gates(node: Node) -> tuple[Verdict, ...]:
    """Shows and returns the verdicts on a stage; there are none when it is not done or has no gates."""
    verdicts = gates_of(node)
    if asked_by_this_run(node.run_dir):  # the form is read before the deadline applies
        verdicts = tuple(
            v.model_copy(update={"waits": True}) if v.gate.approve and not v.passed else v for v in verdicts
        )
    if not verdicts:
        return ()
    logger = get_run_logger()
    for verdict in verdicts:
        if verdict.passed:
            logger.info("gate passed: %s", verdict.summary)
        elif verdict.waits:
            logger.info("%s", verdict.summary)
        else:
            logger.warning("gate failed (%s): %s. %s", verdict.gate.on_fail, verdict.summary, verdict.meaning)
    rows = [
        (v.gate.what, v.value, v.gate.bound, v.word, v.gate.on_fail, v.meaning or v.said) for v in verdicts
    ]
    shown = table(("metric", "value", "bound", "verdict", "if it fails", "what that means"), rows)
    create_markdown_artifact(
        shown, key=f"{artifact_key(node.name)}-gates", description=f"gates of {node.name}"
    )
    return verdicts
