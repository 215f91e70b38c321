"""Reads the stages, gates and win rate of one round of a loop from a plan and its run directories."""

from __future__ import annotations

from datetime import UTC, datetime

from rlhf_core.config.gates import Verdict
from rlhf_core.config.kinds import has_metric
from rlhf_core.recipe.gate_checks import gates_of, holding
from rlhf_core.recipe.loops.loop_record import Round
from rlhf_core.recipe.plan import Plan
from rlhf_core.runs.run_dir import RESULT, RunDir


def is_fresh(planned: Plan, loop: str, number: int) -> bool:
    """Returns whether no stage of a round has been started."""
    return not any(node.run_dir.exists() for node in planned.stages_of(f"{loop}.round{number}"))


def stages_of_round(planned: Plan, loop: str, number: int) -> dict[str, str]:
    """Returns the digests of a round's stages, and of finished publications of that round alone."""
    ours = {node.name: node.digest for node in planned.stages_of(f"{loop}.round{number}")}
    published = {
        node.name: node.digest
        for node in planned.nodes
        if node.done and _publishes(planned, node.name, loop, number)
    }
    return ours | published


def _publishes(planned: Plan, name: str, loop: str, number: int) -> bool:
    title = f"{loop}.round{number}"
    return name.endswith(f".round{number}") and planned[name].config.published_model == title


def failed_gates(planned: Plan) -> tuple[Verdict, ...]:
    """Returns the failed gates, of all stages, that stop dependent stages."""
    return tuple(verdict for node in planned.nodes for verdict in holding(gates_of(node)))


def waiting_gates(planned: Plan) -> tuple[Verdict, ...]:
    """Returns the gates that wait for a person's approval."""
    return tuple(verdict for node in planned.nodes for verdict in gates_of(node) if verdict.waits)


def is_settled(planned: Plan) -> bool:
    """Returns whether all stages are done and no gate has failed or is waiting."""
    if not all(node.done for node in planned.nodes):
        return False
    return not failed_gates(planned) and not waiting_gates(planned)


def adopted(planned: Plan, loop: str, number: int) -> Round:
    """Returns the record of a finished round, from the results of its stages."""
    title = f"{loop}.round{number}"
    ended = (planned[title].run_dir / RESULT).stat().st_mtime
    used = [
        name
        for name, stage in planned.aliases.items()
        if name.startswith(f"{loop}.round") and stage.startswith(f"{name}.")
    ]
    earlier = used[: used.index(title)]
    metric = f"win_rate/{title}"
    before = f"win_rate/{earlier[-1]}" if earlier else ""
    results = [RunDir(node.run_dir).result() for node in planned.nodes if has_metric(node.config, metric)]
    judged = next((result.metrics for result in results if result and metric in result.metrics), {})
    stages = stages_of_round(planned, loop, number)
    when = datetime.fromtimestamp(ended, UTC)
    taken = dict(planned.taken.get(title, {}))
    return Round(
        stages=stages,
        begun=None,
        ended=when,
        win_rate=judged.get(metric),
        before=judged.get(before),
        taken=taken,
    )
