"""Generates questions from reasoning-gym's tasks: `python -m rlhf_core.data.rows.reasoning_gym_worker`.

Reads a JSON object from stdin: the fields of `ReasoningGymPrompts`, with `options` and `shares` by task
instead of `tasks`, and `count`, the number of rows to write. Writes one row per line, or `{"problem":
SENTENCE}`.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import json
import os
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reasoning_gym.factory import DATASETS

COMPOSITE = "composite"  # a mixture of tasks; `tasks` already is one


def rows(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields as many rows as `asked["count"]` says. Interleaves the tasks so that every prefix matches their
    shares as closely as possible. Raises ValueError if a task or an option does not exist, or if a question
    cannot be generated."""
    data = {name: data_set(name, options, asked) for name, options in asked["options"].items()}
    used = dict.fromkeys(data, 0)
    for place in range(asked["count"]):
        name = max(data, key=lambda task: asked["shares"][task] * (place + 1) - used[task])
        try:
            entry = data[name][used[name]]
        except Exception as error:  # any error that a task raises for its options
            raise ValueError(
                f"the task {name} cannot generate its question {used[name] + 1}: {_told(error)}: change its"
                " options, or leave it out"
            ) from error
        used[name] += 1
        yield row(name, entry, data[name].config, asked)


def row(name: str, entry: dict[str, Any], config: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a question. Converts the tuples, sets and objects in its entry and its task's
    config, which JSON would lose."""
    question = "\n\n".join(filter(None, [str(entry["question"]).strip(), asked["instruction"]]))
    messages = [{"role": "user", "content": question}]
    if asked["system"]:
        messages.insert(0, {"role": "system", "content": asked["system"]})
    scored_by = base64.b64encode(pickle.dumps((name, entry, config))).decode()
    answer = entry["answer"]
    return {
        "prompt": messages,
        "answer": None if answer is None else str(answer),
        "task": name,
        "reasoning_gym": scored_by,
    }


def data_set(name: str, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    """Returns the data set of a task. Raises ValueError if the task or an option does not exist, or if the
    options are invalid.

    Derives the task's seed at random from the given seed. Most tasks use seed + i for question i, so
    neighbouring seeds would give the same questions, for example to prompts and eval_prompts.
    """
    names = sorted(set(DATASETS) - {COMPOSITE})
    if name not in names:
        raise ValueError(f"reasoning-gym has no task {name!r}{_meant(name, names)}")
    kind, config_kind = DATASETS[name]
    defaults = {field.name: field.default for field in dataclasses.fields(config_kind)}
    free = sorted(set(defaults) - {"seed", "size"})
    for option in options:
        if option not in free:
            known = ", ".join(free) or "none"
            raise ValueError(
                f"the task {name} has no option {option!r}, its options are {known}{_meant(option, free)}"
            )
    given = {
        option: tuple(value) if isinstance(value, list) and isinstance(defaults[option], tuple) else value
        for option, value in options.items()
    }
    seed = random.Random(f"{asked['seed']}/{name}").getrandbits(31)
    try:
        return kind(config_kind(**given, seed=seed, size=asked["size"]))
    except Exception as error:  # from the config's own checks, or from a wrong type
        raise ValueError(f"the task {name} refuses its options: {_told(error)}: correct them") from error


def _meant(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, 0.5)
    return f": did you mean {near[0]}?" if near else ": correct its name"


def _told(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output that tasks print is not a row
    try:
        for made in rows(json.load(sys.stdin)):
            print(json.dumps(made), file=out)
    except ValueError as error:
        print(json.dumps({"problem": str(error)}), file=out)
    out.flush()


if __name__ == "__main__":
    main()
