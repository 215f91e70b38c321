"""Generates the page of all config fields (docs/reference/config.md) from the config classes."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhf_core.config import KINDS, Recipe
from rlhf_core.recipe.sentences import models_in
from rlhf_core.system.markdown_table import table


def config_page() -> str:
    """Returns every field of a recipe as markdown: name, type, default, meaning. A field shared by several
    classes is listed once."""
    parts: dict[str, type[BaseModel]] = {}
    pages = [_section("Recipe", Recipe, parts)]
    written: set[str] = set()
    for stage, kind in KINDS.items():
        pages.append(_section(f"Stage `{stage}`", kind.config, parts))
        for group in _own_groups(kind.config):
            written.add(group.__name__)
            pages.append(_section(group.__name__, group, parts))
    while rest := [name for name in parts if name not in written]:
        for name in rest:
            written.add(name)
            pages.append(_section(name, parts[name], parts))
    head = (
        "# Configuration\n\nMade by `alignflow config-docs` from `rlhf_core/config/`. A field without a"
        " default must be given.\n"
    )
    return "\n".join([head, *pages])


def _own_groups(config: type[BaseModel]) -> list[type[BaseModel]]:
    """Returns the base classes whose fields only this stage kind has, lowest first."""
    configs = [kind.config for kind in KINDS.values()]
    groups = []
    for base in reversed(config.__bases__):
        users = [other for other in configs if issubclass(other, base)]
        if users == [config]:
            groups.append(base)
    return groups


def _section(title: str, model: type[BaseModel], parts: dict[str, type[BaseModel]]) -> str:
    about = [_text(model.__doc__), ""] if model.__doc__ else []
    bases = [base for base in model.__bases__ if issubclass(base, BaseModel) and base.model_fields]
    stages = {kind.config: name for name, kind in KINDS.items()}  # they have their own sections
    for base in bases:
        if base not in stages:
            parts.setdefault(base.__name__, base)
    if bases:
        links = (
            f"[{base.__name__}](#{f'stage-{stages[base]}' if base in stages else base.__name__.lower()})"
            for base in bases
        )
        about += [f"Also has the fields of {', '.join(links)}.", ""]
    rows = []
    for name, info in model.model_fields.items():
        if name not in model.__annotations__:
            continue
        for part in models_in(info.annotation) if name != "stages" else ():
            parts.setdefault(part.__name__, part)
        kind = "stages by name" if name == "stages" else _text(_type_text(info.annotation))
        rows.append((f"`{name}`", kind, _default(info), _text(info.description or "")))
    fields = [table(("field", "type", "default", "meaning"), rows)] if rows else []
    return "\n".join([f"## {title}\n", *about, *fields])


def _type_text(annotation: Any) -> str:
    """Returns a type as text for recipe authors, without module names, constraints or names from `typing`."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation is Ellipsis:
        return "..."
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return " / ".join(repr(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type_text(argument) for argument in arguments)
    name = "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(map(_type_text, arguments))}]" if arguments else name


def _default(info: FieldInfo) -> str:
    value: Any = info.default
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        return ", ".join(f"`{type(item).__name__}`" for item in value)
    return "none" if value is None else f"`{_text(str(value))}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("{}", "`{}`")
