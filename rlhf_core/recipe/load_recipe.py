"""Loads a recipe from YAML and overrides (`ppo.actor_learning_rate=5e-7`), and reports each mistake in one
sentence.

Input paths in a recipe file are relative to the file's folder. `artifacts`, paths on the command line, and
paths of a Recipe in Python are relative to the working directory. A mapping must use absolute paths. `~` and
`~user` at the start of a path are home folders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config import Recipe
from rlhf_core.config.former_names import NOTE, with_new_keys, with_new_names
from rlhf_core.recipe.consistency import inconsistencies
from rlhf_core.recipe.expand import expand
from rlhf_core.recipe.named_inputs import beside, relative_paths, with_home
from rlhf_core.recipe.sentences import WrongRecipe, everything_wrong, field_of_recipe, short, unknown
from rlhf_core.recipe.yaml_text import dump, parse
from rlhf_core.records import Config
from rlhf_core.system.proxies import proxy_of

STAGE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
DOWNLOAD_SECONDS = 30.0


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads the recipe in the YAML file `path` (or at a URI: https://, or any fsspec scheme, such as s3://)
    and applies `overrides`.

    Raises ValueError with a one-line sentence for each mistake.
    """
    shown = _shown(path)
    raw = parse(_text_of(path, shown), f"recipe {shown}")
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else type(raw).__name__
        raise ValueError(
            f"recipe {shown} must be a mapping with name, base_model and stages; it holds {found}"
        )
    if with_new_names(raw) != raw or any(map(_has_former_name, overrides)):
        _note(f"note: recipe {shown}: {NOTE}")
    local = str(path).removeprefix("file://")
    return _overridden(raw, overrides, None if "://" in local else Path(local).absolute().parent)


def _has_former_name(override: str) -> bool:
    keys = override.partition("=")[0].strip().removeprefix("stages.").split(".")
    return with_new_keys(keys, None)[0] != keys


@cache
def _note(text: str) -> None:
    """Prints a note to standard error, once per process."""
    print(text, file=sys.stderr, flush=True)


def given_recipe(given: object, overrides: object = (), stored: bool = False) -> Recipe:
    """Returns the recipe given in a flow's parameters as a Recipe, a mapping, a path or a URI. `stored`:
    whether the mapping may be a Recipe as Prefect stores it, with paths relative to the working directory.
    Raises ValueError for the same reasons as `load_recipe`."""
    texts = given_overrides(overrides)
    if isinstance(given, Recipe):
        return _overridden(given.model_dump(), texts) if texts else with_home(given)[0]
    if isinstance(given, dict):
        recipe = _overridden(given, texts)
        if not stored and (found := relative_paths(recipe)):
            told = "is relative, and a recipe given as a mapping has no folder: write an absolute path"
            raise ValueError("\n".join(f"parameter recipe: {path} {told}" for path in found))
        return recipe
    if isinstance(given, str | Path):
        return load_recipe(given, texts)
    raise ValueError(
        f"parameter recipe: give the path or URI of a YAML file, or a recipe as a mapping, not {short(given)}"
    )


def given_overrides(given: object) -> list[str]:
    """Returns the overrides in a flow's parameter. Raises ValueError if it is not a list of strings."""
    if isinstance(given, list | tuple) and all(isinstance(item, str) for item in given):
        return list(given)
    raise ValueError(
        f"parameter overrides: give a list of texts such as ppo.actor_learning_rate=5e-7, not {short(given)}"
    )


def _overridden(given: dict[Any, Any], overrides: Sequence[str], folder: Path | None = None) -> Recipe:
    raw = dict(with_new_names(given))
    wrong = list[str]()
    top, nested = split_overrides(overrides)
    for key, value in top:
        if key in Recipe.model_fields:
            raw[key] = value
        else:
            wrong.append(
                f"override {key}=...: {unknown(key, Recipe.model_fields)}; a stage's field is written"
                " <stage>.<field>=<value>"
            )
    first: WrongRecipe | None = None
    try:
        recipe = recipe_of(raw, folder, dict(top))
    except WrongRecipe as error:
        if error.rest is None or not (wrong or nested):
            raise WrongRecipe([*wrong, str(error)], error.rest) from None
        first = error
        recipe = error.rest
    whole = recipe.model_dump()
    more = list[str]()
    words: tuple[str, ...] = ()
    for keys, value in nested:
        try:
            _set(whole["stages"], keys, value, recipe.stages)
        except ValueError as error:
            more.append(str(error))
    try:
        recipe = recipe_of(whole) if nested else recipe
    except WrongRecipe as error:
        more += str(error).splitlines()
        recipe = error.rest or recipe
        words = error.wrong
    except ValueError as error:
        more += str(error).splitlines()
    wrong += [str(first), *first.further(more)] if first else more
    if wrong:
        raise WrongRecipe(wrong, recipe, words)
    return recipe


