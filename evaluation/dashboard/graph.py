"""Draws the stages of a run, and the lineage of a stage, as graphs whose boxes are links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from evaluation.dashboard.artifacts_folder import NAME, STAGES, Folder
from evaluation.dashboard.state import Stage, stage_of
from evaluation.report.drawing.dag import Drawing, draw
from rlhf_core.hub.ids import shown
from rlhf_core.runs.lineage import Ancestor, sources

MAX_NODES = 40


class GraphBox(NamedTuple):
    """The contents of a box in the graph. `link`: an address, '' for none."""

    state: str
    note: str
    link: str


class Graph(NamedTuple):
    """A drawing with its boxes by name."""

    drawing: Drawing
    boxes: dict[str, GraphBox]


class DataSource(NamedTuple):
    """A data set of a stage: the config field that names it and its path or Hub id."""

    field: str
    name: str


class Relatives(NamedTuple):
    """The origins and descendants of a stage. `models`: input models that were not made by a stage in this
    folder; `parents`, `children`: names of run directories."""

    graph: Graph
    parents: list[str]
    children: list[str]
    models: list[str]
    data: list[DataSource]


def of_run(stages: Sequence[Stage]) -> Graph:
    """Returns the graph of a run's stages with their states."""
    drawing = draw(_topological({stage.name: stage.parents for stage in stages[:MAX_NODES]}))
    links = {stage.name: address(stage.folder) if stage.state != "not begun" else "" for stage in stages}
    return Graph(
        drawing, {stage.name: GraphBox(stage.state, stage.state, links[stage.name]) for stage in stages}
    )


def of_stage(folder: Folder, name: str) -> Relatives:
    """Returns the ancestors and descendants of a stage (at most the nearest MAX_NODES of each) and its own
    models and data."""
    requests = folder.requests()
    above = {one: _parents(one, request, requests) for one, request in requests.items()}
    below: dict[str, list[str]] = {}
    for child, parents in above.items():
        for parent in parents:
            below.setdefault(parent, []).append(child)
    family = [*_reached(name, above)[:MAX_NODES][::-1], *_reached(name, below)[1:MAX_NODES]]
    ordered = _topological({one: above.get(one, []) for one in family})
    labels = {one: _label(folder, one) for one in ordered}
    boxes = {}
    for one in ordered:
        stage = stage_of(folder, folder.stage(one))
        boxes[labels[one]] = GraphBox(
            stage.state, "this stage" if one == name else stage.state, "" if one == name else address(one)
        )
    drawing = draw({labels[one]: [labels[parent] for parent in parents] for one, parents in ordered.items()})
    request = requests.get(name, {})
    outside = [
        _outside(place)
        for place in map(str, request.get("inputs", {}).values())
        if not _stage_in(requests, place)
    ]
    own = Ancestor(name, "", "", config=request.get("config", {}))
    return Relatives(Graph(drawing, boxes), above.get(name, []), below.get(name, []), outside, _data(own))


def address(name: str) -> str:
    """Returns the address of a stage's page; '' for a name that no run directory can have."""
    return f"/stage/{quote(name)}" if NAME.fullmatch(name) else ""


def _label(folder: Folder, name: str) -> str:
    """Returns the stage's name and the start of its digest."""
    request = folder.request(folder.path / STAGES / name)
    return f"{request['name']} {request['digest'][:8]}" if request else name


def _data(stage: Ancestor) -> list[DataSource]:
    try:
        found = [DataSource(field, shown(str(source["path"]))) for _, field, source in sources(stage)]
    except (LookupError, TypeError):  # a config from another version
        return []
    return list(dict.fromkeys(found))


def _parents(name: str, request: Mapping[str, Any], stages: Collection[str]) -> list[str]:
    places = map(str, request["inputs"].values())
    return list(
        dict.fromkeys(found for place in places if (found := _stage_in(stages, place)) and found != name)
    )


def _stage_in(stages: Collection[str], place: str) -> str:
    """Returns the name of the run directory that contains a path, even if the artifacts were moved or copied;
    '' if there is none."""
    return next(
        (name for before, name in pairwise(Path(place).parts) if before == STAGES and name in stages), ""
    )


def _outside(place: str) -> str:
    return "…/" + Path(place).name if Path(place).is_absolute() else shown(place)


def _reached(start: str, neighbours: Mapping[str, Sequence[str]]) -> list[str]:
    found = dict[str, None]()
    waiting = [start]
    while waiting:
        one = waiting.pop(0)
        if one not in found:
            found[one] = None
            waiting += neighbours.get(one, ())
    return list(found)


def _topological(parents: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the nodes with their parents, parents first. Edges that close a cycle (in damaged records)
    are left out."""
    ordered: dict[str, list[str]] = {}

    def visit(node: str, path: tuple[str, ...]) -> None:
        if node in ordered:
            return
        for parent in parents[node]:
            if parent in parents and parent not in path:
                visit(parent, (*path, node))
        ordered.setdefault(node, [parent for parent in parents[node] if parent in ordered])

    for node in parents:
        visit(node, ())
    return ordered
