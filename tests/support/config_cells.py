"""Generates wrong values for every field of every config class, from the pydantic models alone.

`places` finds each class once in a recipe that is right; `cells` lists values for the fields of a class.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ValidationError

from rlhf_core.config import KINDS, Gate, Recipe
from rlhf_core.config.kinds import metrics_of
from rlhf_core.recipe.expand import expand
from rlhf_core.recipe.named_inputs import references
from rlhf_core.recipe.sentences import models_in
from tests.support.allowed_values import allows, beyond

NAME = "org/name"  # a model, a data set, or any other text
# values that are right for some type and bound
SAMPLES = (NAME, "name", "file.py:function", "http://host", 1, 2, 0.25, True, "48h", "USD")
VALUES: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "NaN": math.nan,
    "infinity": math.inf,
    "-infinity": -math.inf,
    "empty text": "",
    "text": "some words",
    "number": 7,
    "negative": -7,
    "fraction": 1.5,
    "huge": 10**400,
    "empty list": [],
    "empty mapping": {},
}
Path = tuple[str | int, ...]


class Place(NamedTuple):
    """A config class, and where it is in a recipe."""

    model: type[BaseModel]
    path: Path
    recipe: dict[str, Any]

    @property
    def name(self) -> str:
        """The place as messages name it."""
        return ".".join(map(str, self.path))

    def having(self, field: str, value: Any) -> dict[str, Any]:
        """Returns the recipe with another value in one field of the class."""
        return _put(self.recipe, (*self.path, field), value)


class Cell(NamedTuple):
    """A value for a field. `allowed`: whether its type allows it; None: a validator of the field's own reads
    it before."""

    field: str
    what: str
    value: Any
    allowed: bool | None


def places() -> list[Place]:
    """Returns each config class with its first place in a recipe."""
    found: dict[type[BaseModel], Place] = {}
    for kind in KINDS:
        stages = {kind: minimal(KINDS[kind].config)}
        if kind == "select":  # it chooses among stages that an evaluation judges
            stages[kind]["of"] = ["sft", "dpo"]
            stages["evaluation"] = minimal(KINDS["evaluation"].config) | {
                "models": ["sft", "dpo"],
                "baseline": NAME,
            }
        recipe = _complete({"name": "r", "base_model": NAME, "stages": stages})
        left = [Place(Recipe, (), recipe), Place(KINDS[kind].config, ("stages", kind), recipe)]
        while left:
            place = left.pop(0)
            if place.model not in found:
                found[place.model] = place
                left += [
                    inner
                    for field in place.model.model_fields
                    if field != "stages"
                    for inner in _inside(place, field)
                ]
    return list(found.values())


def cells(model: type[BaseModel]) -> Iterator[Cell]:
    """Yields all values for all fields of a class."""
    finite = not model.model_config.get("allow_inf_nan")
    validators = [found.info for found in model.__pydantic_decorators__.field_validators.values()]
    first = {name for found in validators if found.mode == "before" for name in found.fields}
    for field, info in model.model_fields.items():
        own = field in first or any(isinstance(item, BeforeValidator) for item in info.metadata)
        for what, value in {**VALUES, **beyond(info.annotation, info.metadata)}.items():
            yield Cell(
                field, what, value, None if own else allows(info.annotation, info.metadata, value, finite)
            )
        yield Cell(f"{field}_", "unknown key", 1, False)


def minimal(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the smallest mapping that a class accepts: its required fields, and optional ones where its own
    checks ask for more."""
    fields = model.model_fields
    body = {
        name: _sample(info.annotation, info.metadata) for name, info in fields.items() if info.is_required()
    }
    body |= {
        name: fields[name].default for name in ("stage", "kind") if name in fields and fields[name].default
    }
    # a text whose own check asks for a file
    texts = [{name: "file.py:function"} for name, value in body.items() if value == NAME]
    texts += [
        {name: {"sources": "name.inbox"}}
        for name, value in body.items()
        if isinstance(value, dict) and "sources" in value
    ]
    optional = [
        {},
        *texts,
        *(
            {name: _sample(info.annotation, info.metadata)}
            for name, info in fields.items()
            if name not in body
        ),
    ]
    return next(body | more for more in optional if _accepts(model, body | more))


def _accepts(model: type[BaseModel], body: dict[str, Any]) -> bool:
    try:
        model.model_validate(body)
    except ValidationError:
        return False
    return True


def _sample(annotation: Any, bounds: list[Any]) -> Any:
    """Returns a value that a type allows, not None where there is another."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        return _sample(parts[0], [*parts[1:], *bounds])
    if origin in (Union, UnionType):
        return _sample(parts[0], bounds)
    if origin is Literal:
        return parts[0]
    if origin is tuple:
        return [_sample(part, []) for part in parts if part is not Ellipsis]
    if origin is dict:
        return {NAME: _sample(parts[1], [])}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return minimal(annotation)
    return next(value for value in SAMPLES if allows(annotation, bounds, value))


def _inside(place: Place, field: str) -> Iterator[Place]:
    """Yields the places of the classes that a field holds, alone, in a list or by name."""
    annotation = place.model.model_fields[field].annotation
    for model in models_in(annotation):
        inner = minimal(model)
        held = _sample(annotation, [])
        if model is Gate:  # its metric is checked against those of its stage
            inner = {
                "metric": next(iter(metrics_of(place.model.model_validate(minimal(place.model)))), NAME),
                "min": 1,
            }
        step: Path = (0,) if isinstance(held, list) else (NAME,) if NAME in held else ()
        whole = place.having(field, [inner] if step == (0,) else {NAME: inner} if step else inner)
        if _accepts(Recipe, whole):
            yield Place(model, (*place.path, field, *step), _complete(whole))


def _complete(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe with the stages that its defaults name and it lacks."""
    while True:
        stages = expand(Recipe.model_validate(recipe)).stages
        missing = {
            name
            for config in stages.values()
            for _, name, _ in references(config)
            if name in KINDS and name not in stages
        }
        if not missing:
            return recipe
        recipe = {
            **recipe,
            "stages": {**recipe["stages"], **{kind: minimal(KINDS[kind].config) for kind in sorted(missing)}},
        }


def _put(whole: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    changed = copy.copy(whole)
    changed[path[0]] = _put(whole[path[0]] if len(path) > 1 else None, path[1:], value)
    return changed
