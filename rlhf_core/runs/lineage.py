"""Finds the models and stages from which a checkpoint was made, by reading run directories. Torch-free.

A run directory's `config.json` names the folder or Hub id of each model that the stage used. A folder inside
another run directory leads to that directory's stage. The records are read as plain JSON, not with the config
classes, so that run directories written by other versions can be read. An ancestor has a name, a kind and a
digest, but no local path. Run directories that are moved together stay linked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.config import KINDS
from rlhf_core.hub.ids import is_hub_id, parted, shown, snapshot_of_hub
from rlhf_core.runs.run_dir import REQUEST, RESULT, RunDir
from rlhf_core.system.files import Digests, digest, read_json


@dataclass(frozen=True)
class Ancestor:
    """One node of a lineage.

    `kind` is the stage's kind, or `hub` (a Hub id; `digest` is the commit if it is known), `folder` or `file`
    (`digest` is the digest of its content), or `unknown` (missing). Stages also have their config, seed,
    final metrics and package versions. `parents` holds pairs (name in the config, ancestor). Each run
    directory is one object, even if several paths lead to it.
    """

    name: str
    kind: str
    digest: str
    parents: tuple[tuple[str, Ancestor], ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_stage(self) -> bool:
        """Returns whether this is a stage rather than a Hub id, folder or file."""
        return bool(self.config)


class Dataset(NamedTuple):
    """A data set of a stage. `field`: the config field that names it; `digest`: the digest of its current
    contents, or '' when it is not on this machine."""

    stage: str
    field: str
    name: str
    digest: str


def lineage(checkpoint: str | Path) -> Ancestor:
    """Returns the lineage of a checkpoint: a folder in a run directory, any other folder or file, or a Hub
    id.

    The digests of models outside run directories are cached in the `Digests` file of the checkpoint's
    artifacts folder.
    """
    found = stage_of(checkpoint)
    digests = Digests(RunDir(found[0]).artifacts if found else None)
    ancestor = _ancestor(str(checkpoint), {}, digests)
    digests.save()
    return ancestor


def stages(ancestor: Ancestor) -> list[Ancestor]:
    """Returns every stage of a lineage once, parents before children."""
    return [node for node in nodes(ancestor) if node.is_stage]


def nodes(ancestor: Ancestor) -> list[Ancestor]:
    """Returns every node of a lineage once, parents before children."""
    seen: dict[int, Ancestor] = {}

    def visit(node: Ancestor) -> None:
        if id(node) not in seen:
            for _, parent in node.parents:
                visit(parent)
            seen[id(node)] = node

    visit(ancestor)
    return list(seen.values())


def trained(ancestor: Ancestor) -> list[Ancestor]:
    """Returns the chain of models from the base model on, each trained from the one before; reward models and
    judges are left out."""
    chain = [ancestor]
    while kind := KINDS.get(chain[-1].config.get("stage", "")):
        key = chain[-1].config.get(kind.start)
        parent = next((parent for name, parent in chain[-1].parents if name == key), None)
        if parent is None:
            break
        chain.append(parent)
    return chain[::-1]


def sources(ancestor: Ancestor) -> list[tuple[Ancestor, str, dict[str, Any]]]:
    """Returns the data sources of every stage of a lineage as (stage, config field such as `data` or
    `prompts`, source)."""
    found = []
    for stage in stages(ancestor):
        for name, value in stage.config.items():
            if isinstance(value, dict) and "sources" in value:
                found += [(stage, name, source) for source in value["sources"]]
            elif isinstance(value, dict) and "path" in value and "split" in value:
                found.append((stage, name, value))
    return found


def data_of(ancestor: Ancestor, memory: Path | None = None) -> list[Dataset]:
    """Returns the data sets of every stage of a lineage. Cached digests come from the `Digests` file in the
    folder `memory`."""
    digests = Digests(memory)
    found = []
    for stage, name, source in sources(ancestor):
        path = Path(source["path"])
        found.append(
            Dataset(stage.name, name, shown(source["path"]), digests.of(path)[:16] if path.exists() else "")
        )
    return list(dict.fromkeys(found))


def tree(ancestor: Ancestor) -> str:
    """Returns the lineage as an indented text tree; a node drawn twice shows its parents only the first
    time."""
    lines: list[str] = []
    drawn: set[int] = set()

    def draw(node: Ancestor, first: str, rest: str) -> None:
        again = id(node) in drawn and node.parents
        label = f"{node.name} ({node.kind.replace('_', ' ')})" + (f" {node.digest}" if node.digest else "")
        lines.append(first + label + (" (see above)" if again else ""))
        drawn.add(id(node))
        for position, (_, parent) in enumerate(() if again else node.parents):
            last = position == len(node.parents) - 1
            draw(parent, rest + ("└── " if last else "├── "), rest + ("    " if last else "│   "))

    draw(ancestor, "", "")
    return "\n".join(lines)


def stage_of(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the run directory that contains (or is) a path, with its `config.json`; None when there is
    none."""
    for folder in _upwards(Path(path).expanduser().absolute()):
        record = read_json(folder / REQUEST)
        request = {"name": str, "digest": str, "config": dict, "inputs": dict}
        if (
            all(isinstance(record.get(key), kind) for key, kind in request.items())
            and "stage" in record["config"]
        ):
            return folder, record
    return None


