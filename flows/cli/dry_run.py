"""Predicts what a run would do with each stage, and why, for `alignflow run --dry-run`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from rlhf_core.recipe.gate_checks import gates_of
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.differences import changes
from rlhf_core.runs.remote.store import store_of
from rlhf_core.runs.run_dir import REQUEST, RESULT, RunDir, StageRequest

MOST_CHANGES = 4  # changes named in one line


class Outlook(NamedTuple):
    """What a run would do with a stage. `why` is one line."""

    node: Node
    action: Literal["skip", "fetch", "resume", "run"]
    why: str


def outlook(plan: Plan) -> list[Outlook]:
    """Returns one outlook for each stage, parents first. Raises StoreFault when the recipe's store cannot be
    read."""
    return [Outlook(node, *_action(plan, node)) for node in plan.nodes]


def _action(plan: Plan, node: Node) -> tuple[Literal["skip", "fetch", "resume", "run"], str]:
    run = RunDir(node.run_dir)
    result = run.result()
    if result is not None:
        open_gates = [verdict for verdict in gates_of(node) if not verdict.passed]
        failed = [
            v.said if v.gate.approve else f"{v.gate.metric} fails its gate ({v.gate.on_fail})"
            for v in open_gates
        ]
        return "skip", ", ".join([f"done in {result.seconds:.0f} s", *failed])
    store = store_of(plan.recipe)
    if store is not None and store.has(run.path.name):
        return "fetch", f"done, in {store.files.url}"
    if (run / RESULT).exists():
        return "run", "its result names files that are missing or truncated"
    if (run / REQUEST).exists():
        return "resume", "started but not finished: continues from its last checkpoint, if it saved one"
    earlier = _earlier(node)
    if earlier is None:
        return "run", "never run"
    return "run", _differences(earlier, plan.request(node))


def _earlier(node: Node) -> StageRequest | None:
    """Returns the request from the most recently finished other run directory of this stage, or None."""
    length = len(f"{node.name}-{node.digest}")
    others = [
        path
        for path in node.run_dir.parent.glob(f"{node.name}-*")
        if len(path.name) == length and (path / RESULT).exists()
    ]
    for path in sorted(others, key=lambda path: (path / RESULT).stat().st_mtime, reverse=True):
        try:
            return RunDir(path).request()
        except (OSError, ValidationError):
            continue
    return None


def _differences(old: StageRequest, new: StageRequest) -> str:
    changed = [
        f"{key} {before} -> {after}"
        for key, before, after in changes(old.config.model_dump(), new.config.model_dump())
    ]
    if old.seed != new.seed:
        changed.append(f"seed {old.seed} -> {new.seed}")
    changed += [
        f"another {name}"
        for name, place in new.inputs.items()
        if name in old.inputs and Path(old.inputs[name]) != Path(place)
    ]
    if not changed:
        return "its data, its base model or the stage's code changed"
    more = f" and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
    return "changed: " + ", ".join(changed[:MOST_CHANGES]) + more
