"""Imports rows into an inbox: parses them, masks personal data, rejects evaluation questions, and counts the
outcomes. Memory use does not grow with the number of rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import fsspec

from rlhf_core.feedback.feedback_records import Feedback
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.parse import Unusable, feedback_of
from rlhf_core.feedback.personal_data import masked
from rlhf_core.system.redaction import public_address

BATCH = 2000
BATCH_BYTES = 32 << 20  # maximum number of rows in one transaction, and of bytes in their lines
EXAMPLES = 5
LARGEST_LINE = 16 << 20  # bytes


class ReceivedRow(NamedTuple):
    """A row as received, with its place for use in messages. `fault`: why it cannot be read, or ''. `size`:
    number of bytes in its line."""

    where: str
    row: Any
    fault: str = ""
    size: int = 0


@dataclass
class Receipt:
    """Counts of the outcomes of rows. `wrong`: malformed rows. `faults`: the first messages about malformed
    rows. `unusable`: rows without a judgement, by reason."""

    read: int = 0
    new: int = 0
    duplicate: int = 0
    leaked: int = 0
    wrong: int = 0
    faults: list[str] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)
    personal: Counter[str] = field(default_factory=Counter)


def receive(
    inbox: Inbox,
    given: Iterable[ReceivedRow],
    questions: Questions,
    source: str = "",
    annotator: str | None = None,
    shown: Callable[[Receipt], None] = lambda receipt: None,
) -> Receipt:
    """Adds the feedback in rows to an inbox, and returns counts of the outcomes. If the import is killed,
    only whole batches have been added; a second import of the same rows counts them as duplicates.

    `source`, `annotator`: defaults for rows that do not name one. `shown` is called after each batch. Raises
    ValueError for the same reasons as `Inbox`, and MachineLacks when presidio is needed but not installed.
    """
    receipt = Receipt()
    rows = iter(given)
    while batch := list(_batch(rows)):
        kept = [
            feedback
            for item in batch
            if (feedback := _read(item, receipt, questions, source, annotator)) is not None
        ]
        added = inbox.add(kept)
        receipt.read += len(batch)
        receipt.new += added.new
        receipt.duplicate += added.duplicate
        shown(receipt)
    return receipt


def _batch(rows: Iterator[ReceivedRow]) -> Iterator[ReceivedRow]:
    """Yields the next rows, until there are BATCH rows or their lines have BATCH_BYTES bytes."""
    size = 0
    for item in islice(rows, BATCH):
        yield item
        size += item.size
        if size >= BATCH_BYTES:
            return


def _read(
    item: ReceivedRow, receipt: Receipt, questions: Questions, source: str, annotator: str | None
) -> Feedback | None:
    """Returns the feedback in a row, with personal data masked. If the row has no feedback or matches an
    evaluation question, counts it and returns None."""
    try:
        if item.fault:
            raise ValueError(item.fault)
        feedback = feedback_of(item.row, source, annotator)
    except Unusable as reason:
        receipt.unusable[str(reason)] += 1
        return None
    except ValueError as error:
        receipt.wrong += 1
        if len(receipt.faults) < EXAMPLES:
            receipt.faults.append(f"{item.where}: {error}")
        return None
    if any(questions.met_by(message["content"]) for message in feedback.prompt if message["role"] == "user"):
        receipt.leaked += 1
        return None
    clean = masked(feedback.texts)
    if not clean.found:
        return feedback
    receipt.personal.update(clean.found)
    count = len(feedback.prompt)
    prompt = [
        message | {"content": text}
        for message, text in zip(feedback.prompt, clean.texts[:count], strict=True)
    ]
    return feedback.model_copy(update={"prompt": tuple(prompt), "answers": tuple(clean.texts[count:])})


def rows_of(place: str) -> Iterator[ReceivedRow]:
    """Yields the rows of a JSONL file or of a URL that fsspec reads. Decompresses files that end with .gz.
    Leaves out withdrawn labels.

    Raises ValueError when the file or URL cannot be read.
    """
    undone: set[str] | None = None
    for number, line in enumerate(_lines(place), start=1):
        where = f"{public_address(place)}, line {number}"
        if len(line) > LARGEST_LINE:
            yield ReceivedRow(where, None, f"the line has more than {LARGEST_LINE >> 20} MiB")
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # rejects lone surrogates
        except (ValueError, RecursionError):
            yield ReceivedRow(where, None, "is not JSON in UTF-8")
            continue
        if undone is None:
            undone = _undone(place) if isinstance(row, dict) and "verdict" in row else set()
        identity = row.get("id") if isinstance(row, dict) else None
        if not (isinstance(identity, str) and identity in undone):
            yield ReceivedRow(where, row, size=len(line))


def _undone(place: str) -> set[str]:
    """Returns the ids of the labels that other lines in a file of the labelling page withdraw."""
    found: set[str] = set()
    for line in _lines(place):
        if b'"undone"' in line:
            try:
                identity = json.loads(line).get("undone")
            except (ValueError, AttributeError, RecursionError):
                continue
            if isinstance(identity, str) and identity:
                found.add(identity)
    return found


def _lines(place: str) -> Iterator[bytes]:
    try:
        with fsspec.open(place, "rb", compression="infer") as file:
            while line := file.readline(LARGEST_LINE + 1):
                yield line
                # skip the rest of a line that is too long
                while len(line) > LARGEST_LINE and not line.endswith(b"\n"):
                    line = file.readline(LARGEST_LINE + 1)
    except (OSError, ValueError, ImportError) as error:
        reason = (
            getattr(error, "strerror", None)
            or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        raise ValueError(
            f"{public_address(place)}: cannot be read ({public_address(reason)}): give a JSONL file or a URL"
            " of one"
        ) from None
