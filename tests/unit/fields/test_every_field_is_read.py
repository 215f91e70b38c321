"""Every field of a recipe has a reader outside of the checks of its own class: code that reads an attribute
of this name.

A name that other classes have, too, says little: such a field has a probe in test_every_field_acts.py, or its
reader in READERS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from rlhf_core.config import KINDS, Recipe
from rlhf_core.recipe.sentences import models_in
from tests.unit.fields.readers import READERS
from tests.unit.fields.test_every_field_acts import CHANGES

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "rlhf_core" / "config"
CHECKS = ("check", "field_validator", "model_validator")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def config_classes() -> list[type[BaseModel]]:
    """Returns the classes of a recipe: its own, those of all kinds of stages, and every record in them."""
    found: list[type[BaseModel]] = []
    left: list[type[BaseModel]] = [Recipe, *(kind.config for kind in KINDS.values())]
    while left:
        model = left.pop(0)
        if model not in found:
            found.append(model)
            left += [
                record for field in model.model_fields.values() for record in models_in(field.annotation)
            ]
    return found


@cache
def parsed() -> dict[Path, ast.Module]:
    files = [
        file
        for folder in ("rlhf_core", "evaluation", "tasks", "flows")
        for file in (ROOT / folder).rglob("*.py")
    ]
    # reads fields only to say what they do to each other
    files.remove(ROOT / "rlhf_core" / "recipe" / "idle_fields.py")
    return {file: ast.parse(file.read_text()) for file in files}


def attributes(tree: ast.AST) -> Iterator[str]:
    """Yields the names of the attributes that code reads, also by a constant name of `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            yield from (
                str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)
            )


def _is_check(function: Function) -> bool:
    called = [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for decorator in function.decorator_list
    ]
    return any(isinstance(name, ast.Name) and name.id in CHECKS for name in called)


@cache
def read_outside() -> frozenset[str]:
    """Returns the names that code outside of the config reads, and those that it reads through functions and
    properties of the config."""
    found = {
        name for file, tree in parsed().items() if CONFIG not in file.parents for name in attributes(tree)
    }
    called = {
        node.id
        for file, tree in parsed().items()
        if CONFIG not in file.parents
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
    }
    functions = [
        node
        for file, tree in parsed().items()
        if CONFIG in file.parents
        for node in ast.walk(tree)
        if isinstance(node, Function) and not _is_check(node)
    ]
    while True:
        more = {
            name for node in functions if node.name in found | called for name in attributes(node)
        } - found
        if not more:
            return frozenset(found)
        found |= more


@cache
def other_names() -> frozenset[str]:
    """Returns the names that classes outside of the config give to their own attributes and methods."""
    found: set[str] = set()
    for file, tree in parsed().items():
        if CONFIG in file.parents:
            continue
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            found |= {part.name for part in node.body if isinstance(part, Function)}
            found |= {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }
            stored = (
                part
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            )
            found |= {part.attr for part in stored}
    return frozenset(found)


def fields() -> Iterator[tuple[type[BaseModel], str]]:
    """Yields each field once, with the class that defines it."""
    seen = set()
    for model in config_classes():
        for name in model.model_fields:
            owner = next(
                base for base in reversed(model.__mro__) if name in vars(base).get("__annotations__", {})
            )
            if (owner, name) not in seen:
                seen.add((owner, name))
                if not _has_one_value(owner, name):
                    yield owner, name


def _has_one_value(model: type[BaseModel], name: str) -> bool:
    """Whether there is no other value for a field, such as `stage` and `kind`."""
    annotation = model.model_fields[name].annotation
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def test_every_field_is_read() -> None:
    unread = [f"{owner.__name__}.{name}" for owner, name in fields() if name not in read_outside()]
    assert not unread, "nothing reads these fields: let them act, or delete them"


def test_a_field_with_a_common_name_has_a_probe_or_a_named_reader() -> None:
    probed = {change.field for changes in CHANGES.values() for change in changes}
    common = {
        f"{owner.__name__}.{name}" for owner, name in fields() if name in other_names() and name not in probed
    }
    assert common - {"Gated.stage"} <= set(READERS), sorted(common - set(READERS))
    assert set(READERS) <= {f"{owner.__name__}.{name}" for owner, name in fields()}, (
        "a field of this name is gone"
    )


def test_the_named_readers_read_their_field() -> None:
    for field, (file, text) in READERS.items():
        assert text in (ROOT / file).read_text(), f"{field}: {file} has no longer {text}"
        assert field.partition(".")[2] in text
