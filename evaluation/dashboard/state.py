"""Determines, from files and held locks alone, the state of a stage or a run, why it is waiting or has ended,
and its progress.

States of a stage: done; running (a process holds its lock); failed; killed (its process is gone without a
recorded end); waiting (its run is in progress); and not begun. Locks on another machine cannot be seen, so a
stage there counts as running while its files are less than FRESH seconds old.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from evaluation.dashboard.artifacts_folder import (
    FRESH,
    STAGES,
    Folder,
    Missing,
    identity_of,
    inside,
    recipe_of,
)
from evaluation.dashboard.growing import Attempt, is_number
from evaluation.report.template import percent
from rlhf_core.config import KINDS
from rlhf_core.config.gates import Gate
from rlhf_core.runs.approval_record import FILE as APPROVAL
from rlhf_core.runs.approval_record import Approval
from rlhf_core.runs.run_dir import HOLDER, LOG, METRICS, REQUEST, RESULT, ROLLOUTS
from rlhf_core.runs.run_records import RunRecord

CHAMPION = "champion.json"  # rlhf_core/stages/publication/champion_record.py keeps it in a recipe's folder
WIN_RATE = "win_rate/"  # followed by the name of a model
PARENTS = "waits for "  # followed by the names of the stages before it
HOST = re.compile(r" on (\S+) since ")
STOPPED = {
    128 + number: signal.Signals(number).name for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
}


class Stage(NamedTuple):
    """A stage at one moment. `folder`: the name of its run directory; `told`: a sentence that explains its
    state, or ''.

    `steps`: (done, all) while it runs; `left`: estimated remaining seconds; `seconds`: duration of the
    process that finished it; `changed`: the time when its files were last written, in seconds since 1970;
    `parents`: names of stages; `gates`: a phrase for each gate that it does not pass.
    """

    folder: str
    name: str
    kind: str
    state: str
    told: str = ""
    steps: tuple[int, int] | None = None
    left: float | None = None
    seconds: float | None = None
    changed: float | None = None
    metric: str = ""
    parents: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


def stage_of(
    folder: Folder, run_dir: Path, name: str = "", kind: str = "", parents: tuple[str, ...] = ()
) -> Stage:
    """Returns a stage's state from its run directory. `name`, `kind`: used if the stage has no request
    yet."""
    request = folder.request(run_dir)
    result = folder.json(run_dir / RESULT)
    config = request.get("config", {})
    found = Stage(
        run_dir.name,
        request.get("name", name) or run_dir.name,
        config.get("stage", kind),
        "not begun",
        parents=parents,
    )
    if not request:
        return found
    metrics = numbers(result.get("metrics"))
    found = found._replace(changed=folder.changed(run_dir))
    if is_number(result.get("seconds")):
        gates = tuple(open_gates(config, metrics, approval_of(folder, run_dir)))
        return found._replace(
            state="done", seconds=float(result["seconds"]), metric=main_metric(config, metrics), gates=gates
        )
    holder = folder.tail(run_dir / HOLDER)[:400]
    attempts = folder.attempts(run_dir)
    last = attempts.attempts[-1] if attempts.attempts else None
    host = HOST.search(holder)
    elsewhere = host is not None and host[1] != socket.gethostname()
    if folder.held(run_dir) or (elsewhere and folder.fresh(run_dir)):
        curves = folder.curves(run_dir)
        steps = attempts.progress
        left = (steps[1] - steps[0]) * curves.pace if steps and curves.pace else None
        metric = main_metric(config, curves.last)
        return found._replace(state="running", told=holder, steps=steps, left=left, metric=metric)
    how, why = _ended(holder, last, elsewhere)
    return found._replace(state=how, told=why, steps=attempts.progress)


def _ended(holder: str, last: Attempt | None, elsewhere: bool) -> tuple[str, str]:
    """Returns the state, and the reason for it, of a stage that has no result and that no process is
    running."""
    goes_on = "the next run continues from its last checkpoint"
    if elsewhere:
        return "killed", f"no update for {FRESH:.0f} s from {holder}"
    if last is not None and last.code is not None:
        if last.code in STOPPED:
            return "killed", f"ended by {STOPPED[last.code]}; {goes_on}"
        return "failed", f"exit code {last.code}; see the log for the reason"
    if holder or last is not None:
        return "killed", f"its process is gone; {goes_on}"
    return "not begun", "it was requested, but no process has started"


def run_stages(folder: Folder, run: RunRecord) -> list[Stage]:
    """Returns the stages of a run, as recorded if it has ended, otherwise read from their run directories."""
    found: list[Stage] = []
    for recorded in run.stages:
        try:
            run_dir = folder.stage(recorded.run_dir.partition("/")[2])
            stage = stage_of(folder, run_dir, recorded.name, recorded.kind, recorded.parents)
        except Missing:
            stage = Stage(
                recorded.run_dir.partition("/")[2],
                recorded.name,
                recorded.kind,
                "not begun",
                parents=recorded.parents,
            )
        if run.ended is not None and recorded.status in ("failed", "not run") and stage.state != "done":
            stage = stage._replace(state="failed" if recorded.status == "failed" else "not begun")
        found.append(stage._replace(name=recorded.name))
    return _waiting(run, found) if run.state == "running" else found


def _waiting(run: RunRecord, stages: list[Stage]) -> list[Stage]:
    """Returns the stages of a run in progress, with the reason why each of them is waiting."""
    done = {stage.name for stage in stages if stage.state == "done"}
    others = [stage.name for stage in stages if stage.state == "running"]
    told = []
    for stage in stages:
        # other stages may still be running beside it
        failed_now = stage.state == "failed" and (stage.changed or 0) >= run.started
        if stage.state == "done" or failed_now:
            told.append(stage)
        elif stage.state == "running":
            ours = not stage.told.startswith("run ") or (
                run.label in stage.told and f"process {run.pid}," in stage.told
            )
            told.append(
                stage
                if ours
                else stage._replace(state="waiting", told=f"another run is working on it: {stage.told}")
            )
        elif missing := [name for name in stage.parents if name not in done]:
            told.append(stage._replace(state="waiting", told=f"{PARENTS}{', '.join(missing)}"))
        else:
            why = (
                f"waits while {', '.join(others)} runs"
                if others
                else "starting, or waiting for another run's stage on this machine"
            )
            told.append(stage._replace(state="waiting", told=why))
    return told


class PendingApproval(NamedTuple):
    """A stage that waits for a person's approval. `recipe`: the recipe's folder in the artifacts, for
    `alignflow approve`."""

    folder: str
    recipe: str
    told: str


def questions(folder: Folder) -> list[PendingApproval]:
    """Returns the stages that a person may still approve or refuse, oldest question first."""
    read = (
        (file.parent.name, approval_of(folder, file.parent))
        for file in inside(folder.path, f"{STAGES}/*/{APPROVAL}")
    )
    asked = sorted(
        ((one.asked, name, one) for name, one in read if one and one.state() == "asked"),
        key=lambda found: found[:2],
    )
    return [PendingApproval(name, Path(one.recipe).name, one.told()) for _, name, one in asked]


def approval_of(folder: Folder, run_dir: Path) -> Approval | None:
    """Returns the question to a person about a stage; None if there is none or it is damaged."""
    try:
        return Approval.model_validate_json(json.dumps(folder.json(run_dir / APPROVAL)))
    except ValidationError:
        return None


def open_gates(config: Mapping[str, Any], metrics: Mapping[str, float], asked: Approval | None) -> list[str]:
    """Returns a phrase for each gate that a finished stage does not pass. `asked`: the question to a person,
    which is sent only if no other gate stops the dependent stages."""
    found: list[str] = []
    waits = held = False
    gates = config.get("gates")
    for given in gates if isinstance(gates, list) else ():
        try:
            gate = Gate.model_validate(given)
        except ValidationError:
            continue
        value = metrics.get(gate.metric)
        if gate.approve:
            found += [asked.told()] if asked and asked.state() != "approved" else []
            waits = asked is None
        elif not gate.passes(value):
            said = "missing" if value is None else f"{value:.4g}"
            found.append(f"does not pass a gate: {gate.metric} is {said}, {gate.bound} ({gate.on_fail})")
            held = held or gate.on_fail != "warn"
    return found + (["waits for a person"] if waits and not held else [])


def main_metric(config: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Returns the stage's main metric and its value, such as `eval/loss 0.434`; '' when it has none."""
    kind = KINDS.get(config.get("stage", ""))
    try:
        names = () if kind is None else kind.main_metrics(config)
    except (LookupError, TypeError, ValueError):  # a config from another version
        names = ()
    return next((f"{name} {metrics[name]:.4g}" for name in names if name in metrics), "")


