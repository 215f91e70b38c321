"""Reads the answers that PPO's iterations recorded for display (`rollouts/iterationN.jsonl`). Answers of
validations and of earlier versions have texts and rewards but no tokens. Damaged rows are skipped."""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.data.rows.columns import written
from rlhf_core.runs.run_dir import ROLLOUTS

NUMBERS = ("advantages", "engine", "trainer", "reference")
MAX_LINE = 16 << 20  # bytes; longer rows are not shown
KEY = re.compile(rb'\{"row": "([0-9a-f]+)"')  # the start of a row that has a key


class AnswerTokens(NamedTuple):
    """The tokens of an answer or episode: T recorded tokens, of which N were sampled, within the bounds in
    `answers`. `advantages`, `engine`, `trainer` and `reference` (N,): empty if unknown; None where a value is
    not finite. `left_out`: which of the N tokens are left out of the loss. `total`, `sampled`: the numbers of
    tokens before the record was truncated."""

    ids: list[int]
    texts: list[str]
    special: frozenset[int]
    answers: list[int]
    starts: list[int]
    left_out: frozenset[int]
    total: int
    sampled: int
    advantages: list[float | None]
    engine: list[float | None]
    trainer: list[float | None]
    reference: list[float | None]


class RecordedAnswer(NamedTuple):
    """A sampled answer or episode. `key`: the same for all answers to a row of the data; `number`: the
    answer's number among these, 0 if unknown. `messages`: (role, text). `rewards`: by source, None if a
    source failed. `reward`: the numbers from the sum of the rewards to the value from which advantages are
    computed. `trained`, `ages`, `tokens`: None if unknown."""

    iteration: int
    key: str
    number: int
    prompt: str
    prompt_cut: bool
    messages: list[tuple[str, str]]
    rewards: dict[str, float | None]
    reward: dict[str, float | None]
    failure: str
    finished: bool
    ended_by: str | None
    trained: bool | None
    ages: tuple[int, int] | None
    tools: list[str]
    roles: list[list[str]]
    tokens: AnswerTokens | None


def iteration_files(run_dir: Path, folder: str = ROLLOUTS) -> dict[int, Path]:
    """Returns the files of recorded answers by iteration, in order; links and other irregular files are
    skipped. `folder`: ROLLOUTS, or VALIDATION for the answers of validations."""
    if (run_dir / folder).is_symlink():
        return {}
    named = {
        file.stem.removeprefix("iteration"): file
        for file in (run_dir / folder).glob("iteration*.jsonl")
        if stat.S_ISREG(file.lstat().st_mode)
    }
    files = {int(number): file for number, file in named.items() if number.isascii() and number.isdigit()}
    return dict(sorted(files.items()))


def read_answers(iteration: int, file: Path, keys: Container[str] = ()) -> Iterator[RecordedAnswer]:
    """Yields the answers of an iteration. If `keys` is given, yields only answers with one of these keys."""
    for line in lines_of(file):
        if keys and key_of(line) not in keys:
            continue
        try:
            yield answer_of(iteration, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            continue


def keys_of(file: Path) -> list[str]:
    """Returns the key of each answer of an iteration, in order; "" for a damaged answer."""
    return [key_of(line) for line in lines_of(file)]


def lines_of(file: Path) -> Iterator[bytes]:
    """Yields the lines of a file. A line over MAX_LINE bytes is truncated, so it is not valid JSON."""
    try:
        with file.open("rb") as opened:
            while line := opened.readline(MAX_LINE):
                yield line
                while line and not line.endswith(b"\n"):
                    line = opened.readline(MAX_LINE)
    except OSError:
        return


def key_of(line: bytes) -> str:
    """Returns the key of an answer's row; for rows of earlier versions, the digest of the prompt."""
    found = KEY.match(line)
    if found:
        return found[1].decode()
    try:
        return key_of_messages(prompt_of(json.loads(line)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def key_of_messages(messages: list[Any]) -> str:
    text = json.dumps(messages, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def prompt_of(row: Mapping[str, Any]) -> list[Any]:
    """Returns the messages of a row's prompt. For an episode that does not record their number, returns the
    messages before the first answer."""
    if "messages" not in row:
        return list(row["prompt"])
    messages = list(row["messages"])
    firsts = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: int(row.get("prompt_messages", firsts[0] if firsts else len(messages)))]


def answer_of(iteration: int, row: Mapping[str, Any]) -> RecordedAnswer:
    """Builds an answer from its row. Raises a built-in exception such as KeyError for a damaged row."""
    prompt = prompt_of(row)
    messages = row.get("messages") or [*prompt, {"role": "assistant", "content": row["response"]}]
    ages = row.get("ages")
    finished = bool(row.get("finished", True))
    return RecordedAnswer(
        iteration=iteration,
        key=str(row.get("row") or key_of_messages(prompt)),
        number=int(row.get("answer", 0)),
        prompt=written(prompt[-1]) if prompt else "",
        prompt_cut=bool(row.get("prompt_cut")),
        messages=[(str(message["role"]), written(message)) for message in messages],
        rewards=numbers_of(row["rewards"]),
        reward=numbers_of(row.get("reward", {})),
        failure=str(row.get("failure", "")),
        finished=finished,
        ended_by=str(row["ended_by"]) if row.get("ended_by") else None,
        trained=bool(row["trained"]) if "trained" in row else None,
        ages=(int(ages[0]), int(ages[1])) if ages else None,
        tools=[call["function"]["name"] for one in messages for call in one.get("tool_calls") or ()],
        roles=roles_between(messages[len(prompt) :]),
        tokens=tokens_of(row["tokens"]) if "tokens" in row else None,
    )


def roles_between(messages: list[Any]) -> list[list[str]]:
    """Returns, for each answer, the roles of the messages between it and the next answer."""
    found: list[list[str]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            found.append([])
        else:
            found[-1].append(str(message["role"]))
    return found[1:]


def numbers_of(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {str(name): None if value is None else float(value) for name, value in values.items()}


def tokens_of(row: Mapping[str, Any]) -> AnswerTokens:
    """Returns the tokens of a row. Raises ValueError if the lists have inconsistent lengths."""
    ids = [int(token) for token in row["ids"]]
    texts = [str(text) for text in row["texts"]]
    answers = [int(border) for border in row["answers"]]
    starts = [int(start) for start in row.get("starts", ())]
    count = sum(answers[1::2]) - sum(answers[::2])
    numbers = {name: optional_numbers(row.get(name, ())) for name in NUMBERS}
    ordered = (
        answers == sorted(answers) and len(answers) % 2 == 0 and all(0 <= at <= len(ids) for at in answers)
    )
    if (
        len(texts) != len(ids)
        or not ordered
        or any(len(values) not in (0, count) for values in numbers.values())
        or not all(0 <= start < len(ids) for start in starts)
        or (numbers["trainer"] and not numbers["engine"])
    ):
        raise ValueError("the lists of tokens have inconsistent lengths")
    return AnswerTokens(
        ids,
        texts,
        frozenset(int(at) for at in row["special"]),
        answers,
        starts,
        frozenset(int(at) for at in row.get("left_out", ())),
        int(row["total"]),
        int(row["sampled"]),
        **numbers,
    )


def optional_numbers(values: Sequence[Any]) -> list[float | None]:
    numbers = [math.nan if value is None else float(value) for value in values]
    return [value if math.isfinite(value) else None for value in numbers]
