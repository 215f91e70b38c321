"""Checks, before any stage starts, whether a recipe can run here. Checks the recipe's inputs and, with
`machine_checks.py`, this machine. Describes each problem in one sentence, which says where the problem is and
what to do.

Checks only stages that are not done. Reads data and tokenizers with the same code as the stages, tokenizers
in a second process if possible (see `template_length.py`). Without transformers (on a machine that only
orchestrates), leaves the check of tokenizers to the stages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from rlhf_core.config import (
    KINDS,
    AlignmentTax,
    Data,
    Publication,
    Recipe,
)
from rlhf_core.config.data import Text
from rlhf_core.config.judging.lm_eval_tasks import is_path, read_task
from rlhf_core.data.documents import check_limit
from rlhf_core.data.prompt_rows import picture_refusal
from rlhf_core.data.rows.columns import Kind
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.preflight.families.family import family_problems, option_problems
from rlhf_core.preflight.machine_checks import check_machine
from rlhf_core.preflight.model_checks import (
    argument_problems,
    image_problems,
    judge_problems,
    model_problem,
    sampling_problems,
    unfit_models,
    unlike_vocabulary,
    vocabulary_problems,
)
from rlhf_core.preflight.question_checks import question_problems, selecting_questions, shared_questions
from rlhf_core.preflight.reward_functions import code_problems, trial_problems
from rlhf_core.preflight.rows.batches import batch_warning, made_rows_warning, prompt_problem
from rlhf_core.preflight.rows.frames import frames_of, rendered
from rlhf_core.preflight.rows.template_length import MeasuredTemplate, pair_of
from rlhf_core.preflight.sequence_checks import length_problems, sequence_problems
from rlhf_core.preflight.verifier_problems import verified_rows_problems
from rlhf_core.preflight.weight_checks import weight_problem
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.recipe.plan import plan as plan_of
from rlhf_core.recipe.sentences import ANYTHING, WrongRecipe
from rlhf_core.stages.publication.publication_folder import refuse_foreign
from rlhf_core.system.machine import MachineLacks


def require_here(plan: Plan, nodes: Sequence[Node]) -> None:
    """Raises ValueError for problems in the recipe, files or reward functions; otherwise raises MachineLacks
    for what this machine lacks. Calls each reward function once, so only a run may call this."""
    problems = check_inputs(plan, nodes) or trial_problems(nodes)
    if problems:
        raise ValueError("\n".join(problems))
    problems = check_machine(plan, nodes)
    if problems:
        raise MachineLacks("\n".join(problems))


def check_inputs(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Returns the problems of the inputs: missing files, unsuitable data, incomplete models, and limits below
    the length of the chat template alone."""
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

    read: dict[tuple[str, Kind], list[str]] = {}  # shared by all rounds of a loop

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
        if not broken:
            problems += judge_problems(node, partial(_start_of, plan, node), plan.recipe.trust_remote_code)
        problems += argument_problems(node, partial(_start_of, plan, node), plan.recipe.trust_remote_code)
        problems += sequence_problems(node, partial(_start_of, plan, node))
        problems += image_problems(node, partial(_start_of, plan, node))
        for text in node.config.texts:
            frame = frames.get(pair_of(start or "", text.data))
            problems += text_problems(node, text, frame, unfit_rows)
        of_prompts = f"stages.{node.name}.prompts:"
        if not any(problem.startswith(of_prompts) for problem in problems):
            problems += [told for told in (prompt_problem(node, plan.recipe.seed),) if told]
        problems += question_problems(node, plan.recipe.seed)
        problems += code_problems(node)
        problems += verified_rows_problems(node, plan.recipe.seed)
        if isinstance(node.config, AlignmentTax):
            for task in filter(is_path, node.config.tasks):
                problems += _refused(
                    f"stages.{node.name}.tasks", read_task, task, node.config.trust_task_code
                )
    problems += [*shared_questions(plan), *selecting_questions(plan)] if todo else []
    return list(dict.fromkeys(problems))


def broken_models(plan: Plan, nodes: Sequence[Node]) -> dict[str, str]:
    """Returns a sentence for each missing or incomplete model, keyed by its folder or Hub id."""
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
    """Returns the problems of a stage's data: its rows, template and token limit. `frame` is the measured
    template, or the reason why it could not be measured."""
    where = f"stages.{node.name}.{text.field}"
    problems = [f"{where}{problem}" for problem in unfit_rows(text.data, text.rows)] if text.rows else []
    if isinstance(frame, str):
        problems.append(f"{where}: {frame}")
    elif frame is not None:
        limit = f"stages.{node.name}.{text.limit_field}"
        problems += _refused(limit, check_limit, text.limit, frame.length)
        found = rendered(frame, text)
        refused = picture_refusal(node.config) if found.images else ""
        problems += [f"{where}: {told}" for told in (found.refused, refused) if told]
    return problems


def input_warnings(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Returns warnings about odd rows among the rows that `check_inputs` renders, and about data sets that
    make few batches. A warning never blocks a stage."""
    if importlib.util.find_spec("transformers") is None:
        return []
    todo = [node for node in nodes if not node.done]
    frames = frames_of(plan, todo, partial(tokenizer_of, plan), ())
    warned = []
    made: dict[str, int] = {}  # the most rows that each stage generates
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
    """Loads a recipe whose inputs must be on this machine. Raises ValueError with the recipe's faults and the
    problems of the inputs of its valid part, one sentence per line."""
    try:
        return load_recipe(place, overrides)
    except WrongRecipe as error:
        raise ValueError("\n".join([str(error), *further_problems(error)])) from None


def further_problems(error: WrongRecipe) -> list[str]:
    """Works like `check_inputs` on the valid part of an invalid recipe, without stages that lack a value."""
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


def tokenizer_of(plan: Plan, node: Node) -> str | None:
    """Returns the folder or Hub id of the model from which the training of the stage's model began; the stage
    uses its tokenizer. Returns None if the stage has no such model, for example when all its models are
    remote."""
    name = node.config.tokenizer_model(KINDS[node.kind].start)
    return None if name is None else _start_of(plan, node, name)


def _start_of(plan: Plan, node: Node, name: str) -> str | None:
    """Like `tokenizer_of`, but for a model name in the stage's config."""
    return tokenizer_of(plan, plan[node.stages[name]]) if name in node.stages else node.models[name]


def _refused(where: str, check: Callable[..., object], *values: object) -> list[str]:
    try:
        check(*values)
    except ValueError as error:
        return [f"{where}: {error}"]
    return []
