"""Draws the stages of a run, and the lineage of a stage, as graphs whose boxes are links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from evaluation.dashboard.folder import NAME, STAGES, Folder
from evaluation.dashboard.state import Stage, stage_of
from evaluation.report.dag import Drawing, draw
from rlhf_core.hub.ids import shown
from rlhf_core.runs.lineage import Ancestor, sources

MAX_NODES = 40


class Box(NamedTuple):
    """What a box of the graph shows. `link`: an address, '' for none."""

    state: str
    note: str
    link: str


class Graph(NamedTuple):
    """A drawing, and its boxes by name."""

    drawing: Drawing
    boxes: dict[str, Box]


class Source(NamedTuple):
    """A data set of a stage: the field of its config that names it, and its path or Hub id."""

    field: str
    name: str


class Relatives(NamedTuple):
    """Where a stage comes from and what was made from it. `models`: of outside; `parents`, `children`: names of run directories."""

    graph: Graph
    parents: list[str]
    children: list[str]
    models: list[str]
    data: list[Source]


def of_run(stages: Sequence[Stage]) -> Graph:
    """Returns the stages of a run with their states."""
    drawing = draw(_topological({stage.name: stage.parents for stage in stages[:MAX_NODES]}))
    return Graph(drawing, {stage.name: Box(stage.state, stage.state, address(stage.folder)) for stage in stages})


def of_stage(folder: Folder, name: str) -> Relatives:
    """Returns ancestors and descendants of a stage (the nearest MAX_NODES of each), and its own models and data."""
    above = {path.name: _parents(folder, path) for path in folder.stages()}
    below: dict[str, list[str]] = {}
    for child, parents in above.items():
        for parent in parents:
            below.setdefault(parent, []).append(child)
    family = [*_reached(name, above)[:MAX_NODES][::-1], *_reached(name, below)[1:MAX_NODES]]
    ordered = _topological({one: above.get(one, []) for one in family})
    labels, boxes = {one: _label(folder, one) for one in ordered}, {}
    for one in ordered:
        stage = stage_of(folder, folder.stage(one))
        boxes[labels[one]] = Box(stage.state, "this stage" if one == name else stage.state, "" if one == name else address(one))
    drawing = draw({labels[one]: [labels[parent] for parent in parents] for one, parents in ordered.items()})
    request = folder.request(folder.stage(name))
    outside = [_outside(place) for place in map(str, request.get("inputs", {}).values()) if not _stage_in(folder, place)]
    own = Ancestor(name, "", "", config=request.get("config", {}))
    return Relatives(Graph(drawing, boxes), above.get(name, []), below.get(name, []), outside, _data(own))


def address(name: str) -> str:
    """Returns the address of a stage's page; '' for a name that no run directory has."""
    return f"/stage/{quote(name)}" if NAME.fullmatch(name) else ""


def _label(folder: Folder, name: str) -> str:
    """Returns the stage's name and the beginning of its digest."""
    request = folder.request(folder.path / STAGES / name)
    return f"{request['name']} {request['digest'][:8]}" if request else name


def _data(stage: Ancestor) -> list[Source]:
    try:
        found = [Source(field, shown(str(source["path"]))) for _, field, source in sources(stage)]
    except (LookupError, TypeError):  # a config of another version
        return []
    return list(dict.fromkeys(found))


def _parents(folder: Folder, run_dir: Path) -> list[str]:
    places = map(str, folder.request(run_dir).get("inputs", {}).values())
    return list(dict.fromkeys(name for place in places if (name := _stage_in(folder, place)) and name != run_dir.name))


def _stage_in(folder: Folder, place: str) -> str:
    """Returns which run directory of this folder a path is in, also when the artifacts were moved or copied; '' when in none."""
    parts = Path(place).parts
    for before, name in pairwise(parts):
        if before == STAGES and NAME.fullmatch(name) and folder.request(folder.path / STAGES / name):
            return name
    return ""


def _outside(place: str) -> str:
    return "…/" + Path(place).name if Path(place).is_absolute() else shown(place)


def _reached(start: str, neighbours: Mapping[str, Sequence[str]]) -> list[str]:
    found, waiting = dict[str, None](), [start]
    while waiting:
        one = waiting.pop(0)
        if one not in found:
            found[one] = None
            waiting += neighbours.get(one, ())
    return list(found)


def _topological(parents: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the nodes with their parents, parents first; edges that close a circle (of damaged records) are left out."""
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
