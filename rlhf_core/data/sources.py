"""Files and Hub data sets to rows, and rows to documents, pairs and prompts. Torch-free.

JSON and CSV files are parsed by the standard library, which takes a text as it is: the readers behind `datasets` guess types, and turn
answers that look like dates, numbers or "None" into something else. Parquet, which has types, and Hub data sets are read by `datasets`.
ShareGPT's from/value, tool calls and content in parts are left out.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_core.config import Data, Source
from rlhf_core.data.documents import DataReport, Document, Loaded, Message, Pair, Prompt

if TYPE_CHECKING:  # chat imports transformers, which checking columns does not need
    from rlhf_core.data.chat import Renderer

Kind = Literal["sft", "preference", "prompt", "answer", "labelled", "scored"]
Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
FIRST_ROWS = 8


class Located(NamedTuple):
    """A row with standard column names, and where it came from, for messages."""

    where: str
    row: Row


class Preference(NamedTuple):
    prompt: list[Message]
    chosen: str
    rejected: str
    margin: float


def load_rows(data: Data, seed: int) -> list[Row]:
    """All rows of a mixture, their named columns copied to the standard names (messages, prompt, response, chosen, rejected, margin).

    One source keeps its order. Several are each shuffled by the seed; then the source furthest behind its share gives the next row,
    until the one whose turn it is has none left (no row is used twice). So every beginning of the list has the shares asked for,
    also after `max_samples`, which is applied last. Raises ValueError for a missing or unreadable file and for one without rows.
    """
    return [located.row for located in located_rows(data, seed, None)]


def check_columns(data: Data, kind: Kind) -> None:
    """Reads the first rows of each source and raises the ValueError that a stage would raise about them: missing file, no rows,
    missing column, wrong type. Cheap: for checks before work."""
    for source in data.sources:
        for located in _read(source, kind, FIRST_ROWS):
            _READERS[kind](located)


def sft_documents(data: Data, renderer: Renderer, max_len: int, seed: int) -> Loaded[Document]:
    """Conversations (`messages`, or `prompt` and `response`) as documents of at most `max_len` tokens.

    A longer one is cut on the right and counted, nothing is forced onto it; one without an answer (left) to train on is dropped and
    counted. Raises ValueError as `load_rows`, for missing columns and wrong types, and when no row is left.
    """
    renderer.check_limit(max_len)
    rows = located_rows(data, seed, "sft")
    items, truncated = [], 0
    for located in rows:
        whole = _at(located.where, renderer.conversation, conversation_of(located))
        document = whole.cut(max_len)
        if any(document.mask):
            items.append(document)
            truncated += len(whole) > max_len
    return loaded(data, items, len(rows), truncated, sum(map(len, items)), f"no answer within the first {max_len} tokens")


def preference_pairs(data: Data, renderer: Renderer, max_len: int, seed: int) -> Loaded[Pair]:
    """Pairs of documents of at most `max_len` tokens with the same prompt tokens.

    When a pair is longer the prompt keeps its end, down to half of `max_len`; then the answers are cut on the right. Both count as
    truncated. Pairs whose answers are (or become) the same are dropped and counted. Errors as in `sft_documents`.
    """
    renderer.check_limit(max_len)
    rows = located_rows(data, seed, "preference")
    items, truncated = [], 0
    for located in rows:
        preference = preference_of(located)
        if preference.chosen == preference.rejected:
            continue
        (chosen, rejected), cut = answers_within(
            located.where, renderer, preference.prompt, (preference.chosen, preference.rejected), max_len
        )
        if any(chosen.mask) and any(rejected.mask) and chosen.tokens != rejected.tokens:
            items.append(Pair(chosen, rejected, preference.margin))
            truncated += cut
    tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in items)
    return loaded(data, items, len(rows), truncated, tokens, f"chosen and rejected the same within {max_len} tokens")


def prompts(data: Data, renderer: Renderer, prompt_max_len: int, seed: int) -> Loaded[Prompt]:
    """Prompts of at most `prompt_max_len` tokens; a longer one keeps its end (`Renderer.prompt_within`) and is counted.

    Errors as in `sft_documents`.
    """
    renderer.check_limit(prompt_max_len)
    items = []
    rows = located_rows(data, seed, "prompt")
    for located in rows:
        messages = prompt_of(located)
        tokens, truncated = _at(located.where, renderer.prompt_within, messages, prompt_max_len)
        items.append(Prompt(tuple(messages), tokens, located.row, truncated))
    return loaded(data, items, len(rows), sum(item.truncated for item in items), sum(len(item.tokens) for item in items), "")


def conversation_of(located: Located) -> list[Message]:
    """The messages of an SFT row."""
    where, row = located
    if row.get("messages") is not None:
        if isinstance(row["messages"], str):
            raise ValueError(f"{where}: the messages must be a list of {{role, content}}, found a string")
        return _messages(row["messages"], where, "messages")
    return [*prompt_of(located), {"role": "assistant", "content": _text(row.get("response"), where, "response")}]


def prompt_of(located: Located) -> list[Message]:
    """The messages of a prompt; a string is one user message."""
    messages = _messages(located.row.get("prompt"), located.where, "prompt")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{located.where}: the prompt ends with an assistant message, so there is nothing to answer")
    return messages


def preference_of(located: Located) -> Preference:
    """The prompt and the two answers of a preference row.

    An answer is a string, a list with one assistant message, or a whole conversation, whose beginning is then the prompt.
    """
    where, row = located
    answers: list[str] = []
    starts: list[list[Message]] = []
    for column in ("chosen", "rejected"):
        if isinstance(row.get(column), str):
            answers.append(row[column])
            starts.append([])
        else:
            messages = _messages(row.get(column), where, column)
            if messages[-1]["role"] != "assistant":
                raise ValueError(f"{where}: the {column} conversation must end with an assistant message, not {messages[-1]['role']!r}")
            answers.append(messages[-1]["content"])
            starts.append(messages[:-1])
    if starts[0] and starts[1] and starts[0] != starts[1]:
        raise ValueError(f"{where}: chosen and rejected may differ only in their last message, but they differ before it")
    prompt = starts[0] or starts[1] or prompt_of(located)
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the prompt ends with an assistant message, so there is nothing to answer")
    return Preference(prompt, answers[0], answers[1], _number(row.get("margin"), where, "margin"))


def answer_of(located: Located) -> tuple[list[Message], str]:
    """The prompt and the response of a row."""
    return prompt_of(located), _text(located.row.get("response"), located.where, "response")


def reward_of(located: Located) -> float:
    """The reward of a row's response."""
    reward = _number(located.row.get("reward"), located.where, "reward")
    if located.row.get("reward") in (None, "") or not math.isfinite(reward):
        raise ValueError(f"{located.where}: column 'reward' must be a finite number, found {located.row.get('reward')!r}")
    return reward


