"""Makes a published model the champion of its recipe, and rolls back to the previous champion when a gate
about it fails.

rlhf_core/stages/publication/champion_record.py keeps the record and moves the branch on the Hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from prefect import get_run_logger

from rlhf_core.config import Publication
from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.gate_checks import gates_behind
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.remote.store import store_of
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.publication.champion_record import champions_of, complete, promote, rollback
from rlhf_core.system.machine import MachineLacks
from tasks.notify import notify_champion


def promote_published(planned: Plan, node: Node) -> None:
    """Makes the model of a finished publication the champion, if the recipe says so and the model has never
    been champion.

    Raises ValueError when the Hub rejects the move, and MachineLacks when the Hub cannot be reached; the next
    run completes the move.
    """
    config = node.config
    if (
        not isinstance(config, Publication)
        or not config.champion
        or config.dry_run
        or RunDir(node.run_dir).result() is None
    ):
        return
    store = store_of(planned.recipe)
    try:
        with suppress(ValueError):  # the Hub refused this move for good; the next one replaces it
            complete(planned.folder, store)
        if node.run_dir.name in {reign.run for reign in champions_of(planned.folder).reigns}:
            return
        passed = [verdict.summary for verdict in gates_behind(planned, node) if verdict.passed]
        new = promote(
            planned.folder, node.run_dir, "; ".join(passed) or "published, without gates", "its run", store
        )
    except ConnectionError as error:
        raise MachineLacks(str(error)) from None
    get_run_logger().info("%s is the champion", new.model)
    notify_champion(planned.recipe, new.model, new.run, new.why)


def roll_back(planned: Plan, failed: Sequence[Verdict]) -> None:
    """Rolls back to the previous champion when a failed gate is about the current champion's model. Only logs
    a warning if there is no previous champion. A champion promoted in the meantime is kept."""
    now = champions_of(planned.folder).now
    ours = [node for node in planned.nodes if now is not None and node.run_dir.name == now.run]
    if now is None or not ours:
        return
    published = ours[0].config.published_model
    assert published is not None
    model = planned[published].name
    about = [
        verdict for verdict in failed if model in subjects(planned, verdict) or verdict.stage == ours[0].name
    ]
    if not about:
        return
    why = about[0].summary
    try:
        then = rollback(planned.folder, why, "its run", store_of(planned.recipe), expected=now.run)
    except ConnectionError as error:
        raise MachineLacks(str(error)) from None
    except ValueError as error:  # there is no previous one, or a token is missing
        get_run_logger().warning("the champion %s was not rolled back: %s", now.model, error)
        return
    get_run_logger().warning("the champion %s was rolled back to %s: %s", now.model, then.model, why)
    notify_champion(planned.recipe, then.model, then.run, then.why)


def subjects(planned: Plan, verdict: Verdict) -> set[str]:
    """Returns the stages whose models a gate is about: the stage that its metric names, otherwise the stage
    of an evaluation's last model, otherwise the gate's own stage and its parents."""
    node = planned[verdict.stage]
    named = verdict.gate.metric.partition("/")[2]
    if named in planned.aliases or named in {other.name for other in planned.nodes}:
        return {planned[named].name}
    final = node.config.final_model
    if final is not None:
        return {planned[final].name} if final not in node.models else set()
    return {node.name, *node.parents}
