"""Checks the gates of a finished stage, using only the stage's result, and explains what a failed gate
usually means. Torch-free.

`OpenStages` in flows/alignment.py stops the run, or the dependent stages, when a gate fails. Verdicts are not
stored, because the same recipe and results give the same verdicts in every process; a changed bound therefore
applies immediately.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import KINDS, PPO, StageConfig
from rlhf_core.config.gates import Verdict
from rlhf_core.config.metrics.metric import meaning_of_failure
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.records import StageResult
from rlhf_core.runs.approval_record import FILE as APPROVAL
from rlhf_core.runs.approval_record import Approval
from rlhf_core.runs.run_dir import RunDir


class GateFailed(RuntimeError):
    """Raised when finished stages fail a gate, so that their dependents are not started."""

    def __init__(self, verdicts: Sequence[Verdict]):
        self.verdicts = tuple(verdicts)
        super().__init__(self.verdicts)

    def __str__(self) -> str:
        return "\n".join(
            f"{verdict.summary}: what depends on it was not started. {verdict.meaning}".rstrip()
            for verdict in self.verdicts
        )


class ApprovalAwaited(RuntimeError):
    """Raised when stages wait for a person's approval, so that their dependents are not started."""

    def __init__(self, verdicts: Sequence[Verdict], folder: str):
        self.verdicts = tuple(verdicts)
        self.folder = folder
        super().__init__(self.verdicts, folder)

    def __str__(self) -> str:
        waiting = "\n".join(verdict.summary for verdict in self.verdicts)
        return (
            f"{waiting}\nlook at {self.folder}/report.html, then: alignflow approve {self.folder} (or"
            " --refuse), and run this again"
        )


def check(
    name: str, config: StageConfig, result: StageResult, approval: Approval | None = None
) -> tuple[Verdict, ...]:
    """Returns a verdict for each gate of a stage. A metric that is missing, NaN or infinite does not pass. A
    gate that requires an approval waits until a person has decided."""
    others_fail = any(
        not gate.passes(result.metrics.get(gate.metric))
        for gate in config.gates
        if not gate.approve and gate.on_fail != "warn"
    )
    verdicts = []
    for gate in config.gates:
        if gate.approve is not None:
            state = approval.state() if approval else "asked"
            unasked = "nobody is asked while another gate fails" if others_fail else "waits for a person"
            said = approval.told() if approval else unasked
            passed = state == "approved"
            waits = state == "asked"
            verdicts.append(Verdict(stage=name, gate=gate, value=None, passed=passed, said=said, waits=waits))
            continue
        value = result.metrics.get(gate.metric)
        passed = gate.passes(value)
        meaning = "" if passed else meaning_of(config.stage, gate.metric)
        verdicts.append(Verdict(stage=name, gate=gate, value=value, passed=passed, meaning=meaning))
    return tuple(verdicts)


def gates_of(node: Node) -> tuple[Verdict, ...]:
    """Returns the verdicts on a planned stage, or an empty tuple if it is not done or has no gates."""
    result = RunDir(node.run_dir).result() if node.config.gates else None
    return check(node.name, node.config, result, Approval.read(node.run_dir / APPROVAL)) if result else ()


def gates_behind(planned: Plan, node: Node) -> tuple[Verdict, ...]:
    """Returns the verdicts on every stage that `node` depends on, directly or not, parents first."""
    return tuple(verdict for stage in planned.ancestors((node,)) for verdict in gates_of(stage))


def uncheckable(planned: Plan, nodes: Sequence[Node]) -> list[Node]:
    """Returns the gated stages whose gates cannot be checked although publications among `nodes` depend on
    them: stages that have no result and are not among `nodes`."""
    here = {node.name for node in nodes}
    behind = planned.ancestors([node for node in nodes if KINDS[node.kind].publishes and not node.done])
    return [stage for stage in behind if stage.config.gates and stage.name not in here and not stage.done]


def holding(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Returns the failed gates that stop dependent stages (all but `on_fail: warn`), except pending
    approvals."""
    return [
        verdict
        for verdict in verdicts
        if not verdict.passed and not verdict.waits and verdict.gate.on_fail != "warn"
    ]


def reset_reference_notes(planned: Plan) -> list[str]:
    """Returns a sentence for each gate on the KL to a reference that is reset, because such a gate does not
    bound the drift from the initial model."""
    return [
        f"stages.{node.name}.gates: {gate.metric} is measured from the reference, which"
        f" reset_reference_every={node.config.reset_reference_every} replaces by the actor: it bounds the"
        " drift since the last reset, and not since the start"
        for node in planned.nodes
        if isinstance(node.config, PPO) and node.config.reset_reference_every is not None
        for gate in node.config.gates
        if gate.metric.startswith("kl/")
    ]


def meaning_of(kind: str, metric: str) -> str:
    """Returns one or two sentences about the usual meaning of a failed gate on this metric, or '' if none is
    known."""
    return meaning_of_failure(KINDS[kind].metrics, metric)
