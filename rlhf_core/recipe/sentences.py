"""Describes each mistake that pydantic finds in a recipe in one sentence, with its place and the
correction."""

from __future__ import annotations

import copy
import difflib
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhf_core.config import KINDS, Data, FallibleJudge, Judge, Recipe, Source
from rlhf_core.config.outside_kinds import UNUSABLE
from rlhf_core.config.rewards import RewardSource

ANYTHING = "placeholder"  # stands for a missing required value, so that later checks can run


def sentences(error: ValidationError, raw: object) -> list[str]:
    """Returns one sentence for each pydantic error, with its place, the mistake and the correction. `raw`:
    the value that was validated."""
    found: list[str] = []
    for item in error.errors():
        where = ".".join(str(part) for part in _place(item["loc"]))
        names = _place(item["loc"])
        match item["type"]:
            case "extra_forbidden":
                is_of_stage = names[0] == "stages" and len(names) == 3
                meant = _start_field(names, raw) or (field_of_recipe(str(names[-1])) if is_of_stage else None)
                found.append(f"{where}: {meant or unknown(str(names[-1]), _fields(names[:-1], raw))}")
            case "missing":
                info = _fields(names[:-1], raw).get(names[-1])
                meaning = f" ({info.description})" if info is not None and info.description else ""
                found.append(f"{where}: missing{meaning}; add it")
            case "too_short" if any(
                other["loc"][: len(item["loc"])] == item["loc"] for other in error.errors() if other != item
            ):
                continue  # its wrong items get their own sentences
            case _ if item["type"] == "invalid_key" or names[-1:] == ["[key]"]:
                holder = (
                    ".".join(str(part) for part in names[: -2 if names[-1] == "[key]" else -1]) or "recipe"
                )
                told = "is no text: put it in quotes (YAML reads true, null and 1 as other things)"
                if item["type"] == "string_pattern_mismatch":
                    told = f"does not match {item['ctx']['pattern']}: rename it"
                found.append(f"{holder}: the key {item['input']!r} {told}")
            case "union_tag_not_found" if names[:1] == ["stages"] and len(names) == 2:
                found.append(f"{where}: say which stage it is with `stage:`, one of {', '.join(KINDS)}")
            case "union_tag_invalid" if len(names) == 2 and str(item["ctx"]["tag"]) in UNUSABLE:
                found.append(f"{where}: {UNUSABLE[str(item['ctx']['tag'])]}")
            case "union_tag_invalid":
                valid = (
                    tuple(KINDS)
                    if len(names) == 2
                    else TAGS[str(names[-2] if isinstance(names[-1], int) else names[-1])]
                )
                key = "stage" if len(names) == 2 else "kind"
                found.append(f"{where}: {key}: {unknown(str(item['ctx']['tag']), valid, 'value')}")
            case "model_type" | "model_attributes_type" | "dict_type":
                fields = _fields(names, raw)
                given = short(item["input"])
                first = next(
                    (key for key in ("sources", "path") if key in fields and isinstance(item["input"], str)),
                    None,
                )
                keys = f" ({', '.join(fields)})" if fields else ""
                instead = f"write {{ {first}: {item['input']} }}" if first else "correct it"
                found.append(f"{where}: must be a mapping{keys}, not {given}; {instead}")
            case "value_error":
                found += [
                    f"{where}: {line}" if where else line for line in str(item["ctx"]["error"]).splitlines()
                ]
            case _:
                told = item["msg"][0].lower() + item["msg"][1:].removesuffix(" after validation, not 0")
                told = told.replace("tuple", "list").replace("dictionary", "mapping")
                found.append(f"{where}: {told}, not {short(item['input'])}; correct it")
    return found


class WrongRecipe(ValueError):
    """Raised for a wrong recipe, with one sentence per line. `rest`: the recipe without the mistakes, for
    further checks, or None. Sentences of these checks that contain a word in `wrong` may be consequences of
    the mistakes."""

    def __init__(self, told: Iterable[str], rest: Recipe | None, wrong: Iterable[str] = ()):
        super().__init__("\n".join(told))
        self.rest = rest
        self.wrong = tuple(wrong)
        self._named = re.compile(
            "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in self.wrong) or r"\b\B"
        )

    def further(self, problems: Iterable[str]) -> list[str]:
        """Returns the problems of `rest` that are not consequences of the mistakes."""
        return [problem for problem in problems if not self._named.search(problem)]


