"""Checks the files of reward functions and environments, and calls each reward function once with made-up
answers. Torch-free.

The call finds within a second an error that the stage would find only after starting its engines. Only the
stage gives warnings, because it renders prompts with the model's own template.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.config import Data, Rewarded
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.data.pictures.message_parts import content_text, named_pictures
from rlhf_core.data.rows.columns import pictured_prompt_of
from rlhf_core.data.rows.mixture import checked_rows
from rlhf_core.recipe.plan import Node
from rlhf_core.recipe.sentences import unknown
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rewards.reward_trial import call_once, made_up_answers

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SECONDS = 10.0  # time limit for importing and calling a function
# Keyed by the file's source and mtime: a run checks twice, before its flow and in it.
_known: dict[tuple[FunctionReward, int], str] = {}


def code_problems(node: Node) -> list[str]:
    """Returns the faults in the files of a stage's reward functions and environment, each with its place in
    the recipe. Parses the files without running them."""
    where = f"stages.{node.name}"
    problems = [
        _file_problem(f"{where}.reward", "function", source.file, source.function_name)
        for source in _functions(node)
    ]
    for place, environment in node.config.talks_to.items():
        if environment.own:
            problems.append(
                _file_problem(f"{where}.{place}", "class", environment.file, environment.class_name)
            )
        problems += [
            _file_problem(f"{where}.{place}.{field}", "function", file, name)
            for field, (file, name) in environment.functions.items()
        ]
    return [problem for problem in problems if problem]


def trial_problems(nodes: Sequence[Node]) -> list[str]:
    """Calls the reward functions of stages that are not done, and returns a message for each function that
    fails on every answer. Only a run calls this, because `validate` must not execute user code."""
    found = []
    for node in nodes:
        if not node.done and isinstance(node.config, Rewarded):
            told = _trial_problems(node.config.prompts, _functions(node))
            found += [f"stages.{node.name}.reward: {sentence}" for sentence in told]
    return list(dict.fromkeys(found))


def _functions(node: Node) -> list[FunctionReward]:
    sources = node.config.reward if isinstance(node.config, Rewarded) else ()
    return [source for source in sources if isinstance(source, FunctionReward)]


def _file_problem(where: str, kind: str, file: Path, name: str) -> str:
    """Returns why a file lacks the named function or class, or "" if it has it. Parses the file without
    running it."""
    try:
        code = ast.parse(file.read_text())
    except OSError as error:
        return f"{where}: {file} cannot be read ({error.strerror}); correct the path of the {kind}"
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"{where}: {file} is no Python file ({error}); correct it"
    defined = [part.name for part in code.body if isinstance(part, DEFINITIONS)]
    targets = [target for part in code.body if isinstance(part, ast.Assign) for target in part.targets]
    assigned = [target.id for target in targets if isinstance(target, ast.Name)]
    imported = [
        alias.asname or alias.name
        for part in code.body
        if isinstance(part, ast.ImportFrom)
        for alias in part.names
    ]
    valid = defined + assigned + imported
    return "" if name in valid else f"{where}: {file}: {unknown(name, valid, kind)}"


def _trial_problems(prompts: Data, functions: list[FunctionReward]) -> list[str]:
    """Returns a sentence for each function that fails on every answer. Skips the trial if torch is not
    installed: such a machine only orchestrates, and may lack packages that the functions import."""
    if not functions or importlib.util.find_spec("torch") is None:
        return []
    try:
        located = next(checked_rows(prompts, "prompt"), None)
        messages = pictured_prompt_of(located) if located is not None else []
    except ValueError:  # reported with the data
        return []
    if located is None:
        return []
    query = "\n".join(content_text(message["content"]) for message in messages)
    messages = named_pictures(messages)
    samples = [
        Sample(messages, text, located.row, True, f"{query}\n{text}") for text in made_up_answers(located.row)
    ]
    return [told for source in functions if (told := _trial_problem(source, samples))]


def _trial_problem(source: FunctionReward, samples: list[Sample]) -> str:
    key = source, source.file.stat().st_mtime_ns
    if key not in _known:
        try:
            call_once(source, samples, SECONDS)
            _known[key] = ""
        except ValueError as error:
            _known[key] = str(error)
    return _known[key]
