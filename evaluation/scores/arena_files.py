"""Reads files of judgments and answers in Arena-Hard's formats, v2.0 and v0.1, and writes judgments in the
v2.0 format. Torch-free.

Judgments, one per line: v2.0 {uid, category, judge, model, baseline, games[2]{score, judgment, prompt}}, v0.1
{question_id, model, judge, games[2]{user_prompt, judgment, score}}. Answers: v2.0 {uid, model, messages,
metadata}, v0.1 {question_id, model_id, choices, conv_metadata}. Scores that the original's regex accepts by
mistake (`[A]`, `A>>>B`), and scores of failed games (null), count as games without a verdict. Our files
follow v2.0; extra fields are outside `metadata`, because the original code counts the columns of `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.scores.style import Style, markdown, style_of
from rlhf_core.judging.judge_reply import label_of
from rlhf_core.records import Game, Judgment

V01 = "arena-hard-v0.1"
V01_BASELINE = "gpt-4-0314"
JUDGMENTS = ("judgments", "model_judgment")
ANSWERS = ("answers", "model_answer")

TokenCount = Callable[[str], int]


class Folders(NamedTuple):
    """The folders of judgments and of answers (None if there are no answers)."""

    judgments: Path
    answers: Path | None


def folders(folder: Path) -> Folders:
    """Finds the two folders of a benchmark (`model_judgment/`, `model_answer/`), of an evaluation's report
    (`judgments/`, `answers/`), or of an evaluation's run directory. Any other folder is taken as a folder of
    judgments. Raises ValueError when `folder` is not a folder."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: give one with judgments (model_judgment/<judge>/<model>.jsonl, or a"
            " report's judgments/)"
        )
    for root in (folder, folder / "report"):
        judged = next((root / name for name in JUDGMENTS if (root / name).is_dir()), None)
        if judged:
            return Folders(judged, next((root / name for name in ANSWERS if (root / name).is_dir()), None))
    # beside model_judgment/, or beside the parent of a judge's folder
    siblings = (place / name for place in (folder.parent, folder.parent.parent) for name in ANSWERS)
    named = folder.name in JUDGMENTS or folder.parent.name in JUDGMENTS
    return Folders(folder, next((place for place in siblings if place.is_dir()), None) if named else None)


def read_judgments(folder: Path) -> list[Judgment]:
    """Reads all judgments in a folder and its subfolders, sorted by judge, model, baseline and question,
    without duplicates.

    Raises ValueError for a line that is not a judgment, for two different judgments of one battle by one
    judge, and when there are no judgments.
    """
    found: dict[tuple[str, ...], Judgment] = {}
    for where, row in rows_of(folder):
        try:
            judgment = to_judgment(row)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{where}: is not a judgment ({type(error).__name__}: {error}): give a folder with judgments"
                " only"
            ) from None
        key = (judgment.judge, judgment.model, judgment.baseline, judgment.uid)
        if found.setdefault(key, judgment) != judgment:
            raise ValueError(
                f"{where}: {judgment.judge} has another judgment of {judgment.model} on {judgment.uid}:"
                " remove one of the two"
            )
    if not found:
        raise ValueError(f"{folder}: has no judgments (*.jsonl): give the folder that holds them")
    return [found[key] for key in sorted(found)]


def to_judgment(row: dict[str, Any]) -> Judgment:
    """Returns the judgment in a published line. Raises KeyError, TypeError or ValueError when the line is not
    a judgment."""
    old = "question_id" in row
    first, second = row["games"]
    return Judgment(
        uid=str(row["question_id"] if old else row["uid"]),
        category=str(row.get("category", V01)),
        judge=row["judge"],
        model=row["model"],
        baseline=row.get("baseline", V01_BASELINE) if old else row["baseline"],
        games=(_game(first), _game(second)),
    )


def read_styles(folder: Path, count_tokens: TokenCount | None = None) -> dict[tuple[str, str], Style]:
    """Returns the style of every answer in a folder, by (model, uid). Counts come from the metadata, or else
    from the text.

    Raises ValueError for a line that is not an answer, and when a length is missing and `count_tokens` is
    None.
    """
    styles: dict[tuple[str, str], Style] = {}
    for where, row in rows_of(folder):
        try:
            old = "choices" in row
            model, uid = (row["model_id"], row["question_id"]) if old else (row["model"], row["uid"])
            metadata = dict((row.get("conv_metadata") if old else row.get("metadata")) or {})
            text = row["choices"][0]["turns"][-1]["content"] if old else row["messages"][-1]["content"]
            text = text["answer"] if isinstance(text, dict) else text
            length = metadata.get(
                "token_len", row["choices"][0]["turns"][-1].get("token_len") if old else None
            )
            text = "" if text is None else text  # after a failed request
            counted = markdown(text)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{where}: is not an answer ({type(error).__name__}: {error}): give a folder with answers"
                " only"
            ) from None
        if length is None and count_tokens is None:
            raise ValueError(
                f"{where}: the answer has no token_len: give a tokenizer to count tokens with (--tokenizer)"
            )
        if length is None and count_tokens is not None:
            length = count_tokens(text)
        styles[str(model), str(uid)] = style_of({**counted, **metadata, "token_len": length})
    return styles


def token_counter(name: str) -> TokenCount:
    """Returns a function that counts tokens: for "gpt-4o" as arena-hard-auto does (with tiktoken, which
    downloads the encoding once), otherwise with a model's tokenizer."""
    if name == "gpt-4o":
        import tiktoken

        encoding = tiktoken.encoding_for_model(name)
        return lambda text: len(encoding.encode(text, disallowed_special=()))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def judgment_lines(judgments: Sequence[Judgment]) -> str:
    """Returns the contents of a judgments file that arena-hard-auto can read."""
    return "".join(judgment.model_dump_json() + "\n" for judgment in judgments)


def _game(game: Any) -> Game:
    if game is None:  # a failed request in the original
        return Game(score=None, judgment={})
    text = game.get("judgment")
    words = text if isinstance(text, dict) else {"answer": text}
    prompt = game.get("prompt") or (
        [{"role": "user", "content": game["user_prompt"]}] if "user_prompt" in game else []
    )
    return Game(
        score=label_of(game["score"]),
        judgment={name: value for name, value in words.items() if isinstance(value, str)},
        prompt=tuple({"role": message["role"], "content": str(message["content"])} for message in prompt),
    )


def rows_of(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of all .jsonl files below a folder, each with its location. Raises ValueError for an
    invalid line."""
    for file in sorted(folder.rglob("*.jsonl")):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(
                f"{file}: is not UTF-8 text: convert it, or leave it out of the folder"
            ) from None
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: is not valid JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: must be a JSON object")
            yield where, row