def everything_wrong(error: ValidationError, raw: object, check: Callable[[Recipe], Recipe]) -> WrongRecipe:
    """Returns the mistakes in `error` and the mistakes that it hides, which only later checks of the same
    records or `check` would find. `check` resolves the input paths of a valid recipe and raises ValueError
    for inconsistencies between its stages. To find hidden mistakes, removes invalid keys, invalid values and
    stages that remain invalid, and fills in missing values."""
    told = sentences(error, raw)
    rest, wrong = _without_faults(error, raw)
    valid = None
    reduced: dict[str, int] = {}  # number of reductions by stage
    for _ in range(6):
        if not _part(rest, "stages"):
            break
        failed: dict[str, list[str]] = {}  # sentences by stage
        try:
            further = []
            valid = Recipe.model_validate(rest)
            valid = check(valid)
        except ValidationError as later:
            further = sentences(later, rest)
            failed = _by_stage(later, rest)
        except ValueError as unfit:
            further = str(unfit).splitlines()
            valid = getattr(unfit, "rest", None)
        # reduced to its inputs, a stage may lack the fields that they need: its own checks only find
        # consequences
        silent = {line for name, lines in failed.items() if reduced.get(name) == 2 for line in lines}
        further = [line for line in further if line not in silent]
        told += [each for each in WrongRecipe((), None, wrong).further(further) if each not in told]
        if not failed:
            break
        for name, lines in failed.items():
            wrong |= _reduce(rest["stages"], name, lines, reduced.get(name, 0))
            reduced[name] = reduced.get(name, 0) + 1
    return WrongRecipe(told, valid, wrong)


def _without_faults(error: ValidationError, raw: object) -> tuple[Any, set[str]]:
    """Returns the recipe without wrong keys and values and with placeholders for missing values, and the
    words by which sentences would name any of these."""
    rest = copy.deepcopy(raw)
    wrong = {ANYTHING}
    for item in error.errors():
        *path, last = _place(item["loc"]) or [""]
        holder: Any = rest
        for name in path:
            holder = _part(holder, name)
        if item["type"] != "value_error" and isinstance(holder, dict) and last in holder:
            del holder[last]
            wrong |= {str(last), *difflib.get_close_matches(str(last), map(str, _fields(path, raw)))}
        elif (
            item["type"] == "missing"
            and isinstance(holder, dict)
            and (info := _fields(path, raw).get(last)) is not None
        ):
            shapes = {Data: {"sources": ANYTHING}, Source: {"path": ANYTHING}}
            several = typing.get_origin(info.annotation) is tuple
            holder[last] = (
                [ANYTHING]
                if several
                else next((shapes[m] for m in models_in(info.annotation) if m in shapes), ANYTHING)
            )
            wrong.add(str(last))
    return rest, wrong


def _by_stage(error: ValidationError, raw: object) -> dict[str, list[str]]:
    """Returns the sentences of an error by the stage that they concern; sentences about no stage are left
    out."""
    found: dict[str, list[str]] = {}
    for item in error.errors():
        place = _place(item["loc"])
        if len(place) > 1 and place[0] == "stages":
            found.setdefault(str(place[1]), [])
    for line in sentences(error, raw):
        name = line.removeprefix("stages.").partition(":")[0].partition(".")[0]
        if line.startswith("stages.") and name in found:
            found[name].append(line)
    return found


