"""Checks before any work whether a recipe can run on this machine. Reports one sentence per problem, with its
place and what to do.

Checks only stages that are not done. Reads data and tokenizers with the stages' code, tokenizers in a second
process if possible (`template_length.py`). Without transformers (on a machine that only orchestrates), the
stages check their tokenizers. Memory is not checked.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import (
    KINDS,
    AlignmentTax,
    Data,
    EngineConfig,
    Publication,
    Ranks,
    Recipe,
    StageConfig,
)
from rlhf_core.config.data import Text
from rlhf_core.config.judging.lm_eval_tasks import is_path, read_task
from rlhf_core.config.rewards import Environment
from rlhf_core.data.documents import check_limit
from rlhf_core.data.rows.columns import Kind
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.environments.sandbox import available
from rlhf_core.preflight.families.family import family_problems, option_problems
from rlhf_core.preflight.frames import frames_of, rendered
from rlhf_core.preflight.lengths import length_problems
from rlhf_core.preflight.model_checks import (
    argument_problems,
    model_problem,
    sampling_problems,
    unfit_models,
    unlike_vocabulary,
    vocabulary_problems,
)
from rlhf_core.preflight.question_checks import question_problems, selecting_questions, shared_questions
from rlhf_core.preflight.reward_functions import code_problems, trial_problems
from rlhf_core.preflight.rows.batches import batch_warning, made_rows_warning, prompt_problem
from rlhf_core.preflight.sequences import sequence_problems
from rlhf_core.preflight.server_checks import missing_keys
from rlhf_core.preflight.template_length import MeasuredTemplate, pair_of
from rlhf_core.preflight.verifier_problems import verified_rows_problems, verifier_needs
from rlhf_core.preflight.weight_checks import weight_problem
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.recipe.plan import plan as plan_of
from rlhf_core.recipe.sentences import ANYTHING, WrongRecipe
from rlhf_core.rollout.vllm.patches.table import installed_release, untested
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.wandb_mirror import KEY_ENV, MODE_ENV
from rlhf_core.stages.publication.publication_folder import refuse_foreign
from rlhf_core.system.machine import MachineLacks as MachineLacks  # re-exported for callers of the checks
from rlhf_core.system.machine import num_cpus, num_gpus


class Needs(NamedTuple):
    """The largest number of CPUs, GPUs and nodes that a stage uses at once."""

    cpus: float
    gpus: float
    nodes: int


def require_here(plan: Plan, nodes: Sequence[Node]) -> None:
    """Raises ValueError for problems of recipe, files or reward functions, else MachineLacks for what this
    machine lacks. Calls the reward functions once, so it is for runs alone."""
    problems = check_inputs(plan, nodes) or trial_problems(nodes)
    if problems:
        raise ValueError("\n".join(problems))
    problems = check_machine(plan, nodes)
    if problems:
        raise MachineLacks("\n".join(problems))


def check_inputs(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Returns the problems of the inputs: missing files, unsuitable data, incomplete models, limits below the
    template's own length."""
    todo = [node for node in nodes if not node.done]
    broken = broken_models(plan, todo)
    unfit: dict[tuple[str, str], str] = {}
    for node in todo:
        unfit |= {fault: told for fault, told in unfit_models(node).items() if fault not in unfit}
    problems = [*broken.values(), *unfit.values()]
    if importlib.util.find_spec("torch") is not None:
        problems += option_problems(todo)
    if not problems and importlib.util.find_spec("torch") is not None:
        problems += family_problems(todo, partial(_start_of, plan), plan.recipe.trust_remote_code)
    frames = (
        frames_of(plan, todo, partial(tokenizer_of, plan), broken)
        if importlib.util.find_spec("transformers") is not None
        else {}
    )
    # reported with the data
    unread = {*broken, *(pair[0] for pair, frame in frames.items() if isinstance(frame, str))}

    @cache
    def unlike(own: str, other: str) -> str | None:
        return None if {own, other} & unread else unlike_vocabulary(own, other, plan.recipe.trust_remote_code)

    read: dict[tuple[str, Kind], list[str]] = {}  # once for all rounds of a loop

    def unfit_rows(data: Data, kind: Kind) -> list[str]:
        key = data.model_dump_json(), kind
        if key not in read:
            read[key] = _refused("", check_columns, data, kind)
        return read[key]

    for node in todo:
        start = tokenizer_of(plan, node)
        problems += length_problems(node, partial(_start_of, plan, node))
        if isinstance(node.config, Publication) and node.config.folder and not node.config.dry_run:
            problems += _refused(
                f"stages.{node.name}.folder", refuse_foreign, Path(node.config.folder).expanduser().resolve()
            )
        problems += vocabulary_problems(node, partial(_start_of, plan, node), unlike)
        problems += sampling_problems(node, partial(_start_of, plan, node))
        problems += argument_problems(node, partial(_start_of, plan, node), plan.recipe.trust_remote_code)
        problems += sequence_problems(node, partial(_start_of, plan, node))
        for text in node.config.texts:
            frame = frames.get(pair_of(start or "", text.data))
            problems += text_problems(node, text, frame, unfit_rows)
        of_prompts = f"stages.{node.name}.prompts:"
        if not any(problem.startswith(of_prompts) for problem in problems):
            problems += [told for told in (prompt_problem(node, plan.recipe.seed),) if told]
        problems += question_problems(node, plan.recipe.seed)
        problems += code_problems(node)
        problems += verified_rows_problems(node)
        if isinstance(node.config, AlignmentTax):
            for task in filter(is_path, node.config.tasks):
                problems += _refused(
                    f"stages.{node.name}.tasks", read_task, task, node.config.trust_task_code
                )
    problems += [*shared_questions(plan), *selecting_questions(plan)] if todo else []
    return list(dict.fromkeys(problems))


