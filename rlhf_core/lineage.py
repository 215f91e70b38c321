"""Where a checkpoint comes from, read from the run directories it and its parents lie in. Torch-free.

A run directory's `config.json` names the folder or Hub id of each model the stage used; a folder inside another run directory leads
one step further up. The records are read as plain JSON, not as today's config classes, so that the lineage of a model made by an
older version of a stage can still be told. Nothing here holds a path of the machine: an ancestor has a name, a kind and a digest.
Run directories that were moved together find each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.digests import Digests
from rlhf_core.stage import REQUEST, RESULT, digest, file_digest, read_json

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
AT_REVISION = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)@([\w.-]+)")
PULLED = "pulled.json"  # what `alignflow pull` writes into the folder of a model: its repository, commit and files
HUB_CACHE = re.compile(r"(models|datasets)--(.+?)--(.+)")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")
TRAINS = {
    "sft": "model",
    "reward_model": "model",
    "dpo": "policy",
    "kto": "policy",
    "ppo": "actor",
    "preferences": "policy",
    "publication": "model",
}


@dataclass(frozen=True)
class Ancestor:
    """One node of a lineage.

    `kind` is the stage's kind, or `hub` (a Hub id; `digest` is the commit when it is known), `folder`, `file` (`digest` over the
    content) or `unknown` (it is no longer there). Stages also carry their config, seed, final metrics and the versions they ran with.
    `parents` are (name in the config, ancestor); one run directory is one object, however many paths lead to it.
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
        return bool(self.config)


class Dataset(NamedTuple):
    """What a stage was trained on, by the field of its config; the digest of its content today, '' for what is not here."""

    stage: str
    field: str
    name: str
    digest: str


def lineage(checkpoint: str | Path) -> Ancestor:
    """The ancestors of a checkpoint: a folder in a run directory, any other folder or file, or a Hub id."""
    return _ancestor(str(checkpoint), {})


def stages(ancestor: Ancestor) -> list[Ancestor]:
    """Every stage of a lineage once, parents before children."""
    return [node for node in nodes(ancestor) if node.is_stage]


def nodes(ancestor: Ancestor) -> list[Ancestor]:
    """Every node of a lineage once, parents before children."""
    seen: dict[int, Ancestor] = {}

    def visit(node: Ancestor) -> None:
        if id(node) not in seen:
            for _, parent in node.parents:
                visit(parent)
            seen[id(node)] = node

    visit(ancestor)
    return list(seen.values())


def trained(ancestor: Ancestor) -> list[Ancestor]:
    """The chain of models that were trained into one another, the base model first: reward models and judges are not in it."""
    chain = [ancestor]
    while chain[-1].config.get("stage") in TRAINS:
        key = chain[-1].config.get(TRAINS[chain[-1].config["stage"]])
        parent = next((parent for name, parent in chain[-1].parents if name == key), None)
        if parent is None:
            break
        chain.append(parent)
    return chain[::-1]


def sources(ancestor: Ancestor) -> list[tuple[Ancestor, str, dict[str, Any]]]:
    """The data of every stage of a lineage: (stage, field of its config such as `data` or `prompts`, source)."""
    found = []
    for stage in stages(ancestor):
        for name, value in stage.config.items():
            if isinstance(value, dict) and "sources" in value:
                found += [(stage, name, source) for source in value["sources"]]
            elif isinstance(value, dict) and "path" in value and "split" in value:
                found.append((stage, name, value))
    return found


def data_of(ancestor: Ancestor, memory: Path = Path()) -> list[Dataset]:
    """The data sets of every stage of a lineage; `memory` is a folder whose `Digests` are used."""
    digests = Digests(memory)
    found = []
    for stage, name, source in sources(ancestor):
        path = Path(source["path"])
        found.append(Dataset(stage.name, name, shown(source["path"]), digests.of(path)[:16] if path.exists() else ""))
    return list(dict.fromkeys(found))


def shown(place: str) -> str:
    """A file, folder, URL or Hub id as it may be shown to anyone: a Hub id as it is, else the last component and no query."""
    if is_hub_id(place):
        return place
    return re.split(r"[?#]", place.rstrip("/\\"))[0].replace("\\", "/").rpartition("/")[2] or place.strip("/\\") or "."


def is_hub_id(place: str) -> bool:
    """Whether this is a Hub id (`owner/name`, `owner/name@REVISION`) and not a file or folder that exists here or is named like data."""
    repo_id = parted(place)[0]
    return bool(HUB_ID.fullmatch(repo_id)) and not repo_id.endswith(DATA_SUFFIXES) and not Path(place).exists()