def _reduce(stages: dict[str, Any], name: str, told: Sequence[str], times: int) -> set[str]:
    """Removes contradictory fields of a stage: the first time the fields that the sentences name, the second
    time all fields but inputs and required fields, and then the stage itself. Returns the names that it
    removed."""
    stage = stages.get(name)
    if times > 1 or not isinstance(stage, dict):
        stages.pop(name, None)
        return {name}
    kind = KINDS.get(str(stage.get("stage", name)))
    fields = kind.config.model_fields if kind else {}
    inputs = {key for key, info in fields.items() if info.is_required() or _is_input(info.annotation)}
    others = {str(key) for key in stage.keys() - inputs - {"stage", "reward"}}
    if times == 0:
        words = set(re.findall(r"\w+", " ".join(told)))
        others &= words
    stages[name] = {key: value for key, value in stage.items() if key not in others}
    return others


def _is_input(annotation: Any) -> bool:
    """Returns whether a field's type is a data set, a model's name, or a mapping, whose keys may name
    models."""
    if annotation in (str, str | None) or Data in models_in(annotation):
        return True
    return dict in (typing.get_origin(part) for part in (annotation, *typing.get_args(annotation)))


def _start_field(names: list[int | str], raw: Any) -> str | None:
    """Returns the correction if a key is the start model's field in another kind of stage, such as `model` in
    a dpo stage; None otherwise."""
    if (
        len(names) != 3
        or names[0] != "stages"
        or names[2] not in {kind.start for kind in KINDS.values()} - {"judge"}
    ):
        return None
    stage = _part(_part(raw, "stages"), names[1])
    kind = KINDS.get(str(stage.get("stage", names[1])))
    return (
        f"unknown key {names[2]!r}; did you mean {kind.start}?"
        if kind and kind.start in kind.config.model_fields
        else None
    )


def field_of_recipe(key: str) -> str | None:
    """Returns the correction for a recipe field, such as `seed`, that was set in a stage; None for other
    keys."""
    if key not in Recipe.model_fields:
        return None
    return f"{key} is a field of the whole recipe: write it at the top (override: {key}=...)"


def unknown(name: str, valid: Iterable[str], what: str = "key") -> str:
    """Returns `unknown key 'x'; did you mean y?`, or lists all valid names when none is close. `what` is the
    word used instead of "key"."""
    valid = list(valid)
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.6) or [
        other for other in valid if other.lower() == name.lower()
    ]
    return f"unknown {what} {name!r}; " + (
        f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(valid) or 'none'}"
    )


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the pydantic models in an annotation, including models inside unions, tuples and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


# Fields that hold a union of records, with their unions.
UNIONS = {"judges": Judge, "judge": FallibleJudge, "reward": RewardSource}
TAGS = {
    field: tuple(model.model_fields["kind"].default for model in models_in(union))
    for field, union in UNIONS.items()
}


def _place(loc: tuple[int | str, ...]) -> list[int | str]:
    """Returns the place of an error in the recipe: `loc` without the tags that pydantic puts between a union
    and its member."""
    parts = list(loc)
    if len(parts) > 2 and parts[0] == "stages" and parts[2] in KINDS:
        del parts[2]
    return [
        part
        for i, part in enumerate(parts)
        if not (i >= 2 and part in TAGS.get(str(_union_of(parts[:i])), ()))
    ]


def _union_of(before: list[int | str]) -> int | str:
    """Returns the field that holds the union: `judges` for judges.0, or `judge`, which is not a list."""
    last = before[-1]
    if isinstance(last, int):
        return before[-2]
    return last if last == "judge" else ""


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
            keyed = False  # `name` is a user's key, and its value is the record
        elif isinstance(name, str):
            annotation = (
                models[0].model_fields[name].annotation if models and name in models[0].model_fields else None
            )
            models = models_in(annotation)
            keyed = typing.get_origin(annotation) is dict
        if len(models) > 1:  # judges, rewards: the record's `kind` selects the class
            models = [
                m
                for m in models
                if isinstance(raw, dict) and m.model_fields["kind"].default == raw.get("kind")
            ] or models
    return {key: info for model in reversed(models) for key, info in model.model_fields.items()}


def _part(whole: Any, name: int | str) -> Any:
    if isinstance(whole, dict):
        return whole.get(name)
    return whole[name] if isinstance(whole, list | tuple) and isinstance(name, int) else None


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
