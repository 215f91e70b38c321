"""Loads the recipe of a run, and checks that a deployment's run uses the deployment's recipe and overrides
nothing but settings.

`alignflow serve` writes the deployments' parameters to a file, which no API request can change, and passes
its path to their runs. A worker of another Prefect server reads the parameters from that server. There, users
who can change deployments can run code, but users who can only create runs cannot.
"""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from pydantic import BaseModel

from rlhf_core.config import Recipe
from rlhf_core.recipe.load_recipe import given_overrides, given_recipe, split_overrides
from rlhf_core.recipe.sentences import unknown
from rlhf_core.records import RECIPE_ONLY

SERVED_ENV = "ALIGNFLOW_SERVED"


_loaded: dict[str, Recipe] = {}  # by flow run


def recipe_of_run(
    given: object, overrides: object, run: UUID | str | None, deployment: UUID | str | None
) -> Recipe:
    """Like `own_recipe`, but reads the recipe of a flow run only once per run and process."""
    if str(run) not in _loaded:
        _loaded[str(run)] = own_recipe(given, overrides, deployment)
    return _loaded[str(run)]


def own_recipe(given: object, overrides: object, deployment: UUID | str | None) -> Recipe:
    """Returns the recipe in a run's parameters. `deployment`: the id of the run's deployment, if it has one.

    Raises ValueError for a recipe other than the deployment's (before reading it), for an override of a field
    that is not a setting, and for the same reasons as `given_recipe`.
    """
    if deployment is None:
        return given_recipe(given, overrides)
    own = _own_parameters(str(deployment))
    if given is None or given != own[0].get("recipe"):
        raise ValueError(
            "parameter recipe: a run of this deployment has the deployment's own recipe,"
            f" {str(own[0].get('recipe'))[:200]}: leave the parameter out, or make a deployment of the other"
            " recipe (`alignflow serve`)"
        )
    texts = given_overrides(overrides)
    known = {override for parameters in own for override in parameters.get("overrides") or ()}
    more = [override for override in texts if override not in known]
    if more:
        require_settings(given_recipe(given, own[0].get("overrides") or ()), more)
    loaded = given_recipe(given, texts)
    require_settings(loaded, more)  # again, because the deployment's overrides can change which fields exist
    return loaded


def _own_parameters(deployment: str) -> Sequence[Mapping[str, Any]]:
    """Returns the parameters of a deployment and of its schedules."""
    place = os.environ.get(SERVED_ENV)
    if place:
        served = json.loads(Path(place).read_text())
        if deployment not in served:
            raise ValueError(
                "`alignflow serve` did not create this deployment: start `alignflow serve` with the recipe,"
                " and run the deployment that it creates"
            )
        return [served[deployment]]
    with get_client(sync_client=True) as client:
        found = client.read_deployment(UUID(deployment))
    return [found.parameters, *(schedule.parameters for schedule in found.schedules)]


def require_settings(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Raises ValueError for an override of a field that is not a setting or is not in the recipe."""
    for override in overrides:
        top, nested = split_overrides([override])
        for keys in [[key] for key, _ in top] + [keys for keys, _ in nested]:
            if not _is_setting(recipe if top else recipe.stages, keys, f"override {'.'.join(keys)}"):
                raise ValueError(
                    f"override {'.'.join(keys)}: a run of a deployment may set numbers, switches and choices"
                    " that hold no path, code or trust; write this field into the recipe, or give the"
                    " override to the deployment (`alignflow serve RECIPE OVERRIDE`)"
                )


def _is_setting(here: Any, keys: Sequence[str], where: str) -> bool:
    """Returns whether the field to which `keys` lead (the last record field on the path) can hold only plain
    values."""
    setting = False
    for depth, key in enumerate(keys):
        parts = _parts(here)
        if key not in parts:
            if depth and isinstance(here, dict):  # a mapping with arbitrary keys, such as engine.options
                return False
            raise ValueError(f"{where}: {unknown(key, parts)}")
        if isinstance(here, BaseModel):
            info = type(here).model_fields[key]
            setting = info.json_schema_extra != RECIPE_ONLY and _is_plain(info.annotation)
        here = parts[key]
    return setting


def _parts(here: Any) -> dict[str, Any]:
    """Returns the content of a recipe's record, mapping or tuple, by the keys of an override."""
    if isinstance(here, BaseModel):
        return {name: getattr(here, name) for name in type(here).model_fields}
    if isinstance(here, dict):
        return here
    return {str(index): value for index, value in enumerate(here)} if isinstance(here, tuple) else {}


def _is_plain(annotation: Any) -> bool:
    """Returns whether a field's values are numbers, booleans, choices of a Literal or an Enum, None, or
    tuples of these."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is typing.Literal:
        return True
    if origin is typing.Annotated:
        return _is_plain(parts[0])
    if origin in (typing.Union, types.UnionType, tuple):
        return all(_is_plain(part) for part in parts if part is not Ellipsis)
    return annotation in (int, float, bool, types.NoneType) or (
        isinstance(annotation, type) and issubclass(annotation, Enum)
    )
