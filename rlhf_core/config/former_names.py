"""Accepts former field names: renames `vllm` to `engine`, and its `engine` to `options`."""

from __future__ import annotations

from typing import Any

NOTE = "the current names are engine (for vllm) and engine.options (for vllm.engine): rename them"
# where such a field can occur below a stage; * stands for any entry of a list
OWNERS = ((), ("judge",), ("judges", "*"), ("anchors", "judge"))


def with_new_names(recipe: Any) -> Any:
    """Returns a parsed recipe with current names. Leaves the value unchanged if it is not a recipe, and
    leaves any part unchanged that has both names."""
    stages = recipe.get("stages") if isinstance(recipe, dict) else None
    if not isinstance(stages, dict):
        return recipe
    return recipe | {"stages": {name: stage_with_new_names(stage) for name, stage in stages.items()}}


def stage_with_new_names(stage: Any) -> Any:
    """Returns a stage's parsed config with current names."""
    for owner in OWNERS:
        stage = _renamed_at(stage, owner)
    return stage


def _renamed_at(given: Any, path: tuple[str, ...]) -> Any:
    if not path:
        return _renamed(given)
    key, *rest = path
    if key == "*" and isinstance(given, list | tuple):
        return [_renamed_at(item, tuple(rest)) for item in given]
    if isinstance(given, dict) and key in given:
        return given | {key: _renamed_at(given[key], tuple(rest))}
    return given


def _renamed(owner: Any) -> Any:
    if not isinstance(owner, dict) or not isinstance(owner.get("vllm"), dict) or "engine" in owner:
        return owner
    return {("engine" if key == "vllm" else key): _engine(key, value) for key, value in owner.items()}


def _engine(key: str, value: Any) -> Any:
    if key != "vllm" or "engine" not in value:
        return value
    return {("options" if name == "engine" else name): item for name, item in value.items()}


def with_new_keys(keys: list[str], value: Any) -> tuple[list[str], Any]:
    """Returns an override's keys (a stage's name first) and its value, both with current names."""
    for owner in OWNERS:
        end = 1 + len(owner)
        here = all(wanted in (key, "*") for key, wanted in zip(keys[1:], owner, strict=False))
        if not here or keys[end : end + 1] != ["vllm"]:
            continue
        below = keys[end + 1 :]
        if below[:1] == ["engine"]:
            below = ["options", *below[1:]]
        if not below and isinstance(value, dict):
            value = _engine("vllm", value)
        return [*keys[:end], "engine", *below], value
    return keys, value
