"""Decides from a field's annotation and bounds whether it allows a value of YAML. Independent of pydantic's
own validation."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def allows(annotation: Any, bounds: list[Any], value: Any, finite: bool = True) -> bool:
    """Whether a type with its bounds allows a value. `finite`: NaN and infinity are no numbers."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    bounds = [
        inner for bound in bounds for inner in (bound.metadata if isinstance(bound, FieldInfo) else [bound])
    ]
    if origin is Annotated:
        return allows(parts[0], [*parts[1:], *bounds], value, finite)
    if origin in (Union, UnionType):
        return any(allows(part, bounds, value, finite) for part in parts)
    return _is_a(annotation, origin, parts, value, finite) and (
        value is None or all(_within(bound, value) for bound in bounds)
    )


def _is_a(annotation: Any, origin: Any, parts: tuple[Any, ...], value: Any, finite: bool) -> bool:
    if annotation is Any:
        return True
    if annotation in (bool, str, NoneType):
        return isinstance(value, annotation)
    if annotation is int:
        return type(value) is int or (type(value) is float and value.is_integer())
    if annotation is float:
        return (type(value) in (int, float) and abs(value) < 2**1024) or (not finite and type(value) is float)
    if origin is Literal:
        return any(type(part) is type(value) and part == value for part in parts)
    if origin is tuple:
        kinds = parts[:1] * len(value) if isinstance(value, list) and parts[-1] is Ellipsis else parts
        same = isinstance(value, list) and len(value) == len(kinds)
        return same and all(allows(kind, [], item, finite) for kind, item in zip(kinds, value, strict=True))
    if origin is dict:
        return isinstance(value, dict) and all(allows(parts[1], [], item, finite) for item in value.values())
    assert issubclass(annotation, BaseModel), (
        f"{annotation}: write here which values of YAML this type allows"
    )
    needed = [name for name, info in annotation.model_fields.items() if info.is_required()]
    return isinstance(value, dict) and not needed and value.keys() <= annotation.model_fields.keys()


def _within(bound: Any, value: Any) -> bool:
    match bound:
        case Gt(gt=limit):
            return bool(value > limit)
        case Ge(ge=limit):
            return bool(value >= limit)
        case Lt(lt=limit):
            return bool(value < limit)
        case Le(le=limit):
            return bool(value <= limit)
        case MinLen(min_length=limit):
            return len(value) >= limit
        case MaxLen(max_length=limit):
            return len(value) <= limit
    pattern = getattr(bound, "pattern", None)
    return pattern is None or re.search(pattern, value) is not None


def beyond(annotation: Any, bounds: list[Any]) -> dict[str, Any]:
    """Returns values just outside of each bound of a field."""
    found: dict[str, Any] = {}
    for part in [
        part for part in get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated)
    ]:
        found |= beyond(part, [])
    for bound in bounds:
        inner = bound.metadata if isinstance(bound, FieldInfo) else []
        found |= beyond(None, inner) if inner else {}
        match bound:
            case Gt(gt=limit):
                found["at the lower bound"] = limit
            case Ge(ge=limit):
                found["below the lower bound"] = limit - 1
            case Lt(lt=limit):
                found["at the upper bound"] = limit
            case Le(le=limit):
                found["above the upper bound"] = limit + 1
            case MaxLen(max_length=limit):
                found["too long"] = "a" * (limit + 1)
    return found
