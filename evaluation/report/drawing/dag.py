"""Draws a graph of stages or a lineage as SVG, with nodes in layers from left to right and edges routed
around nodes.

Uses a simple form of the layered drawing of Sugiyama, Tagawa and Toda (1981). A node's layer is the length of
its longest path from a root. An edge that spans several layers passes through a waypoint in each of them;
edges from the same node share waypoints. Barycentre sweeps order each layer. Crossings are not minimised,
since recipes have only tens of stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from evaluation.report.template import fill
from rlhf_core.runs.lineage import Ancestor, Dataset, nodes
from rlhf_core.system.files import digest as short

WIDTH = 110.0
HEIGHT = 72.0
GAP_X = 28.0
GAP_Y = 20.0
WAYPOINT = 6.0  # height of a waypoint
SWEEPS = 16
LINE = 14
MAX_LINES = 3  # LINE: characters per line; MAX_LINES: lines per name
COLOURS = {
    "data": "#b7791f",
    "hub": "#6b46c1",
    "folder": "#6b46c1",
    "file": "#b7791f",
    "unknown": "#c0392b",
}  # in a lineage; stages have another colour


class DagNode(NamedTuple):
    """A node. (x, y) is its upper left corner; `lines` is the name, split into lines."""

    name: str
    lines: tuple[str, ...]
    x: float
    y: float


class Edge(NamedTuple):
    """SVG path data. `arrow`: whether the edge ends at a node."""

    path: str
    arrow: bool


class Drawing(NamedTuple):
    """A canvas of `width` x `height`."""

    width: float
    height: float
    boxes: tuple[DagNode, ...]
    edges: tuple[Edge, ...]


class LayerSlot(NamedTuple):
    """A node in its own layer, or its waypoint in a later layer."""

    node: str
    layer: int


def draw(parents: Mapping[str, Sequence[str]]) -> Drawing:
    """Returns the layout of a graph. `parents` maps each node to its parents, in topological order. Ignores
    parents that are not nodes."""
    layer: dict[str, int] = {}
    for name, above in parents.items():
        layer[name] = max((layer[parent] + 1 for parent in above if parent in layer), default=0)
    links = _links(parents, layer)
    slots = dict.fromkeys(
        [LayerSlot(name, at) for name, at in layer.items()] + [slot for link in links for slot in link]
    )
    columns = [
        [slot for slot in slots if slot.layer == at] for at in range(max(layer.values(), default=-1) + 1)
    ]
    heights = {slot: HEIGHT if layer[slot.node] == slot.layer else WAYPOINT for slot in slots}
    middle = _place(columns, links, heights)
    top = min((middle[slot] - heights[slot] / 2 for slot in slots), default=0.0) - 3
    bottom = max((middle[slot] + heights[slot] / 2 for slot in slots), default=0.0) + 3
    step = WIDTH + GAP_X
    boxes = tuple(
        DagNode(name, _wrap(name), 3 + at * step, middle[LayerSlot(name, at)] - HEIGHT / 2 - top)
        for name, at in layer.items()
    )
    edges = []
    for start, end in links:
        y1 = middle[start] - top
        y2 = middle[end] - top
        x1 = 3 + start.layer * step + WIDTH
        # a waypoint's line crosses its whole column
        x0 = x1 if layer[start.node] == start.layer else x1 - WIDTH
        bend = x1 + GAP_X / 2
        path = (
            f"M{x0:.1f} {y1:.1f}H{x1:.1f}C{bend:.1f} {y1:.1f} {bend:.1f} {y2:.1f} {x1 + GAP_X:.1f} {y2:.1f}"
        )
        edges.append(Edge(path, arrow=layer[end.node] == end.layer))
    return Drawing(max(len(columns) * step - GAP_X, 0) + 6, bottom - top, boxes, tuple(edges))


def _links(
    parents: Mapping[str, Sequence[str]], layer: Mapping[str, int]
) -> list[tuple[LayerSlot, LayerSlot]]:
    """Returns edges between neighbouring layers: each node's path to its farthest child, and the branches
    from that path."""
    links: dict[tuple[LayerSlot, LayerSlot], None] = {}
    for child, above in parents.items():
        for parent in above:
            if parent not in layer:
                continue
            path = [LayerSlot(parent, at) for at in range(layer[parent], layer[child])]
            links.update(dict.fromkeys(zip(path, [*path[1:], LayerSlot(child, layer[child])], strict=True)))
    return list(links)


def _place(
    columns: list[list[LayerSlot]],
    links: Sequence[tuple[LayerSlot, LayerSlot]],
    heights: Mapping[LayerSlot, float],
) -> dict[LayerSlot, float]:
    """Returns the vertical centre of every slot. A sweep moves each slot towards the mean of its neighbours
    and keeps gaps within a column."""
    near: dict[LayerSlot, list[LayerSlot]] = {slot: [] for column in columns for slot in column}
    for start, end in links:
        near[start].append(end)
        near[end].append(start)
    middle = {slot: float(row) * (HEIGHT + GAP_Y) for column in columns for row, slot in enumerate(column)}
    for sweep in range(SWEEPS):
        ordering = sweep < SWEEPS // 2  # later sweeps keep the order and only straighten edges
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            mean = {
                slot: sum(middle[n] for n in near[slot]) / len(near[slot]) if near[slot] else middle[slot]
                for slot in column
            }
            if ordering:
                column.sort(key=lambda slot: mean[slot])
            edge = float("-inf")
            for slot in column:
                half = heights[slot] / 2
                middle[slot] = max(mean[slot], edge + half)
                edge = middle[slot] + half + GAP_Y
            shift = sum(mean[slot] - middle[slot] for slot in column) / len(column)
            middle.update({slot: middle[slot] + shift for slot in column})
    return middle


def _wrap(name: str) -> tuple[str, ...]:
    """Splits a name into lines after separators; an ellipsis replaces text that does not fit."""
    lines = [""]
    for part in re.findall(r"[^-_./ ]*[-_./ ]?", name):
        if lines[-1] and len(lines[-1] + part) > LINE:
            lines.append("")
        lines[-1] += part
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], "".join(lines[MAX_LINES - 1 :]) + " "]
    return tuple(line if len(line) <= LINE else line[: LINE - 1] + "…" for line in lines)


def family_svg(ancestor: Ancestor, data: list[Dataset]) -> str:
    """Returns a drawing of a lineage as an SVG document, with the origins on the left and the checkpoint on
    the right. `data` is the result of `lineage.data_of`."""
    keys: dict[int, str] = {}
    notes: dict[str, tuple[str, str]] = {}  # by key: kind, digest
    parents: dict[str, list[str]] = {}

    def new(name: str, kind: str, digest: str) -> str:
        key = name
        number = 1
        while key in notes:
            number += 1
            key = f"{name} ({number})"
        notes[key] = (kind, digest)
        parents[key] = []
        return key

    sets: dict[tuple[str, str], str] = {}
    for item in data:
        if (item.name, item.digest) not in sets:
            sets[item.name, item.digest] = new(item.name, "data", item.digest)
    for node in nodes(ancestor):
        key = keys[id(node)] = new(node.name, node.kind, node.digest)
        used = [sets[item.name, item.digest] for item in data if node.is_stage and item.stage == node.name]
        parents[key] = list(
            dict.fromkeys([*(keys[id(parent)] for _, parent in node.parents if id(parent) in keys), *used])
        )
    tip = f"tip-{short(ancestor.name + ancestor.digest)}"  # unique, because a page may have several drawings
    drawing = draw(parents)
    return (
        fill(
            "family.svg.j2",
            name=ancestor.name,
            drawing=drawing,
            notes=notes,
            tip=tip,
            size=(WIDTH, HEIGHT),
            colours=COLOURS,
        )
        + "\n"
    )
