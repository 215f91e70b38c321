"""The town: people who ask the demo's questions, whose right answers are known, and say which answers they
like.

Everybody has the same taste: the bare right answer is best, then one that holds the right answer among other
words, then all others. Everything is drawn from the run's seed and the number of the day, so that a day is
the same in every run.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

SCRIPT = Path(__file__).parents[2] / "deployments" / "demo" / "make_material.py"
_spec = importlib.util.spec_from_file_location("make_material", SCRIPT)
assert _spec is not None and _spec.loader is not None
make_material = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_material)

TOPICS = ("copy", "reverse", "sort", "first", "last")  # what people ask about
NEW_TOPICS = ("count", "sum")  # after a drift of topics
ANSWERS = 4  # of the model to each question
RANKED = 0.75
EDITED = 0.15  # share of questions whose asker ranks the answers, and edits one; the others send thumbs
UNSURE = 0.05  # share of games in which the judge says tie whatever the answers are


class Asked(NamedTuple):
    """A question and who asked it. `answer`: the right one."""

    prompt: str
    answer: str
    person: str


def quality(answer: str, right: str) -> int:
    """The taste: 2 the bare right answer, 1 the right answer among other words, 0 any other."""
    if " ".join(answer.split()) == right:
        return 2
    return 1 if re.search(rf"(?<!\d){re.escape(right)}(?!\d)", answer) else 0


def exercises(
    seed: object,
    count: int,
    categories: Sequence[str] = make_material.CATEGORIES,
    taken: set[str] | None = None,
) -> list[Any]:
    """Returns different exercises of these categories, in equal parts, none with a prompt in `taken`; adds
    theirs to it."""
    rng = random.Random(str(seed))
    taken = set() if taken is None else taken
    found = []
    while len(found) < count:
        exercise = make_material.draw(rng, categories[len(found) % len(categories)])
        if exercise.prompt not in taken:
            taken.add(exercise.prompt)
            found.append(exercise)
    return found


def day(seed: int, number: int, count: int, people: int, drifted: bool, taken: set[str]) -> list[Asked]:
    """Returns the questions of a day. Each person asks in turn; the same prompt may come again on another
    day, none of `taken` comes."""
    drawn = exercises(f"{seed}/day{number}", count, NEW_TOPICS if drifted else TOPICS, set(taken))
    return [
        Asked(exercise.prompt, exercise.answer, f"person{i % people:03d}") for i, exercise in enumerate(drawn)
    ]


def feedback(
    asked: Sequence[Asked], answers: Sequence[Sequence[str]], model: str, seed: object, hostile: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yields the rows of feedback on the answers to each question; nobody says anything of an answer without
    words. `hostile`: share of the people, who say the opposite of the taste."""
    rng = random.Random(str(seed))
    people = sorted({one.person for one in asked})
    against = set(rng.sample(people, round(hostile * len(people))))
    for one, given in zip(asked, answers, strict=True):
        sign = -1 if one.person in against else 1
        kind = rng.random()
        about = {"prompt": one.prompt, "model": model, "annotator": one.person}
        given = [answer for answer in given if answer.strip()]
        if not given:
            continue
        levels = sorted({quality(answer, one.answer) for answer in given}, key=lambda level: -sign * level)
        if kind < RANKED and len(levels) > 1:
            yield {
                **about,
                "ranking": [
                    sorted({answer for answer in given if quality(answer, one.answer) == level})
                    for level in levels
                ],
            }
        elif kind < RANKED + EDITED and given[0] != one.answer:
            text = one.answer if sign > 0 else make_material.TEXTS["lazy"][0]
            if text != given[0]:
                yield {**about, "response": given[0], "edited": text}
        else:
            good = quality(given[0], one.answer) == 2
            yield {**about, "response": given[0], "thumb": "up" if good == (sign > 0) else "down"}


def labels(seed: int, number: int, count: int, taken: set[str]) -> list[dict[str, Any]]:
    """Returns lines of a labels file: pairs of answers that a careful annotator compared on a day, as
    `alignflow label` writes them."""
    rng = random.Random(f"{seed}/labels{number}")
    rows = []
    for i, exercise in enumerate(exercises(f"{seed}/labelled{number}", count, taken=set(taken))):
        a, b = (make_material.respond(rng, exercise, make_material.SFT_MODES) for _ in range(2))
        better = quality(a, exercise.answer) - quality(b, exercise.answer)
        verdict = "A>B" if better > 0 else "B>A" if better < 0 else "A=B"
        prompt = [{"role": "user", "content": exercise.prompt}]
        line = dict(id=f"d{number}l{i}", uid=f"d{number}q{i}", prompt=prompt, answer_a=a, answer_b=b)
        rows.append(
            line | {"verdict": verdict, "annotator": f"careful{i % 3}", "repeat_of": None, "undone": None}
        )
    return rows


GAME = re.compile(
    r"<\|User's prompt\|>\n(.*)\n<\|End.*A's answer\|>\n(.*)\n<\|End.*B's answer\|>\n(.*)\n<\|End", re.DOTALL
)


def verdict(request: Mapping[str, Any], likes_length: bool) -> str:
    """The reply of the judge to a request in the form of evaluation/judges/judge_prompt.py: by the taste, or
    for the longer answer."""
    match = GAME.search(request["messages"][-1]["content"])
    assert match is not None, request
    prompt, a, b = match.groups()
    if random.Random(prompt + min(a, b) + max(a, b)).random() < UNSURE:
        return "[[A=B]]"
    better = (
        len(a) - len(b)
        if likes_length
        else quality(a, right_answer(prompt)) - quality(b, right_answer(prompt))
    )
    return "[[A>B]]" if better > 0 else "[[B>A]]" if better < 0 else "[[A=B]]"


def right_answer(prompt: str) -> str:
    """The right answer to a prompt of the demo. Raises ValueError for any other text."""
    for category, wordings in make_material.WORDINGS.items():
        for wording in wordings:
            pattern = re.escape(wording).replace(r"\{\}", r"(\d+)")
            found = re.fullmatch(pattern, prompt)
            if found:
                numbers = found.groups()
                return (
                    str(sum(map(int, numbers)))
                    if category == "sum"
                    else str(make_material.solve(category, numbers[0]))
                )
    raise ValueError(f"{prompt!r} is no question of the demo")


def write_lines(file: TextIO, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as lines of JSON."""
    file.writelines(json.dumps(row) + "\n" for row in rows)
