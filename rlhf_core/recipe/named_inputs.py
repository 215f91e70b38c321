"""Finds the names of models, stages and files in a stage's config, and resolves the paths of a recipe's
files. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config import (
    AlignmentTax,
    Evaluation,
    Recipe,
    RewardEvaluation,
    RewardJudge,
    Source,
    StageConfig,
    VllmJudge,
)
from rlhf_core.config.generated_data import VerifiersPrompts
from rlhf_core.config.judging.lm_eval_tasks import is_path
from rlhf_core.config.kinds import KINDS, named
from rlhf_core.config.ppo.kl_penalty import Teacher
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.config.rewarding.judge_models import EngineJudge
from rlhf_core.config.rewards import FunctionReward, ModelReward
from rlhf_core.hub.ids import is_remote, parted

PLACES = {  # fields that name a model or a file, in addition to those in KINDS
    Source: ("path",),
    FunctionReward: ("function",),
    Environment: ("path", "agent", "checker", "python"),
    VerifiersPrompts: ("python",),
    ModelReward: ("model",),
    Teacher: ("model",),
    AlignmentTax: ("tasks",),
    Evaluation: ("parents",),
    RewardEvaluation: ("models",),
    RewardJudge: ("reward",),
    VllmJudge: ("model",),
    EngineJudge: ("model",),
}


class ConfigReference(NamedTuple):
    """Holds a name of a model or stage in a config. `place` is its field, for messages. `kinds` are the
    permitted kinds of the stage."""

    place: str
    name: str
    kinds: tuple[str, ...]

    @property
    def decides(self) -> bool:
        """Returns whether the result of the named stage affects this stage's result. The result of a
        calibration does not; the stage only waits for it."""
        return self.kinds != ("calibration",)


def references(config: StageConfig) -> Iterator[ConfigReference]:
    """Yields the names in a config that stand for models or other stages."""
    for field, wanted in KINDS[config.stage].names.items():
        kinds = named(*wanted)
        value = getattr(config, field)
        values = value if isinstance(value, tuple) else (value,)  # None is not a name
        for i, item in enumerate(values):
            if isinstance(item, str) and item not in (config.remote_models or ()):
                yield ConfigReference(field, item, kinds)
            elif isinstance(item, ModelReward):
                yield ConfigReference(field if len(values) == 1 else f"{field}.{i}", item.model, kinds)
        for key, item in value.items() if isinstance(value, Mapping) else ():
            if isinstance(item, Teacher):
                yield ConfigReference(f"{field}.{key}", item.model, kinds)
    for place, name, makes in config.nested_names:
        yield ConfigReference(place, name, named(makes))


def beside(
    recipe: Recipe, folder: Path, given: Collection[str] = (), absolute: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns the recipe as plain values, with relative input paths resolved against `folder`, the folder of
    the recipe file. Also returns a sentence for each path that does not exist there, but exists in the
    working directory or closely resembles an existing path.

    `given` are fields set on the command line, which are left unchanged. Unless `absolute` is set, paths with
    the same meaning in the working directory stay relative.
    """
    whole = recipe.model_dump()
    problems = list[str]()
    places = dict[str, str]()
    for where, name in _inputs(recipe):
        if (where if where == "base_model" else "stages") not in given:
            places[name] = _placed(where, name, folder, problems, absolute)
    if "base_model" not in given:
        whole["base_model"] = places[recipe.base_model]
    if "stages" not in given:
        whole["stages"] = _placed_in(recipe.stages, places)
    return whole, problems


