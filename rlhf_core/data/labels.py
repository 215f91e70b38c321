"""Reads labels that people gave to pairs of answers, one JSON object per line. Torch-free.

{"id", "uid", "prompt": [messages], "answer_a", "answer_b", "verdict": "A>>B" | "A>B" | "A=B" | "B>A" | "B>>A"
| null (skipped), "annotator", "repeat_of": id | null, "undone": id | null} and, if known, "shown_first": "a"
| "b" and "seconds". Other keys are ignored.

A verdict refers to `answer_a` and `answer_b`, regardless of the order in which they were shown. A line with
`undone` withdraws the label with that id and needs no other keys. A label with `repeat_of` repeats a pair for
the same annotator. It measures whether annotators agree with themselves, and is not a second vote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, ValidationError

from rlhf_core.data.documents import Message
from rlhf_core.data.rows.columns import Located, prompt_of
from rlhf_core.records import POINTS, Frozen, Label
from rlhf_core.system.files import digest

VERDICTS: tuple[Label, ...] = ("A>>B", "A>B", "A=B", "B>A", "B>>A")
SHOWN_FAULTS = 20  # most faults of a file shown in one message


class LabelLine(Frozen):
    """Holds one label. `sign` is 1 if answer A is better, -1 if B is better, and 0 for a tie. `shown_first`
    and `seconds` are None if the file does not have them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    uid: str
    prompt: tuple[dict[str, Any], ...]
    answer_a: str
    answer_b: str
    verdict: Label | None
    annotator: str = ""
    shown_first: Literal["a", "b"] | None = None
    seconds: float | None = None
    repeat_of: str | None = None
    undone: str | None = None

    @cached_property
    def key(self) -> str:
        """Returns a key that all labels of a pair share, regardless of which answer is A."""
        return digest([self.uid, list(self.prompt), *sorted((self.answer_a, self.answer_b))])

    @property
    def sign(self) -> int:
        assert self.verdict is not None
        return round(2 * POINTS[self.verdict] - 1)

    @property
    def strength(self) -> int:
        """Returns the verdict's index in VERDICTS, from 0 (A is much better) to 4 (B is much better). The
        label must not be skipped."""
        assert self.verdict is not None, "a skipped pair has no verdict"
        return VERDICTS.index(self.verdict)

    @property
    def winner(self) -> int:
        """Returns 0 for A, 1 for a tie, 2 for B."""
        return 1 - self.sign

    def turned(self) -> LabelLine:
        """Returns the label with its answers swapped."""
        sides: dict[str | None, Literal["a", "b"] | None] = {"a": "b", "b": "a", None: None}
        changes: dict[str, Any] = {
            "answer_a": self.answer_b,
            "answer_b": self.answer_a,
            "shown_first": sides[self.shown_first],
        }
        if self.verdict is not None:
            changes["verdict"] = VERDICTS[-1 - VERDICTS.index(self.verdict)]
        return LabelLine(**self.model_dump() | changes)


class LabelledPair(NamedTuple):
    """Holds a pair of answers with each annotator's sign (1: A is better, 0: a tie, -1: B is better). `uid`
    identifies the question, and is shared by all its pairs. `key` is unique to the pair. `repeats` holds a
    (first, second) pair of signs for each repeated label."""

    uid: str
    key: str
    messages: tuple[Message, ...]
    answer_a: str
    answer_b: str
    votes: dict[str, int]
    repeats: tuple[tuple[int, int], ...] = ()

    @property
    def sign(self) -> int:
        """Returns the sign that most annotators gave, or 0 (a tie) if no sign has the most votes."""
        (first, most), *others = Counter(self.votes.values()).most_common()
        return first if not others or others[0][1] < most else 0


def load_labels(path: str | Path, max_labels: int | None = None) -> list[LabelledPair]:
    """Returns the pairs in a file that have a verdict, in the order of their last labels, limited to the last
    `max_labels` (None: all).

    An annotator's later label of a pair replaces the earlier one. Raises ValueError for the same reasons as
    `read_label_file`, and if no label in the file counts.
    """
    pairs = _pairs({label.id: label for label in read_label_file(path) if label.verdict is not None})
    if not pairs:
        raise ValueError(
            f"{path}: has no label that counts (skipped and taken back ones do not): label pairs first"
        )
    return pairs[-max_labels:] if max_labels else pairs