def labelled_of(located: Located) -> tuple[list[Message], list[tuple[str, bool]]]:
    """The prompt and the labelled responses of a row: one, or the two of a preference."""
    if "label" not in located.row:
        preference = preference_of(located)
        return preference.prompt, [(preference.chosen, True), (preference.rejected, False)]
    prompt, response = answer_of(located)
    label = str(located.row["label"]).lower()
    if label not in LABELS:
        raise ValueError(f"{located.where}: column 'label' must be true or false (or 1 or 0), found {located.row['label']!r}")
    return prompt, [(response, LABELS[label])]


LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_READERS = {
    "sft": conversation_of,
    "preference": preference_of,
    "prompt": prompt_of,
    "answer": answer_of,
    "labelled": labelled_of,
    "scored": lambda located: (answer_of(located), reward_of(located)),
}


def located_rows(data: Data, seed: int, kind: Kind | None) -> list[Located]:
    """The rows of `load_rows`, each with its place, from sources checked for the columns of the kind."""
    sources = [_read(source, kind, None) for source in data.sources]
    rows = sources[0] if len(sources) == 1 else _mix(sources, [source.probability for source in data.sources], seed)
    if not rows:
        raise ValueError(f"{_names(data)}: the mixture has no rows: the sources with a share have too few")
    return rows[: data.max_samples]


def _mix(sources: list[list[Located]], shares: list[float], seed: int) -> list[Located]:
    """The mixture rule of `load_rows`."""
    for index, rows in enumerate(sources):
        random.Random(f"{seed}/{index}").shuffle(rows)
    taken = [0] * len(sources)
    mixed: list[Located] = []
    while True:
        behind = [share * (len(mixed) + 1) - count for share, count in zip(shares, taken, strict=True)]
        due = max((i for i in range(len(sources)) if shares[i] > 0), key=lambda i: behind[i])
        if taken[due] == len(sources[due]):
            return mixed
        mixed.append(sources[due][taken[due]])
        taken[due] += 1


def _read(source: Source, kind: Kind | None, first: int | None) -> list[Located]:
    """The (first) rows of one source, checked for the columns of the kind."""
    path = Path(source.path)
    if path.suffix in SUFFIXES and not path.is_file():
        raise ValueError(f"{source.path}: there is no such file: correct the path of this data source")
    if path.suffix not in SUFFIXES and path.is_file():
        raise ValueError(f"{source.path}: data files end with {', '.join(SUFFIXES)}: convert or rename this one")
    readers = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows}
    rows = list(islice(readers[path.suffix](source.path), first)) if path.suffix in readers else _dataset_rows(source, first)
    if not rows:
        raise ValueError(f"{source.path}: has no rows: give a data set with at least one")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if kind is not None:
        _check_columns(source, kind, columns, rows[0])
    return [Located(f"{source.path}, row {number}", _standard(source, row)) for number, row in enumerate(rows, start=1)]


def _json_rows(path: str) -> Iterator[Row]:
    """Objects of a file with one JSON object a line, or with one JSON list of objects."""
    try:
        with open(path, encoding="utf-8") as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            file.seek(0)
            for number, row in enumerate(json.load(file) if start == "[" else _json_lines(path, file), start=1):
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, row {number}: must be a JSON object with columns, found {_type(row)}")
                yield row
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid JSON in UTF-8: {error}") from error


