"""The DAG of a recipe: stages expanded, names resolved, order and digests known before anything runs. Torch-free, offline.

An `iterative_dpo` stage X becomes X.round1.preferences, X.round1.dpo, X.round2.preferences, ...; X.round1 stands for the model
of that round and X for the model of the last; an evaluation that names X judges the model of every round, and a gate of it that names X
speaks of the last. An `iterative` stage does the same with the training stage of its post-processor: X.round1.kto, X.round1.sft.
A publication P of X with `round_branch` also becomes P.round1, P.round2, ...; each is done as soon as what it names is. P.iteration10 is
the actor of a `ppo` stage P at that iteration.
A stage's digest covers what decides its result: its configuration, the digests of its parents, of its local data and model
folders, the seed, and STAGE_VERSIONS. Cadence of logs and saves, gates, and the limits at which a stage stops are not in it. Hub ids count
by name: a repository that moves on is not noticed; `owner/name@REVISION` counts by its commit (revisions.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config import (
    DPO,
    KTO,
    PPO,
    SFT,
    AlignmentTax,
    Evaluation,
    Gate,
    Loop,
    Preferences,
    Publication,
    Recipe,
    RewardJudge,
    Source,
    StageConfig,
    VllmJudge,
)
from rlhf_core.config.metrics import has_metric, metrics_of
from rlhf_core.digests import ABSENT, Digests
from rlhf_core.lineage import DATA_SUFFIXES, is_hub_id
from rlhf_core.recipe import unknown
from rlhf_core.revisions import Pin, Pins, pinned_sources
from rlhf_core.reward_sources import FunctionReward, ModelReward
from rlhf_core.stage import EXPORTS, RunDir, StageRequest, digest
from rlhf_core.tax_tasks import is_path, read_task, task_name

# Raise a stage's number when a change of code changes the numbers it produces: its results are then made anew.
STAGE_VERSIONS = {"sft": 1, "reward_model": 1, "dpo": 1, "kto": 1, "preferences": 1, "ppo": 1}
STAGE_VERSIONS |= {"evaluation": 1, "alignment_tax": 1, "publication": 1}
# Fields younger than results that exist, left out of digests while they hold what was the only way before.
LATER: dict[str, Any] = {
    "branch": "main",
    "round_branch": None,
    "proxy": None,
    "export_at": [],
    "endpoints": {},
    "tensor_parallel_size": 1,
    "seed_answers": False,
}
NO_RESULT = {"logging_steps", "save_steps", "keep_checkpoints", "timeout", "concurrency", "api_key_env", "max_failed_rewards"} | {
    "gates",
    "requests_per_minute",
    "input_price",
    "output_price",
    "verdict_cache",
    "start_timeout",
    "colocate_actor_ref",
    "colocate_critic_reward",
    "colocate_all",
    "ref_reward_offload",
    "adam_offload",
    "gradient_checkpointing",
}

POLICY, REWARD = ("sft", "dpo", "ppo", "kto"), ("reward_model",)
REFERENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "sft": {"model": POLICY, "answers": ("preferences",)},
    "reward_model": {"model": POLICY},
    "dpo": {"policy": POLICY, "reference": POLICY, "pairs": ("preferences",)},
    "kto": {"policy": POLICY, "reference": POLICY, "answers": ("preferences",)},
    "preferences": {"policy": POLICY, "reward": REWARD},
    "ppo": {"actor": POLICY, "critic": POLICY + REWARD, "reference": POLICY, "reward": REWARD},
    "evaluation": {"models": POLICY, "baseline": POLICY, "proxy": REWARD},
    "alignment_tax": {"models": POLICY, "baseline": POLICY},
    "publication": {"model": POLICY + REWARD, "evaluation": ("evaluation",), "dataset": ("preferences", "evaluation")},
}
TRAINED_FROM = {"sft": "model", "dpo": "policy", "kto": "policy", "ppo": "actor"}  # the field that names a policy's parent
OUTPUTS = {"preferences": "pairs", "evaluation": "report", "alignment_tax": "report", "publication": "published"}  # others: checkpoint
OUTPUT_PATHS = {
    "pairs": "pairs.jsonl",
    "answers": "answers.jsonl",
}  # where it is expected to lie while the stage is not done; default: as it is named
# What a preferences stage must make of its answers for a stage to train on them, by the field that names it.
POST_PROCESSORS = {
    ("dpo", "pairs"): ("dpo",),
    ("kto", "answers"): ("kto", "dpo"),
    ("sft", "answers"): ("rejection_sampling", "conditional_sft"),
}


class Reference(NamedTuple):
    """A name in a config that stands for a model or for another stage. `place` is the field, for messages."""

    place: str
    name: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """One stage. `stages` maps names in its config to the stages they stand for, `models` others to a folder or Hub id."""

    name: str
    config: StageConfig
    stages: dict[str, str]
    models: dict[str, str]
    digest: str
    run_dir: Path

    @property
    def kind(self) -> str:
        return self.config.stage

    @property
    def parents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.stages.values()))

    @property
    def done(self) -> bool:
        return RunDir(self.run_dir).result() is not None


@dataclass(frozen=True)
class Plan:
    """The stages of a recipe, parents first. `aliases` maps names of loops and rounds to the stage whose model they stand for; `pins` are
    the branches and tags of the Hub that it names, with their commits."""

    recipe: Recipe
    nodes: tuple[Node, ...]
    aliases: dict[str, str]
    pins: tuple[Pin, ...] = ()

    @property
    def artifacts(self) -> Path:
        return Path(self.recipe.artifacts).absolute()

    @property
    def folder(self) -> Path:
        """Where the recipe's report lies."""
        return self.artifacts / self.recipe.name

    def __getitem__(self, name: str) -> Node:
        name = self.aliases.get(name, name)
        return next(node for node in self.nodes if node.name == name)

    def stages_of(self, name: str) -> tuple[Node, ...]:
        """The stage called `name` with those expanded from it: all of a loop, of a round, of a publication with rounds.

        ValueError when there is none.
        """
        found = tuple(node for node in self.nodes if node.name == name or node.name.startswith(f"{name}."))
        if not found:
            raise ValueError(f"recipe {self.recipe.name}: {unknown(name, [*(n.name for n in self.nodes), *self.aliases], 'stage')}")
        return found

    def ancestors(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """The stages that some depend on, directly or not, without themselves, parents first."""
        names: set[str] = set()
        left = [parent for node in nodes for parent in node.parents]
        while left:
            name = left.pop()
            if name not in names:
                names.add(name)
                left += self[name].parents
        return tuple(node for node in self.nodes if node.name in names and node not in nodes)

    def inputs(self, node: Node) -> dict[str, str]:
        """The folder, file or Hub id behind each name in the node's config."""
        return {**node.models, **{name: str(_output(self[stage], name)) for name, stage in node.stages.items()}}

    def request(self, node: Node) -> StageRequest:
        shown = self.recipe.wandb
        return StageRequest(
            name=node.name,
            digest=node.digest,
            config=node.config,
            inputs=self.inputs(node),
            seed=self.recipe.seed,
            trust_remote_code=self.recipe.trust_remote_code,
            wandb=shown and shown.model_copy(update={"group": shown.group or self.recipe.name}),
        )


def plan(recipe: Recipe, kept: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """Expands, resolves, orders and names all stages. ValueError: one sentence (a line) for each inconsistency.

    `kept`: digests of stages that are what they were made as, whatever the recipe says by now (finished rounds of a loop).
    """
    stages, aliases, rounds = _expand(recipe)
    for name, config in stages.items():
        if isinstance(config, Evaluation):
            judged = [model for named in config.models for model in rounds.get(named, (named,))]
            last_mention = tuple(dict.fromkeys(reversed(judged)))[::-1]
            against = _parents(last_mention, config.baseline, stages, aliases) if config.parents is None else config.parents
            if strange := [model for model in against if model not in last_mention]:
                raise ValueError(f"stages.{name}.parents: {unknown(strange[0], last_mention, 'judged model')}")
            gates = tuple(_of_last_round(gate, rounds) for gate in config.gates)
            stages[name] = config.model_copy(update={"models": last_mention, "parents": against, "gates": gates})
    problems = [problem for name, config in stages.items() for problem in _misnamed(name, config, stages, aliases)]
    problems += [problem for name, config in recipe.stages.items() for problem in _misgated(name, config, stages)]
    problems += [
        f"stages.{name}.round_branch: {config.model} has no rounds: name {' or '.join(rounds) or 'an iterative stage'} as model"
        for name, config in recipe.stages.items()
        if isinstance(config, Publication) and config.round_branch and config.model not in rounds
    ]
    if problems:
        raise ValueError("\n".join(problems))
    parents = {
        name: {r.name: aliases.get(r.name, r.name) for r in references(config) if aliases.get(r.name, r.name) in stages}
        for name, config in stages.items()
    }
    artifacts = Path(recipe.artifacts).absolute()
    digests, pins = Digests(artifacts), Pins(artifacts / recipe.name)
    nodes: dict[str, Node] = {}
    for name in _ordered(parents):
        config = pinned_sources(stages[name], pins)
        models = {r.name: _place(recipe, r.name, pins) for r in references(config) if r.name not in parents[name]}
        decides = {
            "stage": config.stage,
            "version": STAGE_VERSIONS[config.stage],
            "config": _deciding(config, digests),
            "stages": {named: nodes[parent].digest for named, parent in parents[name].items()},
            "models": {named: _content(place, digests) for named, place in models.items()},
            "seed": recipe.seed,
            "trust_remote_code": recipe.trust_remote_code,
        }
        key = kept.get(name) or digest(decides)
        nodes[name] = Node(name, config, parents[name], models, key, artifacts / "stages" / f"{name}-{key}")
    digests.save()
    pins.save()
    return Plan(recipe, tuple(nodes.values()), aliases, tuple(Pin(*item) for item in pins.used.items()))


def references(config: StageConfig) -> Iterator[Reference]:
    """The names in a config that stand for models or other stages."""
    for field, kinds in REFERENCES[config.stage].items():
        value = getattr(config, field)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for i, item in enumerate(values):
            if isinstance(item, str) and not (isinstance(config, Evaluation) and item in config.endpoints):
                yield Reference(field, item, kinds)
            elif isinstance(item, ModelReward):
                yield Reference(field if len(values) == 1 else f"{field}.{i}", item.model, kinds)
    if isinstance(config, Evaluation):
        for model, parent in (config.parents or {}).items():
            if parent not in config.endpoints:
                yield Reference(f"parents.{model}", parent, POLICY)
        for i, name in enumerate(config.reward_evaluation.models if config.reward_evaluation else ()):
            yield Reference(f"reward_evaluation.models.{i}", name, REWARD)
        for i, judge in enumerate(config.judges):
            if isinstance(judge, RewardJudge):
                yield Reference(f"judges.{i}.reward", judge.reward, REWARD)
            elif isinstance(judge, VllmJudge):
                yield Reference(f"judges.{i}.model", judge.model, POLICY)


def sources(config: BaseModel, place: str = "") -> Iterator[tuple[str, Source]]:
    """Every data source of a config with the field it stands in."""
    for field in type(config).model_fields:
        value, here = getattr(config, field), f"{place}{field}"
        for i, item in enumerate(value) if isinstance(value, tuple) else ((None, value),):
            at = here if i is None else f"{here}.{i}"
            if isinstance(item, Source):
                yield at, item
            elif isinstance(item, BaseModel):
                yield from sources(item, f"{at}.")


def _expand(recipe: Recipe) -> tuple[dict[str, StageConfig], dict[str, str], dict[str, tuple[str, ...]]]:
    stages: dict[str, StageConfig] = {}
    aliases: dict[str, str] = {}
    rounds: dict[str, tuple[str, ...]] = {}
    for name, config in recipe.stages.items():
        if not isinstance(config, Loop):
            stages[name] = config.model_copy(update={"round_branch": None}) if isinstance(config, Publication) else config
            aliases |= {f"{name}.iteration{n}": name for n in config.export_at} if isinstance(config, PPO) else {}
            continue
        rounds[name] = tuple(f"{name}.round{k + 1}" for k in range(config.rounds))
        policy = config.policy
        for k, title in enumerate(rounds[name]):
            slice_of_prompts = {"first_prompt": k * config.prompts_per_round, "num_prompts": config.prompts_per_round}
            sampling = Preferences(**_shared(config, Preferences), policy=policy, **slice_of_prompts)
            training = _training(config, policy, f"{title}.preferences")
            ours = tuple(gate for gate in config.gates if has_metric(training, gate.metric))
            theirs = tuple(gate for gate in config.gates if gate not in ours and has_metric(sampling, gate.metric))
            stages[f"{title}.preferences"] = sampling.model_copy(update={"gates": theirs})
            aliases[title] = policy = f"{title}.{training.stage}"
            stages[policy] = training.model_copy(update={"gates": ours})
            stages |= _publications_of_round(recipe, name, k + 1)
        aliases[name] = policy
    return stages, aliases, rounds


def _publications_of_round(recipe: Recipe, loop: str, number: int) -> dict[str, StageConfig]:
    """The publications of one round of a loop, each on the branch of that round."""
    found: dict[str, StageConfig] = {}
    for name, config in recipe.stages.items():
        if isinstance(config, Publication) and config.round_branch and config.model == loop:
            place = {"model": f"{loop}.round{number}", "branch": config.round_branch.format(number), "round_branch": None}
            found[f"{name}.round{number}"] = config.model_copy(update=place)
    return found


def _training(loop: Loop, policy: str, answers: str) -> DPO | KTO | SFT:
    """The stage that trains `policy` on what the round's preferences stage made of its answers."""
    template = loop.prompts.template
    if loop.post_processor == "dpo":
        return DPO(**_shared(loop, DPO), policy=policy, pairs=answers, template=template)
    if loop.post_processor == "kto":
        return KTO(**_shared(loop, KTO), policy=policy, answers=answers, template=template)
    condition = "reward" if loop.post_processor == "conditional_sft" else "none"
    return SFT(**_shared(loop, SFT), model=policy, answers=answers, template=template, condition=condition)


def _parents(models: tuple[str, ...], baseline: str, stages: Mapping[str, StageConfig], aliases: Mapping[str, str]) -> dict[str, str]:
    """The stage each judged model was trained from, under the name it is judged by, unless that is the baseline."""
    judged = {aliases.get(model, model): model for model in (*models, baseline) if ".iteration" not in model}
    found = {}
    for model in models:
        config = stages.get(aliases.get(model, model))
        if model != baseline and config is not None and config.stage in TRAINED_FROM:
            named = getattr(config, TRAINED_FROM[config.stage])
            parent = aliases.get(named, named)
            if parent in stages and judged.get(parent, parent) != baseline:
                found[model] = judged.get(parent, parent)
    return found


def _shared(config: BaseModel, kind: type[BaseModel]) -> dict[str, Any]:
    """The fields that a loop and one of its stages have in common; what the loop leaves open is left to the stage."""
    fields = (field for field in kind.model_fields if field not in ("stage", "policy", "gates"))
    return {field: getattr(config, field) for field in fields if getattr(config, field, None) is not None}


def _misnamed(stage: str, config: StageConfig, stages: Mapping[str, StageConfig], aliases: Mapping[str, str]) -> Iterator[str]:
    endpoints = tuple(config.endpoints) if isinstance(config, Evaluation) else ()
    for name in endpoints:
        if name in ("base", *stages, *aliases):
            yield f"stages.{stage}.endpoints.{name}: {name} is also the base model's or a stage's name; give the endpoint another one"
    for place, name, kinds in references(config):
        where, target = f"stages.{stage}.{place}", aliases.get(name, name)
        needed = "a reward model" if kinds == REWARD else "a stage of kind " + " or ".join(kinds)
        only_stages = "checkpoint" not in {OUTPUTS.get(kind, "checkpoint") for kind in kinds}
        if target in stages:
            found = stages[target]
            made = POST_PROCESSORS.get((config.stage, place))
            if found.stage not in kinds:
                yield f"{where}: {name} is of kind {found.stage}, but {needed} is needed here; name one"
            elif made and isinstance(found, Preferences) and found.post_processor not in made:
                yield f"{where}: {name} has post_processor {found.post_processor!r}; set it to {' or '.join(made)}"
        elif only_stages or (name == "base" and kinds == REWARD):
            valid = [other for other, found in stages.items() if found.stage in kinds]
            yield f"{where}: {unknown(name, valid, 'stage')}; {needed} is needed here"
        elif name != "base" and "/" not in name and not Path(name).exists():
            valid = ["base", *(other for other, found in stages.items() if found.stage in kinds), *aliases]
            remote = ", an endpoint" if isinstance(config, Evaluation) and not place.startswith("judges") else ""
            valid += endpoints if remote else ()
            yield f"{where}: {unknown(name, valid, 'name')}; name base, a stage{remote}, a folder or a Hub id (owner/model)"


def _misgated(name: str, config: StageConfig, stages: Mapping[str, StageConfig]) -> Iterator[str]:
    """Gates on metrics that a stage will not have; a loop's gates speak of the metrics of both stages of a round."""
    if not config.gates:
        return
    gated = [c for stage, c in stages.items() if stage == name or (isinstance(config, Loop) and stage.startswith(f"{name}.round1."))]
    known = [metric for planned in gated if not isinstance(planned, Loop) for metric in metrics_of(planned)]
    for i, gate in enumerate(config.gates if isinstance(config, Loop) else stages[name].gates):
        if not any(fnmatchcase(gate.metric, metric) for metric in known):
            held_out = getattr(config, "eval_data", True) is None or isinstance(config, Loop)
            why = "; there is no eval_data, and eval/... is measured on it" if held_out and gate.metric.startswith("eval/") else ""
            yield f"stages.{name}.gates.{i}.metric: {unknown(gate.metric, known, 'metric')}{why}"


def _of_last_round(gate: Gate, rounds: Mapping[str, tuple[str, ...]]) -> Gate:
    """A gate on a loop's model, `win_rate/LOOP`, speaks of its last round: it holds for every round of a loop that grows."""
    first, _, model = gate.metric.partition("/")
    return gate.model_copy(update={"metric": f"{first}/{rounds[model][-1]}"}) if model in rounds else gate


def _ordered(parents: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Parents first, otherwise as the recipe has them. ValueError when stages need each other."""
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


def is_remote(place: str) -> bool:
    """A Hub id, unless such a file or folder exists. An id of one word (`gpt2`) counts too."""
    return is_hub_id(place) or ("/" not in place and not place.endswith(DATA_SUFFIXES) and not Path(place).exists())


def _content(place: str, digests: Digests) -> str:
    return f"hub:{place}" if is_remote(place) else digests.of(Path(place))


def _deciding(config: StageConfig, digests: Digests) -> Any:
    """The config without what decides no result, and with the content of local data instead of its path."""
    contents = {source.path: _content(source.path, digests) for _, source in sources(config)}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            path = {"path": contents[value["path"]]} if "path" in value and "messages_key" in value else {}
            if value.get("kind") == "function":
                path = {"code": digests.of(FunctionReward.model_validate(value).file)}
            left_out = (("format", "auto"), *LATER.items())  # a format that is told by the rows is told by their digest
            kept = {key: item for key, item in value.items() if key not in NO_RESULT and (key, item) not in left_out}
            return {key: strip(item) for key, item in kept.items()} | path
        return [strip(item) for item in value] if isinstance(value, list) else value

    content = strip(config.model_dump(mode="json"))
    if isinstance(config, AlignmentTax):
        content["tasks"] = [_task_content(task, digests) if is_path(task) else task for task in config.tasks]
    reward = config.reward[0] if isinstance(config, Preferences) and len(config.reward) == 1 else None
    if isinstance(reward, ModelReward) and reward == ModelReward(model=reward.model):
        content["reward"] = reward.model  # one reward model and nothing more said of it
    return content


def _task_content(task: str, digests: Digests) -> list[str]:
    try:
        return [task_name(task), *(digests.of(file) for file in read_task(task).files)]
    except ValueError:
        return [task_name(task), ABSENT]  # `check` and the stage say what is wrong with it


def _output(node: Node, name: str) -> Path:
    """What a stage hands on under a name: where its result says it lies, else where it is expected."""
    if isinstance(node.config, PPO) and name.startswith(f"{node.name}.iteration"):
        return node.run_dir / EXPORTS / name.removeprefix(f"{node.name}.")
    makes_answers = isinstance(node.config, Preferences) and node.config.post_processor != "dpo"
    name = "answers" if makes_answers else OUTPUTS.get(node.kind, "checkpoint")
    result = RunDir(node.run_dir).result()
    return node.run_dir / (result.outputs.get(name, name) if result else OUTPUT_PATHS.get(name, name))
