"""Checks stages whose rewards are verifiers: their rows, the environments that the rows name, and whether
this machine has what they need. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from rlhf_core.config import PPO, Data, Rewarded
from rlhf_core.config.rewarding.verifiers import ReasoningGymReward
from rlhf_core.data.rows.columns import Located
from rlhf_core.data.rows.mixture import checked_rows, used_rows
from rlhf_core.data.rows.pass_rate_column import pass_rate_problem
from rlhf_core.data.rows.verifiers_rows import verifiers_problem
from rlhf_core.environments.agents.openenv_session import openenv_problem
from rlhf_core.environments.row_environments import environment_problem
from rlhf_core.environments.verifiers.verifier_checks import lacks, row_problem, verifiers_of
from rlhf_core.recipe.plan import Node
from rlhf_core.rewards.row_teachers import teacher_problem

FIRST = (
    2000  # rows of each data set that verifiers read; the stage checks all rows before it starts an engine
)

PlacedRow = tuple[str, Mapping[str, Any]]


def verified_rows_problems(node: Node, seed: int = 0) -> list[str]:
    """Returns a sentence for each data set with an invalid row. A row is invalid if a verifier cannot read
    it, if it names an environment or teacher that the stage lacks, or if its pass rate for a curriculum is
    not a number from 0 to 1. `seed` is the recipe's seed, which determines the rows of a mixture."""
    config = node.config
    if not isinstance(config, Rewarded):
        return []
    sets = {"prompts": config.prompts}
    environments = config.environments if isinstance(config, PPO) else {}
    if isinstance(config, PPO) and config.eval_prompts is not None:
        sets["eval_prompts"] = config.eval_prompts
    curriculum = config.curriculum if isinstance(config, PPO) else None
    key = None if curriculum is None else curriculum.pass_rate_key
    teachers = config.teachers if isinstance(config, PPO) else {}
    if not verifiers_of(config.reward) and not environments and not teachers and key is None:
        return []
    told = {}
    for field, data in sets.items():
        named: list[Callable[[Iterable[PlacedRow]], str]] = []  # each reads all rows that the stage uses
        if environments:
            named.append(partial(environment_problem, environments))
        if field == "prompts" and key is not None:
            named.append(partial(pass_rate_problem, key))
        if field == "prompts" and teachers:
            named.append(partial(teacher_problem, teachers))
        try:
            problem = row_problem(config.reward, _with_places(islice(checked_rows(data, "prompt"), FIRST)))
            for problem_of in named:
                problem = problem or problem_of(_with_places(used_rows(data, seed, "prompt")))
        except ValueError:  # reported with the data
            continue
        told[field] = problem or _form_problem(config, data)
    return [f"stages.{node.name}.{field}: {problem}" for field, problem in told.items() if problem]


def _with_places(rows: Iterable[Located]) -> Iterator[PlacedRow]:
    """Returns an iterator over pairs of a row's place and the row."""
    return ((found.where, found.row) for found in rows)


def _form_problem(config: Rewarded, data: Data) -> str:
    """Returns a sentence if generated questions ask for the answer in a form that is not scored. A source
    without an instruction and a system message asks for no form."""
    generated = [source.reasoning_gym for source in data.sources if source.reasoning_gym is not None]
    for reward in config.reward:
        if not isinstance(reward, ReasoningGymReward):
            continue
        for source in generated:
            asked = source.instruction + (source.system or "")
            if reward.tag is None and "<answer>" in asked:
                return "instruction asks for <answer>, and the reward has tag: null: change one of them"
            if reward.tag is not None and asked and f"<{reward.tag}>" not in asked:
                return f"instruction does not ask for <{reward.tag}>, the tag of the reward: write it there"
    return ""


def verifier_needs(node: Node) -> list[str]:
    """Returns a sentence for each verifier whose package or sandbox this machine lacks. Also reports each
    environment of the package verifiers that its interpreter lacks, and each OpenEnv server that this machine
    cannot reach."""
    config = node.config
    if not isinstance(config, Rewarded):
        return []
    told = {source.title: lacks(source) for source in verifiers_of(config.reward)}
    lacking = [f"stages.{node.name}.reward: {title} {lack}" for title, lack in told.items() if lack]
    for place, environment in config.talks_to.items():
        if environment.verifiers is not None:
            problem = verifiers_problem(environment.verifiers, environment.python)
            lacking += [f"stages.{node.name}.{place}: {problem}"] if problem else []
        if environment.openenv is not None:
            problem = openenv_problem(environment.openenv, environment.options.get("token_env"))
            lacking += [f"stages.{node.name}.{place}: {problem}"] if problem else []
    return lacking
