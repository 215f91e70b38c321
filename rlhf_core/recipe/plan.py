"""Plans a recipe as a DAG before anything runs: expands stages, resolves names, and computes the order and
digests. Torch-free.

Works offline, except for Hub branches and tags that are not yet in the recipe's pins (see hub/revisions.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rlhf_core.config import KINDS, Recipe, StageConfig
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.revisions import Pin, Pins, pinned_sources
from rlhf_core.recipe.consistency import inconsistencies
from rlhf_core.recipe.digest import Reading, stage_digest
from rlhf_core.recipe.expand import expand
from rlhf_core.recipe.inboxes import Inboxes, Taken
from rlhf_core.recipe.named_inputs import references
from rlhf_core.recipe.sentences import unknown
from rlhf_core.runs.run_dir import EXPORTS, RunDir, StageRequest
from rlhf_core.system.files import Digests, read_json

# Expected paths of outputs whose stage is not done, where they differ from the output's name.
OUTPUT_PATHS = {"pairs": "pairs.jsonl", "answers": "answers.jsonl"}


@dataclass(frozen=True)
class Node:
    """Describes one stage. `stages` maps names in its config to stages; `models` maps the other names to a
    folder or Hub id. `contents` holds the digests of the local files that the stage's digest covers."""

    name: str
    config: StageConfig
    stages: dict[str, str]
    models: dict[str, str]
    digest: str
    run_dir: Path
    contents: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Returns the stage's kind, such as `sft`."""
        return self.config.stage

    @property
    def parents(self) -> tuple[str, ...]:
        """Returns the stages whose outputs this stage uses."""
        return tuple(dict.fromkeys(self.stages.values()))

    @property
    def done(self) -> bool:
        """Returns whether the run directory on disk has a complete result."""
        return RunDir(self.run_dir).result() is not None