def _ancestor(place: str, known: dict[str, Ancestor], digests: Digests) -> Ancestor:
    path = Path(place).expanduser()
    found = stage_of(path)
    if found is None:
        if place not in known:
            known[place] = _leaf(place, path, digests)
        return known[place]
    folder, record = found
    key = str(folder.resolve())
    if key not in known:
        # A placeholder while the parents are read, so that a config that names its own directory does not
        # cause endless recursion.
        known[key] = Ancestor(record["name"], record["config"]["stage"], record["digest"])
        result = read_json(folder / RESULT)
        known[key] = Ancestor(
            name=record["name"],
            kind=record["config"]["stage"],
            digest=record["digest"],
            parents=tuple(
                (name, _ancestor(here(str(parent), folder), known, digests))
                for name, parent in record["inputs"].items()
            ),
            config=record["config"],
            seed=record.get("seed", 0),
            metrics=result.get("metrics", {}),
            environment=result.get("environment", {}),
        )
    return known[key]


def here(place: str, run_dir: Path) -> str:
    """Returns `place`, or its new path if its run directory was moved together with `run_dir`."""
    parts = Path(place).parts
    if not Path(place).is_absolute() or Path(place).exists():
        return place
    moved = (
        run_dir.parent.joinpath(*parts[i:])
        for i in range(1, len(parts))
        if (run_dir.parent / parts[i] / REQUEST).is_file()
    )
    return str(next((path for path in moved if path.exists()), place))


def _leaf(place: str, path: Path, digests: Digests) -> Ancestor:
    in_cache = snapshot_of_hub(path)
    if in_cache:
        return Ancestor(in_cache[0], "hub", in_cache[1])
    if path.is_file():
        return Ancestor(path.name, "file", digests.of(path)[:16])
    if path.is_dir():
        weights = [
            file
            for file in sorted(path.iterdir())
            if file.name == "config.json" or file.suffix == ".safetensors"
        ]
        return Ancestor(
            path.resolve().name,
            "folder",
            digest({file.name: digests.of(file) for file in weights}) if weights else "",
        )
    repo_id, revision = parted(place)
    if is_hub_id(place) or re.fullmatch(r"[\w.-]+", repo_id):
        return Ancestor(repo_id, "hub", revision or "")
    return Ancestor(shown(place), "unknown", "")


def _upwards(path: Path) -> Iterator[Path]:
    yield path
    yield from path.parents
