"""Defines the records passed between processes or written to files, as frozen pydantic models. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Off, No = (
    BeforeValidator(lambda value, word=word: word if value is False else value) for word in ("off", "no")
)  # in a mapping read as YAML 1.1, such as a deployment's parameters, these words become False


def _is_a_name(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z_]\w*", value):
        raise ValueError(
            "give the name of an environment variable, and the key itself to that variable: what is here ends"
            " up in files"
        )
    return value


Variable = Annotated[str, AfterValidator(_is_a_name)]  # the name of an environment variable
# for `json_schema_extra`: marks a switch that a deployment's runs may not change
RECIPE_ONLY: dict[str, Any] = {"recipe_only": True}


class NotInDigest:
    """Marks a config field, `Annotated[TYPE, NotInDigest]`, whose value affects a stage's result only through
    rounding and the random stream, because it only affects speed, memory, placement, time limits or
    intervals. A new value causes no recomputation, and a stage resumes with it."""


class InDigestIfSet:
    """Marks a config field, `Annotated[TYPE, InDigestIfSet]`, that affects a result but enters the digest
    only if its value is not the default, so that adding the field recomputes nothing."""


class Frozen(BaseModel):
    """Base of every record and config: immutable, and unknown keys are errors."""

    # defer_build: a process builds the validators only of the few classes it uses, not of all at import
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="constants", defer_build=True
    )

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Returns the record in a JSON file; None when the file is missing or damaged."""
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


Mistakes = TypeVar("Mistakes", bound=Callable[[Any], Iterator[str]])


def check(mistakes: Mistakes) -> Mistakes:
    """Marks a config method that yields a message for each mistake in its fields. All mistakes are reported
    together."""
    mistakes.is_check = True  # type: ignore[attr-defined]
    return mistakes


@cache
def _checks(kind: type) -> tuple[str, ...]:
    """Returns the names of the methods marked by `check`, base classes first."""
    marked = (
        name
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if not name.startswith("__") and hasattr(value, "is_check")
    )
    return tuple(dict.fromkeys(marked))


class Config(Frozen):
    """Base of everything a recipe may contain. Rejects infinity and NaN, and true or false where a number is
    expected, unless a field has its own validator for them."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="after")
    def _make_checks(self) -> Self:
        """Runs all checks of the class and raises one ValueError with a line for each mistake. Pydantic alone
        would stop at the first validator."""
        found: list[str] = []
        for name in _checks(type(self)):
            try:
                found.extend(getattr(self, name)())
            except ValueError as error:  # from a check that raises because other code calls it too
                found.append(str(error))
        if found:
            raise ValueError("\n".join(dict.fromkeys(found)))
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, given: Any) -> Any:
        """Converts true and false to text where a number is expected. Pydantic would read them as 1 and 0,
        but rejects text."""
        if not isinstance(given, dict):
            return given
        fields = [
            (name, field)
            for name, field in cls.model_fields.items()
            if name in given and _holds_numbers(field.annotation)
        ]
        own = [
            name
            for name, field in fields
            if not any(isinstance(item, BeforeValidator) for item in field.metadata)
        ]
        return given | {name: _as_text(given[name]) for name in own}


def _as_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value


def _holds_numbers(annotation: Any) -> bool:
    """Returns whether a type is a number, or a union, tuple or Literal of numbers that does not allow true
    and false."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return any(type(part) is int for part in parts)
    return annotation in (int, float) or (bool not in parts and any(_holds_numbers(part) for part in parts))


class Ranks(Config):
    """The processes of one model and the resources of each. On a CPU machine `gpus` is 0 and `cpus`
    counts."""

    num_nodes: Positive = Field(1, le=1000, description="nodes")
    num_ranks_per_node: Positive = Field(1, le=256, description="ranks on each node (one per GPU)")
    cpus: Annotated[float, NotInDigest] = Field(1.0, gt=0, description="CPUs of one rank")
    gpus: float = Field(0.0, ge=0, description="GPUs of one rank")

    @property
    def world_size(self) -> int:
        """Returns the number of ranks on all nodes."""
        return self.num_nodes * self.num_ranks_per_node


class FileInfo(Frozen):
    """A file in a manifest. `size` is in bytes, and `sha256` is in hex."""

    size: int
    sha256: str


class StageResult(Frozen):
    """The result of a finished stage, written last, as `result.json`.

    `outputs` maps names (`checkpoint` for a model, `pairs` for a preference data set, `report` for an
    evaluation) to directories or files relative to the run directory; `files` is the manifest over all of
    them. `seconds`: how long the last attempt took.
    """

    name: str
    stage: str
    digest: str
    seconds: float
    metrics: dict[str, float]
    outputs: dict[str, str]
    files: dict[str, FileInfo]
    environment: dict[str, str]


class PreferencePair(Frozen):
    """A row of a `pairs.jsonl`. `..._cut` is true if the length limit truncated that answer. Chat messages
    are `{"role": ..., "content": ...}`."""

    prompt: tuple[dict[str, Any], ...]
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float
    chosen_cut: bool = False
    rejected_cut: bool = False


class ScoredAnswer(Frozen):
    """A row from a preferences stage that makes no pairs: an answer and its unnormalised reward."""

    prompt: tuple[dict[str, Any], ...]
    response: str
    reward: float


class LabelledAnswer(ScoredAnswer):
    """An answer with a label for KTO: True for desirable."""

    label: bool


