"""What a run of a deployment may change in its recipe: settings, which hold no path, code or trust. The rest is the recipe's own."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel

from rlhf_core.config import Recipe
from rlhf_core.recipe.load import split_overrides
from rlhf_core.recipe.sentences import unknown
from rlhf_core.records import RECIPE_ONLY


def require_settings(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Raises ValueError for an override of a field that is no setting, or is not in the recipe."""
    for override in overrides:
        top, nested = split_overrides([override])
        for keys in [[key] for key, _ in top] + [keys for keys, _ in nested]:
            if not _is_setting(recipe if top else recipe.stages, keys, f"override {'.'.join(keys)}"):
                raise ValueError(
                    f"override {'.'.join(keys)}: a run of a deployment may set numbers, switches and choices that hold no path, code or "
                    "trust; write this field into the recipe, or give the override to the deployment (`alignflow serve RECIPE OVERRIDE`)"
                )


def _is_setting(here: Any, keys: Sequence[str], where: str) -> bool:
    """Whether the field that the keys lead to, the last one of a record on the way, holds nothing but plain values."""
    setting = False
    for key in keys:
        parts = _parts(here)
        if key not in parts:
            raise ValueError(f"{where}: {unknown(key, parts)}")
        if isinstance(here, BaseModel):
            info = type(here).model_fields[key]
            setting = info.json_schema_extra != RECIPE_ONLY and _is_plain(info.annotation)
        here = parts[key]
    return setting


def _parts(here: Any) -> dict[str, Any]:
    """What a record, mapping or tuple of a recipe holds, by the keys of an override."""
    if isinstance(here, BaseModel):
        return {name: getattr(here, name) for name in type(here).model_fields}
    if isinstance(here, dict):
        return here
    return {str(index): value for index, value in enumerate(here)} if isinstance(here, tuple) else {}


def _is_plain(annotation: Any) -> bool:
    """Whether a field's values are numbers, booleans, choices of a Literal or an Enum, None, or tuples of such."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return True
    if origin is typing.Annotated:
        return _is_plain(parts[0])
    if origin in (typing.Union, types.UnionType, tuple):
        return all(_is_plain(part) for part in parts if part is not Ellipsis)
    return annotation in (int, float, bool, types.NoneType) or (isinstance(annotation, type) and issubclass(annotation, Enum))
