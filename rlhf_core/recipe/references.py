"""Finds the names of models, stages and files in a stage's config, and the places of a recipe's files. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config import AlignmentTax, Evaluation, Recipe, RewardEvaluation, RewardJudge, Source, StageConfig, VllmJudge
from rlhf_core.config.kinds import KINDS, named
from rlhf_core.config.lm_eval_tasks import is_path
from rlhf_core.config.rewards import FunctionReward, ModelReward
from rlhf_core.hub.ids import is_remote

PLACES = {  # fields that name a model or a file, beside those of KINDS
    Source: ("path",),
    FunctionReward: ("function",),
    ModelReward: ("model",),
    AlignmentTax: ("tasks",),
    Evaluation: ("parents",),
    RewardEvaluation: ("models",),
    RewardJudge: ("reward",),
    VllmJudge: ("model",),
}


class Reference(NamedTuple):
    """A name of a model or stage in a config. `place` is its field, for messages; `kinds` are the stage kinds it may have."""

    place: str
    name: str
    kinds: tuple[str, ...]


def references(config: StageConfig) -> Iterator[Reference]:
    """The names in a config that stand for models or other stages."""
    for field, wanted in KINDS[config.stage].names.items():
        kinds = named(*wanted)
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
                yield Reference(f"parents.{model}", parent, named("policy"))
        for i, name in enumerate(config.reward_evaluation.models if config.reward_evaluation else ()):
            yield Reference(f"reward_evaluation.models.{i}", name, named("reward"))
        for i, judge in enumerate(config.judges):
            if isinstance(judge, RewardJudge):
                yield Reference(f"judges.{i}.reward", judge.reward, named("reward"))
            elif isinstance(judge, VllmJudge):
                yield Reference(f"judges.{i}.model", judge.model, named("policy"))


def beside(recipe: Recipe, folder: Path, given: Collection[str] = (), absolute: bool = False) -> dict[str, Any]:
    """Returns the recipe as plain values, with absolute paths in place of inputs' relative ones, which are below `folder`, that of the
    recipe's file. `given`: fields that the command line gives; not `absolute`: what is the same from the working directory stays.
    Raises ValueError: a line for each that only the working directory has."""
    whole, problems = recipe.model_dump(), list[str]()
    if "base_model" not in given:
        whole["base_model"] = _placed(recipe.base_model, folder, problems, absolute)
    if "stages" not in given:
        names = {name: None for config in recipe.stages.values() for name in (*_models(config, recipe), *_files(config))}
        whole["stages"] = _placed_in(recipe.stages, {name: _placed(name, folder, problems, absolute) for name in names})
    if problems:
        raise ValueError("\n".join(problems))
    return whole


def relative_paths(recipe: Recipe) -> list[str]:
    """Returns the paths of inputs that are relative to the working directory."""
    inputs = [name for config in recipe.stages.values() for name in (*_models(config, recipe), *_files(config))]
    paths = [name.rpartition(":")[0] if ".py:" in name else name for name in (recipe.base_model, *inputs)]
    return [path for path in dict.fromkeys(paths) if _is_relative(path, Path.cwd())]


def _is_relative(path: str, folder: Path) -> bool:
    """Returns whether a name of a model or file is a path below `folder`, and no absolute one, URI or Hub id."""
    elsewhere = Path(path).is_absolute() or path.startswith("~") or "://" in path
    return not (elsewhere or (is_remote(path) and not os.path.exists(folder / path)))


def _placed(name: str, folder: Path, problems: list[str], absolute: bool) -> str:
    path, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    place = Path(os.path.normpath(folder / path))
    if not _is_relative(path, folder):
        return name
    if not absolute and place == Path(os.path.abspath(path)):
        return name
    if os.path.exists(path) and not os.path.exists(place):
        where = "paths in a recipe are relative to its file"
        problems.append(f"{path}: {where}: there is no {place}, but {Path(path).absolute()}: write {os.path.relpath(path, folder)}")
    return f"{place}{colon}{function}"


def _placed_in(value: Any, names: Mapping[str, str], named_here: bool = False) -> Any:
    """Returns a config as plain values, with other names in place of some in the fields that name models and files."""
    match value:
        case BaseModel():
            fields = {*PLACES.get(type(value), ()), *(KINDS[value.stage].names if hasattr(value, "stage") else ())}
            return {field: _placed_in(getattr(value, field), names, field in fields) for field in type(value).model_fields}
        case dict():
            return {_placed_in(key, names, named_here): _placed_in(item, names, named_here) for key, item in value.items()}
        case list() | tuple():
            return [_placed_in(item, names, named_here) for item in value]
    return names.get(value, value) if named_here else value


def _models(config: StageConfig, recipe: Recipe) -> Iterator[str]:
    """The names of models in a config that are no stages of the recipe."""
    for reference in references(config):
        if reference.name != "base" and reference.name.partition(".")[0] not in recipe.stages:
            yield reference.name


def _files(value: Any) -> Iterator[str]:
    """The data files, functions and task files in a config."""
    match value:
        case Source():
            yield value.path
        case FunctionReward():
            yield value.function
        case AlignmentTax():
            yield from filter(is_path, value.tasks)
    parts = [getattr(value, name) for name in type(value).model_fields] if isinstance(value, BaseModel) else value
    for part in parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list | tuple) else ():
        yield from _files(part)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Returns plain values with other names in place of some, also where these are the keys of a mapping."""
    if isinstance(value, dict):
        return {names.get(key, key): renamed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
