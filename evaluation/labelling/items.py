"""Reads the pairs that annotators compare: answers of an evaluation's models, or rows of preferences.
Torch-free.

A row of a file that contains an unpaired surrogate is an error, as in training. In a model's answer, each
unpaired surrogate is replaced with U+FFFD.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.labelling.label_records import ComparedPair
from evaluation.scores.arena_files import folders, read_judgments, rows_of
from rlhf_core.config import Data, Source
from rlhf_core.data.documents import Message
from rlhf_core.data.rows.columns import Located, prompt_of, text_of, text_preference_of, written
from rlhf_core.data.rows.mixture import placed_rows
from rlhf_core.data.rows.row_files import is_file, raw_rows
from rlhf_core.runs.run_dir import RESULT
from rlhf_core.runs.run_records import RUN
from rlhf_core.system.files import digest, read_json

HALVES = re.compile("[\ud800-\udfff]")


class DrawnPairs(NamedTuple):
    """The pairs to compare, in the order in which they are assigned. `found`: number of pairs in the source;
    `same`: number of pairs with equal answers, which are left out."""

    pairs: list[ComparedPair]
    found: int
    same: int


def draw(source: str, count: int, seed: int, artifacts: Path, models: Sequence[str] = ()) -> DrawnPairs:
    """Returns `count` pairs drawn at random. With the same seed, a larger `count` draws the same pairs and
    more. For a file of rows, memory use is bounded by `count`.

    `source`: a data file, an evaluation's directory, or the name of an evaluation or a recipe in `artifacts`.
    `models`: two models of an evaluation to compare; default: all pairs that its judges compared. Raises
    ValueError if the source cannot be read or has nothing to compare.
    """
    found = 0
    same = 0
    kept: dict[str, ComparedPair] = {}
    for pair in _pairs(source, seed, artifacts, models):
        found += 1
        if pair.answer_a == pair.answer_b:
            same += 1
            continue
        kept.setdefault(digest([seed, pair.key]), pair)  # only once if a row is repeated
        if len(kept) > 2 * count + 1000:
            kept = dict(sorted(kept.items())[:count])
    if not kept:
        raise ValueError(
            f"{source}: has no pair of different answers to compare ({found} pairs): give another source"
        )
    return DrawnPairs([pair for _, pair in sorted(kept.items())[:count]], found, same)


def _pairs(source: str, seed: int, artifacts: Path, models: Sequence[str]) -> Iterator[ComparedPair]:
    folder = _evaluation(source, artifacts)
    if folder is not None:
        return _battles(folder, models)
    if models:
        raise ValueError(f"--models {','.join(models)}: {source} is not an evaluation: leave --models out")
    if not is_file(Source(path=source)):
        names = sorted(
            {
                path.parent.name.rpartition("-")[0]
                for path in artifacts.glob(f"stages/*/{RESULT}")
                if _is_evaluation(path.parent)
            }
        )
        known = f"{artifacts} has {', '.join(names)}" if names else f"{artifacts} has none"
        raise ValueError(f"{source}: is neither a file of preferences (.jsonl) nor an evaluation: {known}")
    return _rows(source, seed)


def _evaluation(source: str, artifacts: Path) -> Path | None:
    """Returns the directory of an evaluation that is named by its path, by its stage (its newest directory is
    taken) or by a recipe (its last run is taken). Returns None if `source` names none of these."""
    for recipe in (Path(source), artifacts / source):
        stages = read_json(recipe / RUN).get("stages", [])
        last = [stage["run_dir"] for stage in stages if stage.get("kind") == "evaluation"]
        if last:
            return recipe.parent / str(last[-1])
    done = artifacts.glob(f"stages/{glob.escape(source)}-*/{RESULT}")
    newest = sorted((path.stat().st_mtime, path.parent) for path in done if _is_evaluation(path.parent))
    if newest:
        return newest[-1][1]
    return Path(source) if Path(source).is_dir() else None


def _is_evaluation(folder: Path) -> bool:
    return (folder / "report" / "answers").is_dir()


def _battles(folder: Path, models: Sequence[str]) -> Iterator[ComparedPair]:
    """Yields the battles of an evaluation. As in game 0 of a judgment, A is the baseline's answer and B the
    model's."""
    places = folders(folder)
    place = places.answers or next(
        (place for place in (folder / "report/answers", folder / "answers") if place.is_dir()), None
    )
    if place is None:
        raise ValueError(
            f"{folder}: has no answers (report/answers/*.jsonl): give the directory of a finished evaluation"
        )
    answers: dict[str, dict[str, tuple[Message, ...]]] = {}
    for where, row in rows_of(place):
        try:
            *prompt, answer = row["messages"]
            content = answer["content"]
            text = content["answer"] if isinstance(content, dict) else content
            shown = [
                *prompt_of(Located(where, {"prompt": prompt})),
                {"role": "assistant", "content": text_of(text, where, "answer")},
            ]
            answers.setdefault(str(row["model"]), {})[str(row["uid"])] = tuple(shown)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: is not an answer ({type(error).__name__}: {error}): give an evaluation's directory"
            ) from None
    if models:
        unknown = [name for name in models if name not in answers]
        if unknown:
            raise ValueError(
                f"--models: {folder} has no answers of {', '.join(unknown)}, only of"
                f" {', '.join(sorted(answers))}"
            )
        sides = [(models[0], models[1])]
    elif places.answers is None and len(answers) == 2:  # not judged yet
        first, second = sorted(answers)
        sides = [(first, second)]
    else:
        sides = list(
            dict.fromkeys(
                (judgment.baseline, judgment.model) for judgment in read_judgments(places.judgments)
            )
        )
    for a, b in sides:
        ours = answers.get(a, {})
        theirs = answers.get(b, {})
        for uid in (uid for uid in ours if uid in theirs):
            *prompt, one = ours[uid]
            yield _pair(uid, prompt, (one["content"], theirs[uid][-1]["content"]), (a, b), str(folder))


