"""Loads the recipe of a run, and checks that a run of a deployment has the deployment's recipe, and more overrides of settings only.

`alignflow serve` writes the deployments' parameters to a file and gives its path to their runs; no request to the API changes it.
A worker of another Prefect server reads them from it: users who can change deployments there can run code, users who create runs cannot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client

from rlhf_core.config import Recipe
from rlhf_core.recipe.load import given_overrides, given_recipe
from rlhf_core.recipe.served import require_settings

SERVED_ENV = "ALIGNFLOW_SERVED"


_loaded: dict[str, Recipe] = {}  # by flow run


def recipe_of_run(given: object, overrides: object, run: UUID | str | None, deployment: UUID | str | None) -> Recipe:
    """Returns the recipe of a flow run, as `own_recipe`. A process reads it once for each run."""
    if str(run) not in _loaded:
        _loaded[str(run)] = own_recipe(given, overrides, deployment)
    return _loaded[str(run)]


def own_recipe(given: object, overrides: object, deployment: UUID | str | None) -> Recipe:
    """Returns the recipe in a run's parameters. `deployment`: the run's, if it has one.

    Raises ValueError for another recipe than the deployment's, before reading it, for an override of no setting, and as `given_recipe`.
    """
    if deployment is None:
        return given_recipe(given, overrides)
    own = _own_parameters(str(deployment))
    if given is None or given != own[0].get("recipe"):
        raise ValueError(
            f"parameter recipe: a run of this deployment has the deployment's own recipe, {str(own[0].get('recipe'))[:200]}: leave the "
            "parameter out, or make a deployment of the other recipe (`alignflow serve`)"
        )
    texts = given_overrides(overrides)
    known = {override for parameters in own for override in parameters.get("overrides") or ()}
    more = [override for override in texts if override not in known]
    if more:
        require_settings(given_recipe(given, own[0].get("overrides") or ()), more)
    loaded = given_recipe(given, texts)
    require_settings(loaded, more)  # again: the deployment's overrides can change which fields there are
    return loaded


def _own_parameters(deployment: str) -> Sequence[Mapping[str, Any]]:
    """Returns a deployment's own parameters and those of its schedules."""
    if place := os.environ.get(SERVED_ENV):
        served = json.loads(Path(place).read_text())
        if deployment not in served:
            raise ValueError("`alignflow serve` has not made this deployment: give it the recipe, and run the deployment that it makes")
        return [served[deployment]]
    with get_client(sync_client=True) as client:
        found = client.read_deployment(UUID(deployment))
    return [found.parameters, *(schedule.parameters for schedule in found.schedules)]