def with_home(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Returns the recipe with `~` and `~user` expanded at the start of `artifacts`, `store` and input paths.
    Also returns a sentence for each path whose user does not exist on this machine."""
    named_places = [("artifacts", recipe.artifacts), ("store", recipe.store or ""), *_inputs(recipe)]
    homes = dict[str, str]()
    problems = list[str]()
    for where, name in named_places:
        if not name.startswith("~"):
            continue
        homes[name] = os.path.expanduser(name)
        if homes[name] == name:
            user = name.partition("/")[0]
            problems.append(
                f"{where}: {name}: this machine knows no home folder {user}; write the whole path, or"
                f" ./{name} for that name"
            )
    if not homes:
        return recipe, []
    whole = recipe.model_dump()
    for field in ("artifacts", "store", "base_model"):
        whole[field] = homes.get(whole[field], whole[field])
    whole["stages"] = _placed_in(recipe.stages, homes)
    return Recipe.model_validate(whole), problems


def relative_paths(recipe: Recipe) -> list[str]:
    """Returns the input paths that are relative to the working directory."""
    paths = [name.rpartition(":")[0] if ".py:" in name else name for _, name in _inputs(recipe)]
    return [path for path in dict.fromkeys(paths) if _is_relative(path, Path.cwd())]


def _is_relative(path: str, folder: Path) -> bool:
    """Returns whether the name of a model or file is a path relative to `folder` rather than an absolute
    path, URI or Hub id."""
    elsewhere = Path(path).is_absolute() or path.startswith("~") or "://" in path
    return not (elsewhere or (is_remote(path) and not os.path.exists(folder / path)))


def _placed(where: str, name: str, folder: Path, problems: list[str], absolute: bool) -> str:
    path, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    place = Path(os.path.normpath(folder / path))
    if not _is_relative(path, folder):
        if is_remote(path) and parted(path)[1] is None and (near := _nearly(place)):
            meant = os.path.join(os.path.dirname(path), near)
            problems.append(
                f"{where}: there is no {place}; did you mean {meant}? (a model of the Hub of this name is"
                f" written {path}@main)"
            )
        return name
    if not absolute and place == Path(os.path.abspath(path)):
        return name
    if os.path.exists(path) and not os.path.exists(place):
        told = "paths in a recipe are relative to its file"
        found = Path(path).absolute()
        write = os.path.relpath(path, folder)
        problems.append(f"{where}: {path}: {told}: there is no {place}, but {found}: write {write}")
        return f"{found}{colon}{function}"
    return f"{place}{colon}{function}"


def _nearly(place: Path) -> str | None:
    """Returns a sibling of a missing path whose name has one letter more or less, or the same letters in a
    different order; None if there is none."""
    try:
        others = os.listdir(place.parent)
    except OSError:
        return None
    for other in others:
        longer, shorter = sorted((place.name, other), key=len, reverse=True)
        one_less = {longer[:i] + longer[i + 1 :] for i, letter in enumerate(longer) if letter.isalpha()}
        if shorter in one_less or (longer != shorter and sorted(longer) == sorted(shorter)):
            return other
    return None


def _placed_in(value: Any, names: Mapping[str, str], named_here: bool = False) -> Any:
    """Returns a config as plain values, with the keys of `names` replaced in the fields that name models and
    files."""
    match value:
        case BaseModel():
            fields = {
                *PLACES.get(type(value), ()),
                *(KINDS[value.stage].names if hasattr(value, "stage") else ()),
            }
            return {
                field: _placed_in(getattr(value, field), names, field in fields)
                for field in type(value).model_fields
            }
        case dict():
            return {
                _placed_in(key, names, named_here and not isinstance(item, BaseModel)): _placed_in(
                    item, names, named_here
                )
                for key, item in value.items()
            }
        case list() | tuple():
            return [_placed_in(item, names, named_here) for item in value]
    return names.get(value, value) if named_here else value


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields (field, name) for each data file, function and task file of a recipe, and for each model that is
    not a stage."""
    yield "base_model", recipe.base_model
    for stage, config in recipe.stages.items():
        for reference in references(config):
            if reference.name != "base" and reference.name.partition(".")[0] not in recipe.stages:
                yield f"stages.{stage}.{reference.place}", reference.name
        yield from _files(config, f"stages.{stage}")


def _files(value: Any, where: str) -> Iterator[tuple[str, str]]:
    match value:
        case Source() if not value.is_generated:
            yield where, value.path
        case FunctionReward():
            yield where, value.function
        case Environment() if value.own:
            yield where, value.path
        case Environment():
            yield from ((f"{where}.{field}", getattr(value, field)) for field in value.functions)
            yield from _interpreter(value.python, where)
        case VerifiersPrompts():
            yield from _interpreter(value.python, where)
        case AlignmentTax():
            yield from ((f"{where}.tasks", task) for task in value.tasks if is_path(task))
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for name, part in value.items() if isinstance(value, dict) else ():
        yield from _files(part, f"{where}.{name}")


def _interpreter(python: str | None, where: str) -> Iterator[tuple[str, str]]:
    """Yields the field and path of an interpreter that is given as a path rather than as a program name."""
    if python is not None and os.sep in python:
        yield f"{where}.python", python


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Returns plain values with the keys of `names` replaced, including names that are keys of mappings."""
    if isinstance(value, dict):
        return {names.get(key, key): renamed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