def _text_of(path: str | Path, shown: str) -> str:
    try:
        if isinstance(path, str) and "://" in path:
            return _fetch(path, shown)
        return Path(path).read_text()
    except UnicodeDecodeError:
        raise ValueError(f"recipe {shown} is not a text file; give the path of a YAML file") from None
    except OSError as error:
        # fsspec's message may consist of only the path.
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
        raise ValueError(
            f"recipe {shown}: {' '.join(str(error).split())}, or copy the recipe here and give its path"
        ) from None
    except (UnicodeDecodeError, OSError):
        raise
    except Exception as error:  # each fsspec backend raises its own classes
        raise ValueError(
            f"recipe {shown} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None


def _download(uri: str, shown: str) -> str:
    # fsspec's https client needs another package, and its errors lack the status code.
    import httpx

    try:
        answer = httpx.get(uri, timeout=DOWNLOAD_SECONDS, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"recipe {shown} cannot be read ({reason[:200]}{proxy_of(uri)}); correct the address, or give the"
            " path of a file"
        ) from None
    if not answer.is_success:
        status = f"{answer.status_code} {answer.reason_phrase}"
        raise ValueError(
            f"recipe {shown} cannot be read (the server says {status}); correct the address, or give the path"
            " of a file"
        )
    return answer.content.decode()


def _shown(path: str | Path) -> str:
    """Returns a path or URI for use in messages, without passwords and signatures."""
    text = str(path)
    return re.sub(r"://[^/@\s]+@", "://***@", text).partition("?")[0] if "://" in text else text


def recipe_of(raw: object, folder: Path | None = None, given: Collection[str] = ()) -> Recipe:
    """Returns the recipe in parsed YAML, validated. Paths are relative to `folder`, the folder of the recipe
    file, except in the fields `given`.

    Raises WrongRecipe with a one-line sentence for each mistake.
    """

    raw = with_new_names(raw)

    def placed(recipe: Recipe) -> Recipe:
        recipe, unknown_homes = with_home(recipe)
        if unknown_homes:
            raise WrongRecipe(unknown_homes, recipe)
        if folder is None:
            return recipe
        whole, problems = beside(recipe, folder, given)
        recipe = Recipe.model_validate(whole)
        if problems:
            raise WrongRecipe(problems, recipe)
        return recipe

    def check(recipe: Recipe) -> Recipe:
        recipe = placed(recipe)
        problems = inconsistencies(recipe, expand(recipe))
        if problems:
            raise WrongRecipe(problems, None)
        return recipe

    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise everything_wrong(error, raw, check) from None
    for name in recipe.stages:
        if name == "base" or not STAGE_NAME.match(name):
            raise WrongRecipe(
                [f"stages.{name}: a stage name is letters, digits, _ and -, and not 'base'; rename it"], None
            )
    return placed(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """Returns YAML that `load_recipe` reads back as an equal recipe."""
    return dump(recipe.model_dump(mode="json"))


def split_overrides(overrides: Sequence[str]) -> tuple[list[tuple[str, Any]], list[tuple[list[str], Any]]]:
    """Returns the overrides of the recipe's own fields, as (key, value), and the overrides of fields below
    `stages`, as (keys, value). Raises ValueError for malformed overrides."""
    top: list[tuple[str, Any]] = []
    nested: list[tuple[list[str], Any]] = []
    wrong: list[str] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().removeprefix("stages.").split(".")
        if not equals or not all(keys) or not name.isprintable():
            wrong.append(
                f"override {override!r}: write <stage>.<field>=<value>, for example"
                " ppo.actor_learning_rate=5e-7, or seed=1"
            )
            continue
        try:
            value = parse(text, f"override {override!r}")
        except ValueError as error:
            wrong.append(str(error))
            continue
        if len(keys) == 1:
            top.append((keys[0], value))
        else:
            nested.append(with_new_keys(keys, value))
    if wrong:
        raise WrongRecipe(wrong, None)
    return top, nested


def _set(stages: Any, keys: list[str], value: Any, parsed: Any) -> None:
    """Sets a value in `stages`, which are JSON. `parsed`: the same stages as config objects, whose mappings
    (such as `engine.options`) accept new keys."""
    here = stages
    for depth, key in enumerate(keys):
        where = ".".join(keys[:depth])
        last = depth == len(keys) - 1
        if isinstance(here, tuple | list):
            if not key.isdigit() or int(key) >= len(here):
                raise ValueError(
                    f"override {'.'.join(keys)}: {where} has {len(here)} entries, numbered from 0; there is"
                    f" no {key!r}"
                )
            index: Any = int(key)
        elif isinstance(here, dict):
            if key not in here and not (last and depth and isinstance(parsed, Mapping)):
                meant = field_of_recipe(key) if depth == 1 and last else None
                raise ValueError(
                    f"override {'.'.join(keys)}:"
                    f" {meant or unknown(key, here, 'stage' if depth == 0 else 'key')}"
                )
            index = key
        else:
            raise ValueError(
                f"override {'.'.join(keys)}: {where} is {short(here)}, which has no parts; set {where} as a"
                " whole"
            )
        if last:
            here[index] = value
        elif isinstance(here[index], tuple):
            here[index] = list(here[index])
        here = here[index]
        parsed = _part(parsed, key)


def _part(parsed: Any, key: str) -> Any:
    """Returns a part of a configuration; None where an override has replaced it with something else."""
    if isinstance(parsed, Config):
        return getattr(parsed, key, None)
    if isinstance(parsed, Mapping):
        return parsed.get(key)
    if isinstance(parsed, tuple | list) and int(key) < len(parsed):
        return parsed[int(key)]
    return None