def read_label_file(path: str | Path) -> list[LabelLine]:
    """Returns the labels in a file that were not withdrawn, including skipped labels, in the order of the
    file. All labels of a pair get the answer order of its first label, even if their lines have the answers
    swapped.

    Leaves out a last line that has no newline and is not JSON, because a crash truncated it. Raises
    ValueError with the file's faults and their lines.
    """
    faults: list[str] = []
    labels: dict[str, LabelLine] = {}
    lines: dict[str, int] = {}
    undone: dict[str, int] = {}
    for number, row in _rows(Path(path), faults):
        target = row.get("undone")
        if target is not None:
            undone[str(target)] = number
        elif (label := _label(f"line {number}", row, faults)) is not None:
            if label.id in labels:
                faults.append(
                    f"line {number}: has the id {label.id!r} of line {lines[label.id]}: give each label an id"
                    " of its own"
                )
            labels[label.id] = label
            lines[label.id] = number
    if not faults:  # otherwise ids of faulty lines would be reported as missing
        faults += [
            f"line {n}: takes back the label {target!r}, which is not here"
            for target, n in undone.items()
            if target not in labels
        ]
        named = [(label.repeat_of, label.id) for label in labels.values() if label.repeat_of is not None]
        faults += [
            f"line {lines[own]}: repeats the label {first!r}, which is not here"
            for first, own in named
            if first not in labels
        ]
    if faults:
        more = [f"and {len(faults) - SHOWN_FAULTS} lines more"] if len(faults) > SHOWN_FAULTS else []
        raise ValueError(
            f"{path}: correct or remove these lines: " + "; ".join([*faults[:SHOWN_FAULTS], *more])
        )
    first_answers: dict[str, str] = {}
    found = []
    for name, label in labels.items():
        if name not in undone:
            is_turned = label.answer_a != first_answers.setdefault(label.key, label.answer_a)
            found.append(label.turned() if is_turned else label)
    return found


def _rows(path: Path, faults: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: give the labels as a local .jsonl file")
    *lines, unended = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, unended], 1):
        if not line.strip() or (number > len(lines) and _was_cut(line)):
            continue
        try:
            row = json.loads(line.decode())
            # rejects lone surrogates, which no request can contain
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            faults.append(f"line {number}: is not JSON in UTF-8 ({str(error)[:100]})")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            faults.append(f"line {number}: is not a JSON object")


def _was_cut(line: bytes) -> bool:
    """Returns whether a file's last line, which has no newline, is incomplete JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _label(where: str, row: dict[str, Any], faults: list[str]) -> LabelLine | None:
    try:
        label = LabelLine.model_validate(row)
        prompt_of(Located("", {"prompt": list(label.prompt)}))
        return label
    except ValidationError as error:
        wrong = [
            (".".join(map(str, fault["loc"])), fault["type"], fault["input"]) for fault in error.errors()
        ]
        told = [
            f"{field} is missing" if kind == "missing" else _wrong(field, given)
            for field, kind, given in wrong
        ]
        faults.append(f"{where}: {', '.join(told)}")
    except ValueError as error:
        faults.append(f"{where}: {str(error).removeprefix(': ').removesuffix(': correct or drop the row')}")
    return None


def _wrong(field: str, given: object) -> str:
    needed = f" (one of {', '.join(POINTS)}, or null)" if field == "verdict" else ""
    return f"{field} is {str(given)[:40]!r}{needed}"


def _pairs(labels: Mapping[str, LabelLine]) -> list[LabelledPair]:
    """Groups the labels by pair, with one vote per annotator.

    A repeated label counts as a vote if the label that it repeats does not count.
    """
    votes: dict[str, dict[str, int]] = {}
    repeats: dict[str, list[tuple[int, int]]] = {}
    about: dict[str, LabelLine] = {}
    for label in labels.values():
        about.setdefault(label.key, label)
        before = labels.get(label.repeat_of) if label.repeat_of is not None else None
        if before is not None:
            repeats.setdefault(label.key, []).append((before.sign, label.sign))
            continue
        # reinserted at the end, so that pairs are in the order of their last labels
        given = votes.pop(label.key, {})
        votes[label.key] = given | {label.annotator: label.sign}
    uids = Counter(about[key].uid for key in votes)
    seen: Counter[str] = Counter()
    pairs = []
    for key, given in votes.items():
        one = about[key]
        seen[one.uid] += 1
        own = one.uid if uids[one.uid] == 1 else f"{one.uid}#{seen[one.uid]}"
        pairs.append(
            LabelledPair(
                one.uid, own, one.prompt, one.answer_a, one.answer_b, given, tuple(repeats.get(key, ()))
            )
        )
    return pairs