def broken_models(plan: Plan, nodes: Sequence[Node]) -> dict[str, str]:
    """Returns a sentence for each model that is missing or incomplete, by its place."""
    broken: dict[str, str] = {}
    for node in nodes:
        for name, place in node.models.items():
            where = "base_model" if name == "base" else f"stages.{node.name}: {name}"
            broken |= model_problem(where, place) or weight_problem(
                where, place, plan.recipe.trust_remote_code
            )
    return broken


def text_problems(
    node: Node,
    text: Text,
    frame: MeasuredTemplate | str | None,
    unfit_rows: Callable[[Data, Kind], list[str]],
) -> list[str]:
    """Returns the problems of a stage's data: its rows, its template, and its token limit. `frame`: the
    measured template, or why it could not be measured."""
    where = f"stages.{node.name}.{text.field}"
    problems = [f"{where}{problem}" for problem in unfit_rows(text.data, text.rows)] if text.rows else []
    if isinstance(frame, str):
        problems.append(f"{where}: {frame}")
    elif frame is not None:
        limit = f"stages.{node.name}.{text.limit_field}"
        problems += _refused(limit, check_limit, text.limit, frame.length)
        refused = rendered(frame, text).refused
        problems += [f"{where}: {refused}"] if refused else []
    return problems


def input_warnings(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Returns warnings about odd rows among those that `check_inputs` renders, and about data with few
    batches. Refuses no stage."""
    if importlib.util.find_spec("transformers") is None:
        return []
    todo = [node for node in nodes if not node.done]
    frames = frames_of(plan, todo, partial(tokenizer_of, plan), ())
    warned = []
    made: dict[str, int] = {}  # most rows that each stage makes
    for node in todo:
        for text in node.config.texts:
            frame = frames.get(pair_of(tokenizer_of(plan, node) or "", text.data))
            if not isinstance(frame, MeasuredTemplate):
                continue
            found = rendered(frame, text)
            told = [*found.warned, batch_warning(node.config, text.field, found.items) if found.items else ""]
            warned += [f"stages.{node.name}.{text.field}: {sentence}" for sentence in told if sentence]
            made[node.name] = max(made.get(node.name, 0), node.config.rows_made(found.items or 0))
        for field in ("pairs", "answers"):
            count = made.get(node.stages.get(getattr(node.config, field, None) or "", ""))
            if count and (sentence := made_rows_warning(node.config, count)):
                warned.append(f"stages.{node.name}.{field}: {sentence}")
    return list(dict.fromkeys(warned))


def load_here(place: str, overrides: Sequence[str]) -> Recipe:
    """Loads a recipe whose inputs are here. Raises ValueError with the faults of a wrong recipe and of the
    inputs of its sound part, one sentence a line."""
    try:
        return load_recipe(place, overrides)
    except WrongRecipe as error:
        raise ValueError("\n".join([str(error), *further_problems(error)])) from None


def further_problems(error: WrongRecipe) -> list[str]:
    """Like `check_inputs`, but for the correct part of a wrong recipe, without stages that lack a value."""
    if error.rest is None or error.rest.base_model == ANYTHING:
        return []
    try:
        planned = plan_of(error.rest)
        return error.further(
            check_inputs(
                planned, [node for node in planned.nodes if ANYTHING not in node.config.model_dump_json()]
            )
        )
    except ValueError:
        return []


def check_machine(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Returns what this machine lacks: CPUs, GPUs, packages, keys, access to the store and the artifacts
    folder."""
    problems = (
        _folder_problem(plan.artifacts) + _webhook_problem(plan) + _store_problem(plan) + _wandb_problem(plan)
    )
    cpus = num_cpus()
    gpus = num_gpus()
    cluster = os.environ.get("RAY_ADDRESS")
    for node in nodes:
        if node.done:
            continue
        need = needs(node.config)
        where = f"stages.{node.name}"
        if not cluster:
            if need.nodes > 1:
                problems.append(
                    f"{where} asks for {need.nodes} nodes, this is one machine; set RAY_ADDRESS to a cluster"
                    " or num_nodes to 1"
                )
            if need.cpus > cpus + 1e-6:
                problems.append(
                    f"{where} asks for {need.cpus:g} CPUs in all, this machine has {cpus}; lower ranks or"
                    " cpus of its roles"
                )
            if need.gpus > gpus + 1e-6:
                problems.append(
                    f"{where} asks for {need.gpus:g} GPUs in all, this machine has {gpus}; lower ranks or"
                    " gpus of its roles"
                )
        problems += _quantisation_problem(node, gpus) if not cluster else []
        problems += _sandbox_problem(node)
        problems += verifier_needs(node)
        problems += missing_keys(node)
        for key in node.config.needed_keys:
            if key.required and not os.environ.get(key.variable):
                problems.append(
                    f"{where}: {key.reader} needs a key in the environment variable {key.variable}; set it"
                )
        if any(wanted.kind == "vllm" for wanted in engines_of(node.config)):
            problems += filter(None, [untested(installed_release())])
        if isinstance(node.config, AlignmentTax) and importlib.util.find_spec("lm_eval") is None:
            problems.append(
                f"{where} needs the package lm_eval, which is not installed; install alignflow's extra `tax`"
            )
    return list(dict.fromkeys(problems))


def engines_of(config: StageConfig) -> list[EngineConfig]:
    """Returns the engines and servers of a stage."""
    wanted = [wanted for groups in config.turns for wanted in groups.values()]
    return [each for each in wanted if isinstance(each, EngineConfig)]


def _store_problem(plan: Plan) -> list[str]:
    if plan.recipe.store is None:
        return []
    try:
        Store(plan.recipe.store, attempts=1).files.probe()
    except StoreFault as fault:
        return [str(fault)]
    return []


def _wandb_problem(plan: Plan) -> list[str]:
    if plan.recipe.wandb is None:
        return []
    package = importlib.util.find_spec("wandb")
    # without an origin: a folder `wandb` made by the client, not the package
    if package is None or package.origin is None:
        return [
            "wandb: the package wandb is not installed; install alignflow's extra `wandb`, or leave wandb out"
            " of the recipe"
        ]
    if not os.environ.get(KEY_ENV) and os.environ.get(MODE_ENV) not in ("offline", "disabled"):
        return [
            f"wandb: the environment variable {KEY_ENV} is empty; set it, or set {MODE_ENV}=offline to send"
            " the metrics later"
        ]
    return []


def _webhook_problem(plan: Plan) -> list[str]:
    notify = plan.recipe.notify
    if notify is None or notify.url is not None:
        return []
    return [
        f"notify: the environment variable {notify.url_env} holds no http(s) address; set it, or leave"
        " notify out"
    ]


def _quantisation_problem(node: Node, gpus: float) -> list[str]:
    """Returns a sentence if QLoRA's 4-bit weights lack a GPU or the package bitsandbytes."""
    lora = getattr(node.config, "lora", None)
    if lora is None or lora.quantize == "none":
        return []
    where = f"stages.{node.name}.lora.quantize={lora.quantize}"
    if not gpus:
        return [f"{where} needs an NVIDIA GPU, and this machine has none; set it to none"]
    if importlib.util.find_spec("bitsandbytes") is None:
        return [
            f"{where} needs the package bitsandbytes, which is not installed; install it or set quantize to"
            " none"
        ]
    return []


def _sandbox_problem(node: Node) -> list[str]:
    """Returns a sentence for each environment `tools` whose programs cannot be sandboxed."""
    return [
        f"stages.{node.name}.{place} runs programs in bubblewrap (bwrap), which does not work on this"
        " machine; install it (Debian, Ubuntu: apt-get install bubblewrap), leave python out of"
        " options.tools, or set sandbox to none, which closes nothing in"
        for place, environment in node.config.talks_to.items()
        if _needs_sandbox(environment) and not available()
    ]


def _needs_sandbox(environment: Environment) -> bool:
    """Returns whether an environment is `tools` with programs that run in the sandbox."""
    if environment.own or environment.sandbox == "none" or environment.path != "tools":
        return False
    return "python" in (environment.options.get("tools") or ("python",))


def needs(config: StageConfig) -> Needs:
    """Returns what a stage uses at once: all roles and engines for PPO, ranks or engines for other stages."""
    layouts = [arrange(groups, config.together) for groups in config.turns]
    sums = [
        {resource: sum(b.get(resource, 0.0) for b in layout.bundles) for resource in ("CPU", "GPU")}
        for layout in layouts
    ]
    nodes = (
        group.num_nodes for groups in config.turns for group in groups.values() if isinstance(group, Ranks)
    )
    return Needs(
        max(found["CPU"] for found in sums), max(found["GPU"] for found in sums), max(nodes, default=1)
    )


def tokenizer_of(plan: Plan, node: Node) -> str | None:
    """Returns the folder or Hub id that a stage's chain of models starts from, whose tokenizer the stage
    uses. None: the stage has no such model, as when all are remote."""
    name = node.config.tokenizer_model(KINDS[node.kind].start)
    return None if name is None else _start_of(plan, node, name)


def _start_of(plan: Plan, node: Node, name: str) -> str | None:
    """Like `tokenizer_of`, but for a name in the stage's config."""
    return tokenizer_of(plan, plan[node.stages[name]]) if name in node.stages else node.models[name]


def _refused(where: str, check: Callable[..., object], *values: object) -> list[str]:
    try:
        check(*values)
    except ValueError as error:
        return [f"{where}: {error}"]
    return []


def _folder_problem(folder: Path) -> list[str]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return []
    except OSError as error:
        return [
            f"artifacts: nothing can be written to {existing} ({error.strerror}); set artifacts to another"
            " folder"
        ]
