"""Loads a recipe from YAML and overrides (`ppo.actor_learning_rate=5e-7`), and reports each mistake in one sentence.

Paths of inputs in a recipe's file are relative to its folder; `artifacts` and all paths on the command line, or of a recipe that is no
file, to the working directory.
"""

from __future__ import annotations

import copy
import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlhf_core.config import KINDS, Data, Judge, Recipe, Source
from rlhf_core.config.rewards import RewardSource
from rlhf_core.recipe.references import beside
from rlhf_core.recipe.yaml_text import parse

STAGE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
DOWNLOAD_SECONDS = 30.0
ANYTHING = "placeholder"  # a value of a required field that is missing, for the checks behind it


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads the recipe in the YAML file `path` (or at a URI: https://, or any scheme of fsspec, such as s3://) and applies `overrides`.

    Raises ValueError: one sentence (a line) for each mistake.
    """
    shown = _shown(path)
    raw = parse(_text_of(path, shown), f"recipe {shown}")
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else type(raw).__name__
        raise ValueError(f"recipe {shown} must be a mapping with name, base_model and stages; it holds {found}")
    local = str(path).removeprefix("file://")
    return _overridden(raw, overrides, None if "://" in local else Path(local).absolute().parent)


def given_recipe(given: object, overrides: object = ()) -> Recipe:
    """Returns the recipe that a flow's parameters give: a Recipe, a mapping, or a path or URI. Raises ValueError as `load_recipe`."""
    texts = given_overrides(overrides)
    if isinstance(given, Recipe):
        return _overridden(given.model_dump(), texts) if texts else given
    if isinstance(given, dict):
        return _overridden(given, texts)
    if isinstance(given, str | Path):
        return load_recipe(given, texts)
    raise ValueError(f"parameter recipe: give the path or URI of a YAML file, or a recipe as a mapping, not {_short(given)}")


def given_overrides(given: object) -> list[str]:
    """The overrides that a flow's parameter holds. ValueError when it is no list of texts."""
    if isinstance(given, list | tuple) and all(isinstance(item, str) for item in given):
        return list(given)
    raise ValueError(f"parameter overrides: give a list of texts such as ppo.actor_learning_rate=5e-7, not {_short(given)}")


def _overridden(given: dict[Any, Any], overrides: Sequence[str], folder: Path | None = None) -> Recipe:
    raw = dict(given)
    top, nested = split_overrides(overrides)
    for key, value in top:
        if key not in Recipe.model_fields:
            raise ValueError(f"override {key}=...: {unknown(key, Recipe.model_fields)}; a stage's field is written <stage>.<field>=<value>")
        raw[key] = value
    recipe = recipe_of(raw)
    if folder is None and not nested:
        return recipe
    whole = beside(recipe, folder, dict(top)) if folder else recipe.model_dump()
    for keys, value in nested:
        _set(whole["stages"], keys, value)
    return recipe_of(whole)


def _text_of(path: str | Path, shown: str) -> str:
    try:
        if isinstance(path, str) and "://" in path:
            return _fetch(path, shown)
        return Path(path).read_text()
    except UnicodeDecodeError:
        raise ValueError(f"recipe {shown} is not a text file; give the path of a YAML file") from None
    except OSError as error:
        # fsspec's message may be the path alone.
        why = error.strerror or (str(error) if str(error) not in str(path) else "there is no such file")
        raise ValueError(f"recipe {shown}: {why}; give the path of a YAML file") from None


def _fetch(uri: str, shown: str) -> str:
    if uri.startswith(("http://", "https://")):
        return _download(uri, shown)
    import fsspec  # slow to import, and local recipes do not need it

    try:
        with fsspec.open(uri, "rt", encoding="utf-8") as file:
            return str(file.read())
    except ImportError as error:
        raise ValueError(f"recipe {shown}: {' '.join(str(error).split())}, or copy the recipe here and give its path") from None
    except (UnicodeDecodeError, OSError):
        raise
    except Exception as error:  # each fsspec backend raises its own classes
        raise ValueError(f"recipe {shown} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


def _download(uri: str, shown: str) -> str:
    # fsspec's client for https needs one more package, and its errors do not give the status code.
    import httpx

    try:
        answer = httpx.get(uri, timeout=DOWNLOAD_SECONDS, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"recipe {shown} cannot be read ({reason[:200]}); correct the address, or give the path of a file") from None
    if not answer.is_success:
        status = f"{answer.status_code} {answer.reason_phrase}"
        raise ValueError(f"recipe {shown} cannot be read (the server says {status}); correct the address, or give the path of a file")
    return answer.content.decode()


def _shown(path: str | Path) -> str:
    """Returns a path or URI for messages, without a password or a signature."""
    text = str(path)
    return re.sub(r"://[^/@\s]+@", "://***@", text).partition("?")[0] if "://" in text else text


def recipe_of(raw: object) -> Recipe:
    """Validates the parsed YAML of a recipe. Raises ValueError: one sentence (a line) for each mistake."""
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        told = sentences(error, raw)
        raise ValueError("\n".join([*told, *_checks_behind(error, raw, told)])) from None
    for name in recipe.stages:
        if name == "base" or not STAGE_NAME.match(name):
            raise ValueError(f"stages.{name}: a stage name is letters, digits, _ and -, and not 'base'; rename it")
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Returns YAML that `load_recipe` reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def sentences(error: ValidationError, raw: object) -> list[str]:
    """Returns one sentence for each error of pydantic: where, what, what to do. `raw` is the value that was validated."""
    found: list[str] = []
    for item in error.errors():
        where, names = ".".join(str(part) for part in _place(item["loc"])), _place(item["loc"])
        match item["type"]:
            case "extra_forbidden":
                found.append(f"{where}: {unknown(str(names[-1]), _fields(names[:-1], raw))}")
            case "missing":
                info = _fields(names[:-1], raw).get(names[-1])
                meaning = f" ({info.description})" if info is not None and info.description else ""
                found.append(f"{where}: missing{meaning}; add it")
            case "too_short" if any(other["loc"][: len(item["loc"])] == item["loc"] for other in error.errors() if other != item):
                continue  # its wrong items have sentences of their own
            case _ if item["type"] == "invalid_key" or names[-1:] == ["[key]"]:
                holder = ".".join(str(part) for part in names[: -2 if names[-1] == "[key]" else -1]) or "recipe"
                told = "no text: put it in quotes (YAML reads on, off, yes and no as true and false)"
                found.append(f"{holder}: the key {item['input']!r} is {told}")
            case "union_tag_not_found" if names[:1] == ["stages"] and len(names) == 2:
                found.append(f"{where}: say which stage it is with `stage:`, one of {', '.join(KINDS)}")
            case "union_tag_invalid":
                valid = tuple(KINDS) if len(names) == 2 else TAGS[str(names[-2])]
                key = "stage" if len(names) == 2 else "kind"
                found.append(f"{where}: {key}: {unknown(str(item['ctx']['tag']), valid, 'value')}")
            case "model_type" | "model_attributes_type" | "dict_type":
                keys = ", ".join(_fields(names, raw))
                found.append(f"{where}: must be a mapping{f' ({keys})' if keys else ''}, not {_short(item['input'])}; correct it")
            case "value_error":
                found += [f"{where}: {line}" if where else line for line in str(item["ctx"]["error"]).splitlines()]
            case _:
                told = item["msg"][0].lower() + item["msg"][1:].removesuffix(" after validation, not 0")
                told = told.replace("tuple", "list").replace("dictionary", "mapping")
                found.append(f"{where}: {told}, not {_short(item['input'])}; correct it")
    return found


def _checks_behind(error: ValidationError, raw: object, told: Sequence[str]) -> list[str]:
    """Returns the sentences of checks that wrong keys, wrong values and missing ones in `error` keep from running, but those that name one
    of these: what the recipe without the former, and with some value for the latter, is refused for."""
    rest, wrong = copy.deepcopy(raw), {ANYTHING}
    for item in error.errors():
        *path, last = _place(item["loc"]) or [""]
        holder: Any = rest
        for name in path:
            holder = _part(holder, name)
        if item["type"] != "value_error" and isinstance(holder, dict) and last in holder:
            del holder[last]
            wrong |= {str(last), *difflib.get_close_matches(str(last), map(str, _fields(path, raw)))}
        elif item["type"] == "missing" and isinstance(holder, dict) and (info := _fields(path, raw).get(last)) is not None:
            shapes = {Data: {"sources": ANYTHING}, Source: {"path": ANYTHING}}
            several = typing.get_origin(info.annotation) is tuple
            holder[last] = [ANYTHING] if several else next((shapes[m] for m in models_in(info.annotation) if m in shapes), ANYTHING)
            wrong.add(str(last))
    try:
        Recipe.model_validate(rest)
    except ValidationError as further:
        return [sentence for sentence in sentences(further, rest) if sentence not in told and not wrong & set(re.findall(r"\w+", sentence))]
    return []


def unknown(name: str, valid: Iterable[str], what: str = "key") -> str:
    """Returns `unknown key 'x'; did you mean y?`, or with all valid names when none is close. `what` replaces "key"."""
    valid = list(valid)
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.6) or [other for other in valid if other.lower() == name.lower()]
    return f"unknown {what} {name!r}; " + (f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(valid) or 'none'}")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the pydantic models in an annotation, through unions, tuples and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


# Fields that hold a union of records, and the kinds of each.
UNIONS = {"judges": Judge, "reward": RewardSource}
TAGS = {field: tuple(model.model_fields["kind"].default for model in models_in(union)) for field, union in UNIONS.items()}


def split_overrides(overrides: Sequence[str]) -> tuple[list[tuple[str, Any]], list[tuple[list[str], Any]]]:
    """The recipe's own fields with their values, and what lies below `stages` as keys and value. ValueError for what is no override."""
    top: list[tuple[str, Any]] = []
    nested: list[tuple[list[str], Any]] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().removeprefix("stages.").split(".")
        if not equals or not all(keys) or not name.isprintable():
            raise ValueError(f"override {override!r}: write <stage>.<field>=<value>, for example ppo.actor_learning_rate=5e-7, or seed=1")
        value = parse(text, f"override {override!r}")
        if len(keys) == 1:
            top.append((keys[0], value))
        else:
            nested.append((keys, value))
    return top, nested


def _set(stages: Any, keys: list[str], value: Any) -> None:
    here = stages
    for depth, key in enumerate(keys):
        where, last = ".".join(keys[:depth]), depth == len(keys) - 1
        if isinstance(here, tuple | list):
            if not key.isdigit() or int(key) >= len(here):
                raise ValueError(f"override {'.'.join(keys)}: {where} has {len(here)} entries, numbered from 0; there is no {key!r}")
            index: Any = int(key)
        elif isinstance(here, dict):
            if key not in here:
                raise ValueError(f"override {'.'.join(keys)}: {unknown(key, here, 'stage' if depth == 0 else 'key')}")
            index = key
        else:
            raise ValueError(f"override {'.'.join(keys)}: {where} is {_short(here)}, which has no parts; set {where} as a whole")
        if last:
            here[index] = value
        elif isinstance(here[index], tuple):
            here[index] = list(here[index])
        here = here[index]


def _place(loc: tuple[int | str, ...]) -> list[int | str]:
    """Returns the place of an error in the recipe: `loc` without the tags that pydantic puts between a union and its member."""
    parts = list(loc)
    if len(parts) > 2 and parts[0] == "stages" and parts[2] in KINDS:
        del parts[2]
    return [
        part for i, part in enumerate(parts) if not (i >= 2 and part in TAGS.get(str(parts[i - 2]), ()) and isinstance(parts[i - 1], int))
    ]


def _fields(names: list[int | str], raw: Any) -> dict[Any, Any]:
    """Returns the fields of the record at a place of the recipe; {} when its type is not known."""
    models: list[type[BaseModel]] = [Recipe]
    keyed = False
    for depth, name in enumerate(names):
        raw = _part(raw, name)
        if names[0] == "stages" and depth == 0:
            models = []
        elif names[0] == "stages" and depth == 1:
            kind = raw.get("stage", name) if isinstance(raw, dict) else name
            models = [KINDS[str(kind)].config] if kind in KINDS else []
        elif keyed:
            keyed = False  # `name` is a user's key in a mapping of records, whose value is the record
        elif isinstance(name, str):
            annotation = models[0].model_fields[name].annotation if models and name in models[0].model_fields else None
            models, keyed = models_in(annotation), typing.get_origin(annotation) is dict
        if len(models) > 1:  # judges, rewards: the record's `kind` selects the class
            models = [m for m in models if isinstance(raw, dict) and m.model_fields["kind"].default == raw.get("kind")] or models
    return {key: info for model in reversed(models) for key, info in model.model_fields.items()}


def _part(whole: Any, name: int | str) -> Any:
    if isinstance(whole, dict):
        return whole.get(name)
    return whole[name] if isinstance(whole, list | tuple) and isinstance(name, int) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