def is_remote(place: str) -> bool:
    """A Hub id, unless such a file or folder exists. An id of one word (`gpt2`) counts too."""
    return is_hub_id(place) or ("/" not in place and not place.endswith(DATA_SUFFIXES) and not Path(place).exists())


def parted(place: str) -> tuple[str, str | None]:
    """Hub id and revision of `owner/name@REVISION`; anything else as it is, with None."""
    found = AT_REVISION.fullmatch(place)
    return (found[1], found[2]) if found else (place, None)


def tree(ancestor: Ancestor) -> str:
    """The lineage as an indented text tree; a stage that was already drawn is named again without its parents."""
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
    """The run directory that a path lies in (or is), with its `config.json`; None when it lies in none."""
    for folder in _upwards(Path(path).expanduser().absolute()):
        record = read_json(folder / REQUEST)
        request = {"name": str, "digest": str, "config": dict, "inputs": dict}
        if all(isinstance(record.get(key), kind) for key, kind in request.items()) and "stage" in record["config"]:
            return folder, record
    return None


def _ancestor(place: str, known: dict[str, Ancestor]) -> Ancestor:
    path = Path(place).expanduser()
    found = stage_of(path)
    if found is None:
        return known.setdefault(place, _leaf(place, path))
    folder, record = found
    key = str(folder.resolve())
    if key not in known:
        # Standing in for itself while its parents are read: a config that names its own directory ends here, not in a recursion.
        known[key] = Ancestor(record["name"], record["config"]["stage"], record["digest"])
        result = read_json(folder / RESULT)
        known[key] = Ancestor(
            name=record["name"],
            kind=record["config"]["stage"],
            digest=record["digest"],
            parents=tuple((name, _ancestor(_here(str(parent), folder), known)) for name, parent in record["inputs"].items()),
            config=record["config"],
            seed=record.get("seed", 0),
            metrics=result.get("metrics", {}),
            environment=result.get("environment", {}),
        )
    return known[key]


def _here(place: str, run_dir: Path) -> str:
    """`place`, or where it lies now if it was in a run directory that has been moved together with this one."""
    parts = Path(place).parts
    if not Path(place).is_absolute() or Path(place).exists():
        return place
    moved = (run_dir.parent.joinpath(*parts[i:]) for i in range(1, len(parts)) if (run_dir.parent / parts[i] / REQUEST).is_file())
    return str(next((path for path in moved if path.exists()), place))


def snapshot_of_hub(path: str | Path) -> tuple[str, str] | None:
    """Hub repository and commit of a folder in the client's cache; None for any other."""
    parts = Path(path).parts
    for cached in (HUB_CACHE.fullmatch(folder.name) for folder in _upwards(Path(path))):
        if cached and "snapshots" in parts:
            return f"{cached[2]}/{cached[3]}", parts[parts.index("snapshots") + 1]
    return None


def _leaf(place: str, path: Path) -> Ancestor:
    if in_cache := snapshot_of_hub(path):
        return Ancestor(in_cache[0], "hub", in_cache[1])
    if found := pulled(path):
        return Ancestor(found[0], "hub", found[1])
    if path.is_file():
        return Ancestor(path.name, "file", file_digest(path)[:16])
    if path.is_dir():
        weights = [file for file in sorted(path.iterdir()) if file.name == "config.json" or file.suffix == ".safetensors"]
        return Ancestor(path.resolve().name, "folder", digest({file.name: file_digest(file) for file in weights}) if weights else "")
    repo_id, revision = parted(place)
    if is_hub_id(place) or re.fullmatch(r"[\w.-]+", repo_id):
        return Ancestor(repo_id, "hub", revision or "")
    return Ancestor(shown(place), "unknown", "")


def pulled(folder: Path) -> tuple[str, str] | None:
    """Hub repository and commit of a folder that `alignflow pull` made; None for another, or when a file has another size since."""
    record = read_json(folder / PULLED)
    files = record.get("files")
    if not isinstance(files, dict) or not {"repo_id", "commit"} <= record.keys():
        return None
    whole = all((folder / path).is_file() and (folder / path).stat().st_size == info["size"] for path, info in files.items())
    return (record["repo_id"], record["commit"]) if whole else None


def _upwards(path: Path) -> Iterator[Path]:
    yield path
    yield from path.parents