@dataclass(frozen=True)
class Plan:
    """Holds the stages of a recipe, parents first. `aliases` maps the names of loops and rounds to the stage
    that creates their model. `pins` maps the recipe's Hub branches and tags to commits. `taken` holds the
    last row that each round takes from each inbox."""

    recipe: Recipe
    nodes: tuple[Node, ...]
    aliases: dict[str, str]
    pins: tuple[Pin, ...] = ()
    taken: Taken = field(default_factory=dict)

    @property
    def artifacts(self) -> Path:
        """Returns the artifacts folder."""
        return Path(self.recipe.artifacts).absolute()

    @property
    def folder(self) -> Path:
        """Returns the folder of the recipe's report, `<artifacts>/<recipe>`."""
        return self.artifacts / self.recipe.name

    def __getitem__(self, name: str) -> Node:
        name = self.aliases.get(name, name)
        return next(node for node in self.nodes if node.name == name)

    def stages_of(self, name: str) -> tuple[Node, ...]:
        """Returns the stage called `name` and all stages expanded from it. These are the stages of a loop, a
        round, a sweep, or a publication with rounds.

        Raises ValueError if there is no such stage.
        """
        found = tuple(node for node in self.nodes if node.name == name or node.name.startswith(f"{name}."))
        if not found:
            raise ValueError(
                f"recipe {self.recipe.name}:"
                f" {unknown(name, [*(n.name for n in self.nodes), *self.aliases], 'stage')}"
            )
        return found

    def ancestors(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Returns the stages that `nodes` depend on, directly or not, parents first and without `nodes`
        themselves."""
        names: set[str] = set()
        left = [parent for node in nodes for parent in node.parents]
        while left:
            name = left.pop()
            if name not in names:
                names.add(name)
                left += self[name].parents
        return tuple(node for node in self.nodes if node.name in names and node not in nodes)

    def inputs(self, node: Node) -> dict[str, str]:
        """Maps each name in the node's config to its folder, file or Hub id."""
        return {
            **node.models,
            **{name: str(_output(self[stage], name)) for name, stage in node.stages.items()},
        }

    def request(self, node: Node) -> StageRequest:
        """Returns the contents of the stage's `config.json`."""
        shown = self.recipe.wandb
        return StageRequest(
            name=node.name,
            digest=node.digest,
            config=node.config,
            inputs=self.inputs(node),
            contents=node.contents,
            seed=self.recipe.seed,
            trust_remote_code=self.recipe.trust_remote_code,
            wandb=shown and shown.model_copy(update={"group": shown.group or self.recipe.name}),
        )


def plan(
    recipe: Recipe,
    kept: Mapping[str, str] = MappingProxyType({}),
    taken: Taken | None = None,
    refused: Collection[str] | None = None,
) -> Plan:
    """Expands, resolves, orders and digests all stages, and saves the pins and the digests of local files.

    `kept` maps stages to the digests that they keep even if the recipe has changed (finished rounds of a
    loop). `taken`: the last row that each round of a loop takes from an inbox. A round without an entry has
    not begun, and its rows are left open. If `taken` is None, `loop.json` gives these rows, and other rounds
    go up to the newest row. `refused`: rounds to leave out; None means the refused rounds in `loop.json`.
    Raises ValueError with a one-line sentence for each inconsistency.
    """
    recorded = _recorded(recipe)
    expanded = expand(recipe, recorded.refused if refused is None else refused)
    problems = inconsistencies(recipe, expanded)
    if problems:
        raise ValueError("\n".join(problems))
    stages, aliases, *_ = expanded
    parents = {
        name: {
            r.name: aliases.get(r.name, r.name)
            for r in references(config)
            if aliases.get(r.name, r.name) in stages
        }
        for name, config in stages.items()
    }
    artifacts = Path(recipe.artifacts).absolute()
    digests = Digests(artifacts)
    pins = Pins(artifacts / recipe.name)
    nodes: dict[str, Node] = {}
    inboxes = Inboxes(recipe, pins, digests, recorded.taken if taken is None else taken, pin=taken is None)
    for name in _ordered(parents):
        config = pinned_sources(inboxes.with_files(name, stages[name]), pins)
        models = {
            r.name: _place(recipe, r.name, pins) for r in references(config) if r.name not in parents[name]
        }
        waited = {r.name for r in references(config) if not r.decides}
        made_from = {
            named: nodes[parent].digest for named, parent in parents[name].items() if named not in waited
        }
        reading = Reading(digests)
        key = kept.get(name) or stage_digest(recipe, config, made_from, models, reading)
        nodes[name] = Node(
            name, config, parents[name], models, key, artifacts / "stages" / f"{name}-{key}", reading.contents
        )
    digests.save()
    pins.save()
    return Plan(
        recipe,
        tuple(nodes.values()),
        aliases,
        tuple(Pin(*item) for item in pins.used.items()),
        inboxes.settled,
    )


class _Recorded(NamedTuple):
    taken: dict[str, dict[str, int]]
    refused: frozenset[str]


def _recorded(recipe: Recipe) -> _Recorded:
    """Returns the inbox rows and the refused rounds that `loop.json` records for this recipe's loop."""
    record = read_json(Path(recipe.artifacts).absolute() / recipe.name / "loop.json")
    loop = record.get("loop")
    rounds = record.get("rounds") or []
    if loop not in recipe.stages or not isinstance(rounds, list):
        return _Recorded({}, frozenset())
    named = [
        (f"{loop}.round{number}", done)
        for number, done in enumerate([*rounds, record.get("begun")], start=1)
        if done
    ]
    taken = {title: done["taken"] for title, done in named if done.get("taken")}
    return _Recorded(taken, frozenset(title for title, done in named if done.get("refused")))


def _ordered(parents: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns the stages, parents first and otherwise in the recipe's order. Raises ValueError for a
    cycle."""
    ordered: list[str] = []
    path: list[str] = []

    def visit(name: str) -> None:
        if name in path:
            circle = " -> ".join([*path[path.index(name) :], name])
            raise ValueError(f"stages need each other: {circle}; let one of them start from another model")
        if name not in ordered:
            path.append(name)
            for parent in parents[name].values():
                visit(parent)
            ordered.append(path.pop())

    for name in parents:
        visit(name)
    return ordered


def _place(recipe: Recipe, name: str, pins: Pins) -> str:
    place = recipe.base_model if name == "base" else name
    return pins.pinned(place) if is_remote(place) else str(Path(place).absolute())


def _output(node: Node, name: str) -> Path:
    """Returns the path of a stage's output, from its result if it is done, else the expected path."""
    for export in node.config.exports:
        if name == f"{node.name}.{export}":
            return node.run_dir / EXPORTS / export
    name = KINDS[node.kind].output if node.config.made_for in (None, "dpo") else "answers"
    result = RunDir(node.run_dir).result()
    return node.run_dir / (result.outputs.get(name, name) if result else OUTPUT_PATHS.get(name, name))