def _rows(file: str, seed: int) -> Iterator[ComparedPair]:
    """Yields the rows of a file: `answer_a` and `answer_b` (with `uid`, `model_a`, `model_b`), or a
    preference, whose `chosen` becomes A."""
    source = Source(path=file)
    first = next(iter(raw_rows(source, 1)), {})
    if "answer_a" in first:
        for number, row in enumerate(raw_rows(source, None), 1):
            where = f"{file}, row {number}"
            answers = (
                text_of(row.get("answer_a"), where, "answer_a"),
                text_of(row.get("answer_b"), where, "answer_b"),
            )
            yield _pair(
                row.get("uid"),
                prompt_of(Located(where, row)),
                answers,
                (row.get("model_a"), row.get("model_b")),
                file,
            )
        return
    for placed in placed_rows(Data(sources=(source,)), seed, "preference"):
        if placed.located.no_preference:
            continue
        found = text_preference_of(placed.located)
        yield _pair(
            placed.located.row.get("uid"),
            found.prompt,
            (written(found.chosen), written(found.rejected)),
            (None, None),
            file,
        )


def _pair(
    uid: Any, prompt: Sequence[Message], answers: tuple[str, str], models: tuple[Any, Any], source: str
) -> ComparedPair:
    shown = tuple({"role": message["role"], "content": whole(written(message))} for message in prompt)
    one, other = map(whole, answers)
    name_a, name_b = (None if name is None else whole(str(name)) for name in models)
    identity = digest([list(shown), one, other]) if uid is None else whole(str(uid))
    return ComparedPair(
        uid=identity,
        prompt=shown,
        answer_a=one,
        answer_b=other,
        model_a=name_a,
        model_b=name_b,
        source=source,
    )


def whole(text: str) -> str:
    """Returns `text` with each unpaired surrogate, which UTF-8 cannot encode, replaced with U+FFFD."""
    return HALVES.sub("\ufffd", text)
