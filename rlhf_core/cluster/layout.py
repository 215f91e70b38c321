"""Assigns each process of each group to a bundle of resources. Imports neither Ray nor torch.

A bundle is a set of resources that Ray reserves on one node, usually a GPU and some CPUs. Groups that are
placed `together` share their bundles: process i of each runs on the same GPU. An engine over several GPUs, or
one of its pipeline stages, is a single bundle, so that Ray finds a node with room for all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_core.config import EngineConfig
from rlhf_core.config.process_groups import Wanted, check_together, processes


class BundleSlot(NamedTuple):
    """The place of one process: its bundle, and the share of the bundle that it takes."""

    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Layout:
    """The bundles, and each group's slots in them. An engine over several GPUs has one slot per GPU. `spans`:
    number of consecutive slots that must be on one node."""

    bundles: Sequence[Mapping[str, float]]
    slots: Mapping[str, Sequence[BundleSlot]]
    spans: Mapping[str, int]

    def gpus(self) -> dict[str, list[str]]:
        """Returns the GPU of each process, by group: `GPU 0` for a whole GPU, otherwise `shared`, `shared 2`,
        ..., filled in turn."""
        filled: list[float] = []
        names: list[list[str]] = []  # per bundle, as many names as any one group has processes in it
        held = [Counter(slot.bundle for slot in slots) for slots in self.slots.values()]
        for i, bundle in enumerate(self.bundles):
            part = bundle.get("GPU", 0.0)
            if not 0 < part < 1:
                first = sum(map(len, names))
                names.append([f"GPU {first + k}" for k in range(max(of_group[i] for of_group in held))])
                continue
            place = next((n for n, taken in enumerate(filled) if taken + part <= 1 + 1e-6), len(filled))
            if place == len(filled):
                filled.append(0.0)
            filled[place] += part
            names.append([f"shared {place + 1}" if place else "shared"])
        return {
            name: [names[slot.bundle][k] for slot, k in _numbered(slots)]
            for name, slots in self.slots.items()
        }

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {len(slots)} x ({slots[0].cpus:g} CPU, {slots[0].gpus:g} GPU)"
            for name, slots in self.slots.items()
        )


def _numbered(slots: Sequence[BundleSlot]) -> Iterator[tuple[BundleSlot, int]]:
    """Yields the slots of a group, each with the number of earlier slots in the same bundle."""
    before = Counter[int]()
    for slot in slots:
        yield slot, before[slot.bundle]
        before[slot.bundle] += 1


def span_of(wanted: Wanted) -> int:
    """Returns the number of processes that must be on one node: the processes of an engine, or of one
    pipeline stage."""
    return wanted.tensor_parallel_size if isinstance(wanted, EngineConfig) else 1


def arrange(groups: Mapping[str, Wanted], together: Sequence[Sequence[str]] = ()) -> Layout:
    """Returns the layout, with a bundle for each process, each engine, or each set of processes that share a
    GPU. Ray gives each process an equal part of its bundle.

    Processes that share GPUs, even with an engine among them, and engines on fractions of GPUs get one bundle
    per GPU. With a larger bundle, Ray might put several of these processes on one GPU. Raises ValueError when
    groups that share GPUs differ in their number of processes, or only some of them have GPUs.
    """
    bundles: list[dict[str, float]] = []
    slots: dict[str, list[BundleSlot]] = {}
    shared = {name for names in together for name in names}
    for names in [*together, *([name] for name in groups if name not in shared)]:
        check_together({name: groups[name] for name in names})
        count = processes(groups[names[0]])
        whole = 1.0 if len(names) > 1 else groups[names[0]].gpus
        gpus = whole if len(names) == 1 else int(10_000 / len(names)) / 10_000
        if not groups[names[0]].gpus:
            gpus = 0.0
        # processes per bundle
        each = span_of(groups[names[0]]) if len(names) == 1 and gpus == int(gpus) else 1
        for name in names:
            slots[name] = [
                BundleSlot(len(bundles) + i // each, groups[name].cpus, gpus) for i in range(count)
            ]
        cpus = sum(groups[name].cpus for name in names)
        bundles += [{"CPU": each * cpus} | ({"GPU": each * whole} if gpus else {})] * (count // each)
    return Layout(
        bundles,
        {name: slots[name] for name in groups},
        {name: span_of(wanted) for name, wanted in groups.items()},
    )


def by_node(layout: Layout, node_of: Mapping[int, str]) -> dict[str, list[BundleSlot]]:
    """Returns the slots of each group sorted by node, so that neighbouring ranks are on the same node.

    Raises ValueError when the GPUs of one engine or pipeline stage would be on two nodes.
    """
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    ordered = {
        name: sorted(slots, key=lambda slot: (nodes.index(node_of[slot.bundle]), slot.bundle))
        for name, slots in layout.slots.items()
    }
    for name, slots in ordered.items():
        span = layout.spans[name]
        for first in range(0, len(slots), span):
            if len({node_of[slot.bundle] for slot in slots[first : first + span]}) > 1:
                raise ValueError(
                    f"an engine of {name} with tensor_parallel_size={span} would be on two nodes: lower it to"
                    " a divisor of a node's GPUs (pipeline_parallel_size puts one engine on several nodes)"
                )
    return ordered


def too_large(layout: Layout, nodes: Sequence[Mapping[str, float]]) -> str:
    """Describes the first bundle that not even an empty node could hold; "" when there is no such bundle."""
    for bundle in layout.bundles:
        if not any(
            all(node.get(resource, 0.0) + 1e-6 >= amount for resource, amount in bundle.items())
            for node in nodes
        ):
            needed = " and ".join(f"{amount:g} {resource}s" for resource, amount in bundle.items())
            most = ", ".join(
                f"{max((node.get(resource, 0.0) for node in nodes), default=0.0):g} {resource}s"
                for resource in bundle
            )
            return f"a node with {needed} (the largest have {most})"
    return ""


def shortage(bundles: Sequence[Mapping[str, float]], there: Mapping[str, float]) -> str:
    """Describes the resources that the cluster as a whole lacks; "" when everything fits."""
    parts = []
    for resource in ("CPU", "GPU"):
        requested = sum(bundle.get(resource, 0.0) for bundle in bundles)
        if requested > there.get(resource, 0.0) + 1e-6:
            parts.append(f"{resource}s (requested {requested:g}, available {there.get(resource, 0.0):g})")
    return " and ".join(parts)