def numbers(found: object) -> dict[str, float]:
    """Returns the numbers in a JSON object, by name."""
    return (
        {name: float(value) for name, value in found.items() if is_number(value)}
        if isinstance(found, dict)
        else {}
    )


def watched(folder: Folder, run_dir: Path) -> tuple[object, ...]:
    """Returns a value that stays the same while nothing changes in a run directory."""
    names = (REQUEST, METRICS, LOG, RESULT, HOLDER, ROLLOUTS, APPROVAL)
    return (folder.held(run_dir), *(identity_of(run_dir / name) for name in names))


def win_rate(folder: Folder, run: RunRecord) -> str:
    """Returns the win rate of the last model in a run's last finished evaluation with its 95 % interval,
    such as `ppo 61.2 % (55.0–67.1 %)`; '' if there is none."""
    for stage in reversed(run.stages):
        try:
            run_dir = folder.stage(stage.run_dir.partition("/")[2])
        except Missing:
            continue
        config = folder.request(run_dir).get("config", {})
        if config.get("stage") != "evaluation":
            continue
        text = _win_rate_text(config, numbers(folder.json(run_dir / RESULT).get("metrics")))
        if text:
            return text
    return ""


def _win_rate_text(config: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Returns the win rate of an evaluation's last model, or of the last judged model if the last model was
    not judged (for example, because it is the baseline)."""
    judged = [name.removeprefix(WIN_RATE) for name in metrics if name.startswith(WIN_RATE)]
    if not judged:
        return ""
    models = config.get("models")
    named = models[-1] if isinstance(models, list) and models else None
    model = named if named in judged else judged[-1]
    rate = percent(metrics[f"{WIN_RATE}{model}"], 1)
    bounds = [metrics.get(f"{bound}/{model}") for bound in ("ci_low", "ci_high")]
    if None in bounds:
        return f"{model} {rate}"
    return f"{model} {rate} ({percent(bounds[0], 1).removesuffix(' %')}–{percent(bounds[1], 1)})"


def champion(folder: Folder, run: RunRecord) -> str:
    """Returns the champion of a run's recipe if this run published it; '' otherwise."""
    reigns = folder.json(folder.path / recipe_of(run) / CHAMPION).get("reigns")
    last = reigns[-1] if isinstance(reigns, list) and reigns else None
    if not isinstance(last, dict):
        return ""
    ours = {stage.run_dir for stage in run.stages}
    return str(last.get("model", "")) if f"{STAGES}/{last.get('run')}" in ours else ""