def _json_lines(path: str, lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: is not valid JSON: {error.msg} at character {error.pos + 1}") from error


def _csv_rows(path: str) -> Iterator[Row]:
    """Rows of a CSV file with a header; every value is text."""
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in row or None in row.values():
                    raise ValueError(f"{path}, row {number}: has another number of cells than the header: correct or quote its cells")
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid CSV in UTF-8: {error}") from error


def _dataset_rows(source: Source, first: int | None) -> list[Row]:
    # Imported here: it takes most of a second, and text files do without.
    from datasets import load_dataset

    parquet = Path(source.path).suffix == ".parquet"
    try:
        if parquet:
            rows = load_dataset("parquet", data_files=source.path, split="train", streaming=True)
        else:
            rows = load_dataset(source.path, split=source.split, streaming=first is not None)
        return list(islice(rows, first))
    except StopIteration:  # what a file without content ends in
        return []
    except Exception as error:  # errors of many libraries come through here: all mean that this source cannot be read
        kind = "parquet" if parquet else f"a Hub data set with the split {source.split!r}"
        cause = str(error.__cause__ or error).strip().split("\n")[0]
        raise ValueError(f"{source.path}: cannot be read as {kind}: {type(error).__name__}: {cause}") from error


def _standard(source: Source, row: Row) -> Row:
    standard = dict(row)
    for name in ("messages", "prompt", "response", "chosen", "rejected", "margin", "label", "reward"):
        key = getattr(source, f"{name}_key")
        if key in row:
            standard[name] = row[key]
        else:
            standard.pop(name, None)  # the recipe names another column: one that happens to have the standard name is not meant
    return standard


def _check_columns(source: Source, kind: Kind, columns: list[str], row: Row) -> None:
    if kind == "sft":
        if source.messages_key in columns:
            return
        needed = {"prompt_key": source.prompt_key, "response_key": source.response_key}
        instead = f" (and no column {source.messages_key!r} with whole conversations, messages_key)"
    elif kind in ("answer", "scored") or (kind == "labelled" and source.label_key in columns):
        needed = {"prompt_key": source.prompt_key, "response_key": source.response_key}
        if kind == "scored":
            needed["reward_key"] = source.reward_key
        instead = ""
    elif kind in ("preference", "labelled"):
        needed = {"chosen_key": source.chosen_key, "rejected_key": source.rejected_key}
        if source.margin_key is not None:
            needed["margin_key"] = source.margin_key
        if isinstance(row.get(source.chosen_key), str):
            needed["prompt_key"] = source.prompt_key
        instead = f" (and no column {source.label_key!r} that labels single answers, label_key)" if kind == "labelled" else ""
    else:
        needed, instead = {"prompt_key": source.prompt_key}, ""
    missing = {key: column for key, column in needed.items() if column not in columns}
    if missing:
        named = " and ".join(f"{column!r}" for column in missing.values())
        raise ValueError(
            f"{source.path}: there is no column {named}{instead}; its columns are {', '.join(columns)}: set {' and '.join(missing)} "
            "of this data source"
        )


def answers_within(
    where: str, renderer: Renderer, messages: list[Message], texts: Sequence[str], max_len: int
) -> tuple[list[Document], bool]:
    """Answers to one prompt as documents of at most `max_len` tokens with the same prompt tokens, and whether something was cut.

    The prompt keeps its end, down to half of `max_len`; then the answers are cut on the right.
    """
    prompt = _at(where, renderer.prompt, messages)
    wholes = [renderer.answer_tokens(prompt, text) for text in texts]
    longest = max(map(len, wholes))
    if longest > max_len:
        room = max(max_len - (longest - len(prompt)), max_len // 2, renderer.frame_len + 1)
        prompt, _ = renderer.prompt_within(messages, room)
        wholes = [renderer.answer_tokens(prompt, text) for text in texts]
    return [whole.cut(max_len) for whole in wholes], longest > max_len


def _messages(value: Any, where: str, column: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where}: column {column!r} must be a string or a list of messages, found {_type(value)}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: message {number} of column {column!r} must have a role and a content, both strings")
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def _text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} must be a string, found {_type(value)}")
    return value


def _number(value: Any, where: str, column: str) -> float:
    try:
        return 0.0 if value is None or value == "" else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: column {column!r} must be a number, found {_type(value)}") from None


def _type(value: Any) -> str:
    return "nothing" if value is None else "an empty list" if value == [] else type(value).__name__


def _at(where: str, render: Any, *values: Any) -> Any:
    """Calls the renderer, and adds the row to its errors."""
    try:
        return render(*values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _names(data: Data) -> str:
    return ", ".join(source.path for source in data.sources)


def loaded(data: Data, items: list[Any], rows: int, truncated: int, tokens: int, why: str) -> Loaded[Any]:
    """The items with their report. ValueError when there are none; `why` says what dropped them."""
    if not items:
        raise ValueError(f"{_names(data)}: all {rows} rows were dropped ({why}): raise the token limit or correct the data")
    return Loaded(items, DataReport(rows=rows, kept=len(items), truncated=truncated, dropped=rows - len(items), tokens=tokens))
