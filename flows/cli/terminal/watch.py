"""Describes the progress of a run's stages from the files that they write, using the dashboard's readers."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.dashboard.artifacts_folder import Folder
from evaluation.dashboard.state import PARENTS, Stage, run_stages
from flows.cli.terminal.frame import RunMoment, StageLine
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.launch import is_noise, plain
from rlhf_core.runs.run_dir import LOG
from rlhf_core.runs.run_records import RUNS, RunRecord, read

STEP = re.compile(r"step \d+/\d+\s+")
LAST_LINES = 20  # read from a log; the last one that is not noise is shown
SHOWN_TEXT = 200  # characters
# from the dashboard; any other state counts as waiting
STATES = {"done": "done", "running": "running", "failed": "failed", "killed": "failed"}


@dataclass(frozen=True)
class FirstSeen:
    """The time when a stage's progress was first seen, and its value then."""

    since: float
    done: int
    whole: int


class RunWatch:
    """Watches the stages of one run. `nodes`: the stages that it runs; `identity`: the id of its record."""

    def __init__(self, planned: Plan, nodes: Sequence[Node], identity: str):
        self._planned = planned
        self._nodes = nodes
        self._record_file = planned.folder / RUNS / f"{identity}.json"
        self._record: RunRecord | None = None
        self._before = {node.name for node in nodes if node.done}
        self._folder = Folder(planned.artifacts)
        self._paces = dict[str, FirstSeen]()
        self._began = time.monotonic()

    def moment(self, doing: str) -> RunMoment:
        """Returns the run's current state. `doing`: as in `RunMoment`."""
        seconds = time.monotonic() - self._began
        return RunMoment(self._planned.recipe.name, seconds, doing, self._lines())

    def _lines(self) -> list[StageLine]:
        if self._record is None and self._record_file.is_file():
            record = read(self._record_file, lambda _: True)
            self._record = record if record.stages else None
        if self._record is None:
            return [self._planned_line(node) for node in self._nodes]
        self._folder.look()
        stages = {stage.name: stage for stage in run_stages(self._folder, self._record)}
        return [self._line(stages[node.name], stages) for node in self._nodes if node.name in stages]

    def _planned_line(self, node: Node) -> StageLine:
        """Returns a stage's line before the run has begun."""
        if node.name in self._before:
            return StageLine(node.name, "skipped")
        parents = [name for name in node.parents if name not in self._before]
        return StageLine(node.name, "waiting", text=f"{PARENTS}{', '.join(parents)}" if parents else "")

    def _line(self, stage: Stage, stages: dict[str, Stage]) -> StageLine:
        if stage.state == "done":
            text = "; ".join((stage.metric, *stage.gates)).strip("; ")
            return StageLine(
                stage.name, "skipped" if stage.name in self._before else "done", stage.seconds, text=text
            )
        if stage.state != "running":
            return StageLine(
                stage.name, STATES.get(stage.state, "waiting"), text=_held_by(stage, stages) or stage.told
            )
        run_dir = self._folder.path / "stages" / stage.folder
        attempts = self._folder.attempts(run_dir).attempts
        seconds = time.time() - attempts[-1].started if attempts else None
        step = self._folder.curves(run_dir).step
        steps = stage.steps
        if steps is not None and step is not None:
            steps = (min(max(steps[0], int(step)), steps[1]), steps[1])
        left = stage.left if stage.left is not None else self._left(stage.name, steps)
        return StageLine(stage.name, "running", seconds, steps, left, self._says(stage))

    def _left(self, name: str, steps: tuple[int, int] | None) -> float | None:
        """Returns the estimated seconds for the remaining steps at the pace seen so far; None until a pace is
        known."""
        if steps is None:
            return None
        done, whole = steps
        pace = self._paces.get(name)
        if pace is None or pace.whole != whole or done < pace.done:
            self._paces[name] = FirstSeen(time.monotonic(), done, whole)
            return None
        if done == pace.done:
            return None
        return (time.monotonic() - pace.since) / (done - pace.done) * (whole - done)

    def _says(self, stage: Stage) -> str:
        """Returns the last message of a stage; for a training step, its metrics."""
        lines = self._folder.tail(self._folder.path / "stages" / stage.folder / LOG, LAST_LINES).splitlines()
        said = [line for line in map(plain, lines) if not is_noise(line)]
        if not said or said[-1].startswith(("--- ", "+++ ")):
            return "its process starts"
        return STEP.sub("", said[-1], count=1).replace("\t", " ")[:SHOWN_TEXT]


def _held_by(stage: Stage, stages: dict[str, Stage]) -> str:
    """Returns the parent stage's gate that keeps a stage from starting; "" if there is none."""
    for name in stage.parents:
        gates = stages[name].gates if name in stages else ()
        holding = [gate for gate in gates if not gate.endswith("(warn)")]
        if holding:
            return f"{name} {holding[0]}"
    return ""