Label = Literal["A>>B", "A>B", "A=B", "B>A", "B>>A"]
POINTS: dict[str, float] = {"A>>B": 1.0, "A>B": 1.0, "A=B": 0.5, "B>A": 0.0, "B>>A": 0.0}  # A's points


class Game(Frozen):
    """A verdict on two answers, in Arena-Hard's format. `score` refers to the answers as A and B, in the
    order in which the judge saw them; None: no verdict."""

    score: Label | None
    judgment: dict[str, str]
    prompt: tuple[dict[str, str], ...] = ()


class Judgment(Frozen):
    """A battle: two games on one question. A is the baseline in game 0, and the model in game 1."""

    uid: str
    category: str
    judge: str
    model: str
    baseline: str
    games: tuple[Game, Game]

    @property
    def scores(self) -> tuple[float | None, float | None]:
        """Returns the model's score in each game, 0, 0.5 or 1; None for a game without a verdict."""
        first, second = (None if game.score is None else POINTS[game.score] for game in self.games)
        return None if first is None else 1 - first, second

    @property
    def score(self) -> float | None:
        """Returns the mean score over the games with a verdict; None if there are none."""
        played = [score for score in self.scores if score is not None]
        return sum(played) / len(played) if played else None


class WinRate(Frozen):
    """The win rate of one model against the baseline, with its 95 % interval over questions
    (`mean_interval.py`).

    `win_rate`: the mean score of the games over questions; a tied game counts as one half. `num_won`,
    `num_tied`, `num_lost`: the number of questions with a score above, equal to and below one half (None: the
    report comes from an older version). `num_failed`: games without a verdict. `swap_consistency`: fraction
    of questions whose two games name the same winner. `arena_score`: win rate in which each strong verdict
    counts three times, as in Arena-Hard. `length_controlled`: predicted win rate if answers were as long as
    the baseline's, from a Bradley-Terry fit with the length difference as a covariate, with its 95 %
    interval.
    """

    model: str
    baseline: str
    judge: str
    win_rate: float
    ci_low: float
    ci_high: float
    num_questions: int
    num_failed: int
    swap_consistency: float
    by_category: dict[str, float]
    num_won: int | None = None
    num_tied: int | None = None
    num_lost: int | None = None
    arena_score: float | None = None
    length_controlled: float | None = None
    lc_low: float | None = None
    lc_high: float | None = None

    @property
    def counted(self) -> str:
        """Returns the counts in words, such as "won 214, lost 4 and tied 202 of 420 battles"."""
        if self.num_won is None:
            return f"played {self.num_questions} battles"
        return (
            f"won {self.num_won}, lost {self.num_lost} and tied {self.num_tied} of {self.num_questions}"
            " battles"
        )


class StyleEffect(Frozen):
    """The change in the log-odds of winning per typical (root mean square) difference in one style feature,
    with a 95 % interval."""

    feature: str
    effect: float
    ci_low: float
    ci_high: float


class Judging(Frozen):
    """Counts of a judge's questions, games and requests. `failed`: games without a verdict.

    Tokens are counted for all verdicts used, including cached verdicts; `requests` counts only requests sent
    by this run. `cost` is in US dollars, None when the prices are not known.
    """

    questions: int
    games: int
    failed: int
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None


class Answering(Frozen):
    """The requests for a remote model's answers. `url`: the endpoint; `settings`: the sampling fields of each
    request.

    Tokens are counted for all answers used, including stored answers; `requests` counts only requests sent by
    this run; `failed` counts questions without an answer. `cost` is in US dollars, None when the prices are
    not known.
    """

    model: str
    url: str
    settings: dict[str, Any]
    questions: int
    failed: int
    requests: int
    input_tokens: int
    output_tokens: int
    cost: float | None = None


class EvalReport(Frozen):
    """The evaluation of all models of one recipe by one judge.

    `right`: fraction of correct answers per model, with a rule judge. `mean_tokens`: mean length of the
    answers; `truncated`: fraction of answers truncated at the limit. `agreement`: fraction of battles in
    which another judge names the same winner. `win_rates` compares models with the baseline, `against_parent`
    with the model that each was trained from, unless that is the baseline. `answering`: requests to each
    remote model.
    """

    baseline: str
    judge: str
    win_rates: tuple[WinRate, ...]
    right: dict[str, float]
    mean_tokens: dict[str, float]
    truncated: dict[str, float]
    agreement: dict[str, float] = {}
    against_parent: tuple[WinRate, ...] = ()
    style: tuple[StyleEffect, ...] = ()
    judging: Judging | None = None
    answering: dict[str, Answering] = {}


def keys_that_are_no_text(where: str, value: Any) -> Iterator[str]:
    """Yields a message for each key in the mapping `value`, at any depth, that is not a string, such as true
    or 1."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(key, str):
            yield (
                f"{where}: the key {key!r} is no text: put it in quotes (YAML reads true, null and 1 as other"
                " things)"
            )
        yield from keys_that_are_no_text(f"{where}.{key}", inner)


def in_key_order(value: Any) -> Any:
    """Returns a JSON value with the keys of all its mappings sorted. Digests sort keys, so nothing may depend
    on the order of keys, such as a template that writes a mapping, or the order of tasks."""
    if isinstance(value, dict):
        return {key: in_key_order(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [in_key_order(item) for item in value]
    return value
