"""Decides which stages of a plan run at the same time, and on which GPUs. The functions depend only on the
plan and the machine's resources.

Stages that run at the same time share no GPU and together request no more CPUs than there are. Of the stages
that may start, the stage with the longest chain of dependent stages comes first. A stage that does not fit is
overtaken by later stages that do. Memory is not considered: on a machine without GPUs, stages run one after
the other unless the recipe says otherwise (`side_by_side`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout, arrange
from rlhf_core.config import StageConfig
from rlhf_core.preflight.machine_checks import needs
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.allotment import CORES_ENV
from rlhf_core.system.machine import gpu_names, num_cpus


class SharedResources(NamedTuple):
    """The resources that stages share. `gpus`: their names; `cluster`: whether stages run on a Ray cluster,
    one at a time."""

    cpus: int
    gpus: tuple[str, ...] = ()
    cluster: bool = False


class StageResources(NamedTuple):
    """The resources that one stage occupies while it runs."""

    cpus: float
    gpus: int


class Start(NamedTuple):
    """A stage that starts, with the names of its GPUs."""

    name: str
    gpus: tuple[str, ...]


class Span(NamedTuple):
    """The time when a stage runs, in seconds from the start of the run, and its GPUs."""

    name: str
    start: float
    end: float
    gpus: tuple[str, ...]


def machine_here() -> SharedResources:
    """Returns the resources that this process may use on this machine, and whether stages run on a
    cluster."""
    return SharedResources(num_cpus(), gpu_names(), bool(os.environ.get("RAY_ADDRESS")))


def cost_of(config: StageConfig, machine: SharedResources) -> StageResources:
    """Returns the resources that a stage occupies on a machine, or all resources of a cluster. A stage
    without model processes occupies none."""
    need = needs(config)
    if not need.cpus:
        return StageResources(0, 0)
    if machine.cluster:
        return StageResources(machine.cpus, len(machine.gpus))
    # A model process uses a GPU if there is one, even with `gpus: 0`.
    gpus = max([1, *(_whole_gpus(arrange(groups, config.together)) for groups in config.turns)])
    return StageResources(min(need.cpus, machine.cpus), min(gpus, len(machine.gpus)))


def _whole_gpus(layout: Layout) -> int:
    """Returns how many GPUs the bundles of a layout fill; fractions of a GPU are combined in order."""
    whole = sum(math.ceil(bundle["GPU"]) for bundle in layout.bundles if bundle.get("GPU", 0.0) >= 1)
    return whole + len(
        {place for places in layout.gpus().values() for place in places if place.startswith("shared")}
    )


@dataclass(frozen=True)
class Schedule:
    """The stages of a run, parents first, with their costs, and how many may run at once. `skipped`: stages
    that are already done and occupy nothing."""

    machine: SharedResources
    at_most: int
    costs: Mapping[str, StageResources]
    parents: Mapping[str, tuple[str, ...]]
    skipped: frozenset[str] = frozenset()

    def starts(
        self, done: Iterable[str], running: Mapping[str, Start], held: Iterable[str] = ()
    ) -> list[Start]:
        """Returns the stages to start. `done`: finished stages of the plan, whose dependents may start;
        `held`: stages that must not start."""
        finished = set(done)
        found = dict(running)
        out = {*finished, *running, *held}
        for name in self._order:
            if (
                name not in out
                and finished.issuperset(self.parents[name])
                and (start := self._place(name, found))
            ):
                found[name] = start
        return [start for name, start in found.items() if name not in running]

    def _place(self, name: str, running: Mapping[str, Start]) -> Start | None:
        """Returns the GPUs on which a stage can run alongside the running stages; None when it does not
        fit."""
        cost = self._cost(name)
        taken = {gpu for start in running.values() for gpu in start.gpus}
        cpus = sum(self._cost(other).cpus for other in running)
        free = [gpu for gpu in self.machine.gpus if gpu not in taken]
        if (
            len(running) >= self.at_most
            or cost.gpus > len(free)
            or cpus + cost.cpus > self.machine.cpus + 1e-6
        ):
            return None
        return Start(name, tuple(free[: cost.gpus]))

    def _cost(self, name: str) -> StageResources:
        return StageResources(0, 0) if name in self.skipped else self.costs[name]

    @cached_property
    def _order(self) -> list[str]:
        """Returns the stages. Stages with the longest chains of dependent stages come first; the others keep
        the recipe's order. If stages run one at a time, only the recipe's order counts."""
        if self.at_most == 1:
            return list(self.costs)
        chains = dict.fromkeys(self.costs, 0)
        for name in reversed(list(self.costs)):
            for parent in self.parents[name]:
                chains[parent] = max(chains.get(parent, 0), chains[name] + 1)
        return sorted(self.costs, key=lambda name: -chains[name])

    def spans(self, seconds: Mapping[str, float], done: Iterable[str] = ()) -> list[Span]:
        """Returns the time when each stage would run, if every stage took the given seconds and no stage
        failed."""
        finished = set(done)
        running = dict[str, Start]()
        now = 0.0
        ends = dict[str, float]()
        spans = []
        while True:
            for start in self.starts(finished, running):
                running[start.name] = start
                ends[start.name] = now + seconds[start.name]
                spans.append(Span(start.name, now, ends[start.name], start.gpus))
            if not running:
                return spans
            now = min(ends[name] for name in running)
            for name in [name for name in running if ends[name] <= now]:
                finished.add(name)
                del running[name]

    @cached_property
    def peak(self) -> int:
        """Returns the largest number of stages that would run at once if none were done and all took equally
        long."""
        outside = {
            parent for parents in self.parents.values() for parent in parents if parent not in self.costs
        }
        spans = replace(self, skipped=frozenset()).spans(dict.fromkeys(self.costs, 1.0), outside)
        return max((sum(other.start == span.start for other in spans) for span in spans), default=1)

    def variables(self, start: Start) -> dict[str, str]:
        """Returns the environment variables for a stage that runs alongside others: its GPUs or, on a machine
        without GPUs, its share of the cores, which is the same for all stages of the plan. Keeps an
        OMP_NUM_THREADS set by the user."""
        if self.machine.gpus:
            return {} if self.machine.cluster else {"CUDA_VISIBLE_DEVICES": ",".join(start.gpus)}
        cores = str(max(1, self.machine.cpus // self.peak))
        return {CORES_ENV: cores, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", cores)}


def schedule_of(planned: Plan, nodes: Sequence[Node], machine: SharedResources) -> Schedule:
    """Returns the schedule of a plan's stages on a machine. The recipe's `side_by_side` limits how many run
    at once."""
    wanted = planned.recipe.side_by_side
    several = bool(machine.gpus) if wanted is None else wanted
    at_most = len(nodes) if several is True else int(several) or 1
    costs = {node.name: cost_of(node.config, machine) for node in nodes}
    skipped = frozenset(node.name for node in nodes if node.done)
    schedule = Schedule(machine, at_most, costs, {node.name: node.parents for node in nodes}, skipped)
    return schedule if schedule.peak > 1 else replace(schedule, at_most=1)
