"""Builds the variants of a stage, one for each combination of the values that its `sweep` lists, and
configures the stage that selects one of them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from rlhf_core.config.gates import Gated
from rlhf_core.records import NotInDigest

MOST = 64  # at most this many variants of one stage
Value = bool | int | float | str
Stage = TypeVar("Stage", bound=Gated)


class Select(Gated):
    """Selects the best of several models according to an evaluation, or the simplest model that is not shown
    to be worse."""

    stage: Literal["select"] = "select"
    of: typing.Annotated[
        tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
    ] = Field(
        description="a swept stage, or a list of stages: the models to choose from, the simplest first",
        min_length=1,
    )
    by: str = Field("evaluation", description="the evaluation that judged the models")
    metric: Literal["win_rate"] = Field(
        "win_rate",
        description="metric to compare: the win rate by the evaluation's first judge; a tie counts half",
    )
    simplest: str | None = Field(
        None,
        description="the model to take when it is not shown to be worse than the best; default: the first",
    )


def variants(config: Stage, sweep: dict[str, tuple[Value, ...]]) -> dict[str, Stage]:
    """Returns a stage's variants by name suffix, such as `beta=0.1` or `beta=0.1,loss=ipo`, in the order of
    the lists.

    Raises ValidationError when a value does not fit its field.
    """
    plain = config.model_dump(exclude={"sweep"})
    found = dict[str, Stage]()
    for values in product(*sweep.values()):
        variant = type(config).model_validate({**plain, **dict(zip(sweep, values, strict=True))})
        found[",".join(f"{field}={_shown(getattr(variant, field))}" for field in sweep)] = variant
    return found


def sweep_mistakes(config: Gated, sweep: dict[str, tuple[Value, ...]]) -> Iterator[str]:
    """Yields a sentence for each mistake of a stage's `sweep`."""
    fields = {
        name for name, field in type(config).model_fields.items() if name != "stage" and _can_vary(field)
    }
    wrong = [name for name in sweep if name not in fields]
    yield from (
        f"sweep.{name} is not a field of {config.stage} that affects its result and holds a number or a"
        " choice: name such a field"
        for name in wrong
    )
    few = [name for name, values in sweep.items() if len(values) < 2]
    yield from (
        f"sweep.{name} has {len(sweep[name])} value: give two or more, or set the field itself"
        for name in few
    )
    count = prod(map(len, sweep.values()))
    if count > MOST:
        yield f"sweep has {count} combinations: give at most {MOST}"
    elif not wrong:
        try:
            found = variants(config, sweep)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            told = first["msg"].removeprefix("Value error, ")
            yield f"sweep: {where}: {told}".replace(": :", ":")
            return
        if len(found) < count:
            yield "sweep lists a value twice: give each value of a field once"


def _can_vary(field: FieldInfo) -> bool:
    return NotInDigest not in field.metadata and _is_plain(field.annotation)


def _is_plain(annotation: Any) -> bool:
    """Returns whether a field holds a single number, switch or choice, or None."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _is_plain(parts[0])
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_plain, parts))
    return origin is typing.Literal or annotation in (int, float, bool, types.NoneType)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
