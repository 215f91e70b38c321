"""Rows changed at random, in every data format: they are read and reported on, or refused in a sentence of
ours that names the file."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config import Data
from rlhf_core.config.data import Rows, Source
from rlhf_core.data.chat import Renderer
from rlhf_core.data.data_report import markdown, surveys_of
from rlhf_core.data.questions import load_questions
from rlhf_core.data.rows.mixture import check_columns, load_rows
from rlhf_core.data.sources import (
    answer_documents,
    labelled_answers,
    preference_pairs,
    prompts,
    sft_documents,
)
from tests.support.mutations import fault_of, places

TURNS = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
WRONG = [TURNS[0], {"role": "assistant", "content": "5"}]
HUMAN = "\n\nHuman: 2 + 2\n\nAssistant: "
RATED = {"annotations": {"honesty": {"Rating": "4"}, "truth": {"Rating": "N/A"}}, "fine-grained_score": 3.5}
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "columns": (
        {"messages": TURNS, "prompt": "2 + 2", "response": "4", "reward": 0.5, "label": True},
        {"prompt": TURNS[:1], "chosen": "4", "rejected": "5", "margin": 1.5},
        {"chosen": TURNS, "rejected": WRONG},
    ),
    "ultrafeedback": (
        {
            "instruction": "2 + 2",
            "completions": [{"response": "5", "overall_score": 2.0}, {"response": "4", **RATED}],
        },
        dict(
            prompt="2 + 2", chosen=TURNS, rejected=WRONG, messages=TURNS, score_chosen=8.5, score_rejected=2
        ),
    ),
    "arena": ({"winner": "model_a", "conversation_a": TURNS, "conversation_b": WRONG},),
    "hh": ({"chosen": HUMAN + "4", "rejected": HUMAN + "5"},),
    "sharegpt": ({"conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]},),
}
LOADERS: dict[Rows, Callable[..., Any]] = {
    "sft": sft_documents,
    "preference": preference_pairs,
    "prompt": prompts,
    "answer": lambda *given: answer_documents(*given, "none").documents,
    "labelled": labelled_answers,
    "scored": lambda *given: answer_documents(*given, "reward").documents,
}
# Numbers beyond floats, lone surrogates, control tokens, texts that formats give a meaning, and values of
# other types.
ODD = (10**400, 1e308, math.nan, math.inf, -1, True, None, [], {}, [{}], [None], {"a": 1})
ODD = (*ODD, "\ud800", "\x00", "<|im_end|>", "N/A", "tie", "assistant", "nan", "", HUMAN, "{}", "a" * 3000)
CHARACTERS = st.text(st.characters(exclude_categories=()), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | CHARACTERS | st.sampled_from(ODD)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CHARACTERS, inner, max_size=3),
    max_leaves=5,
)
KINDS = st.sampled_from(get_args(Rows))
SETTINGS = settings(max_examples=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


SOUND = ("accepted", "refused")


def outcome(file: Path, content: bytes, kind: Rows, renderer: Renderer, form: str = "auto") -> str:
    """Checks, reads and reports on a data set, as `validate --here`, a stage and `alignflow data` do. Returns
    "accepted"; "refused" for a ValueError of ours that names the file; or what is wrong with the error. Any
    other exception passes through.
    """
    file.write_bytes(content)
    data = Data.model_validate({"sources": [{"path": str(file), "format": form}]})
    try:
        check_columns(data, kind)
        load_rows(data, 0, kind)
        markdown(surveys_of({"data": LOADERS[kind](data, renderer, 64, 0).report})).encode()
    except ValueError as error:
        return fault_of(error) or (
            "refused" if str(error).startswith(str(file)) else f"the file is not named: {error}"
        )
    return "accepted"


@pytest.mark.parametrize("form", ROWS)
# of the spread of margins near the largest number
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_every_value_of_a_row_replaced_by_an_odd_one(folder: Path, renderer: Renderer, form: str) -> None:
    kinds = cycle(LOADERS)
    for row in ROWS[form]:
        for index in range(len(places(row))):
            for value in ODD:
                other = copy.deepcopy(row)
                holder, key = places(other)[index]
                holder[key] = value
                for kind in (next(kinds), next(kinds)):
                    assert (
                        outcome(
                            folder / "odd.jsonl",
                            f"{json.dumps(other)}\n{json.dumps(row)}\n".encode(),
                            kind,
                            renderer,
                        )
                        in SOUND
                    )


@st.composite
def changed(draw: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row in which up to two values were replaced, dropped, doubled or given another key."""
    row = copy.deepcopy(row)
    for _ in range(draw(st.integers(0, 2))):
        found = places(row)
        if found:
            holder, key = draw(st.sampled_from(found))
            match draw(st.sampled_from(("replace", "drop", "rename", "double"))):
                case "replace":
                    holder[key] = copy.deepcopy(draw(VALUES))  # those of ODD are shared between draws
                case "drop":
                    del holder[key]
                case "rename" if isinstance(holder, dict):
                    holder[draw(CHARACTERS)] = holder.pop(key)
                case "double" if isinstance(holder, list):
                    holder.insert(0, copy.deepcopy(holder[key]))
    return row


@st.composite
def data_sets(draw: Callable[..., Any]) -> tuple[str, list[dict[str, Any]]]:
    """A format, and one to three changed rows of it."""
    form = draw(st.sampled_from(list(ROWS)))
    row = draw(st.sampled_from(ROWS[form]))
    return form, [draw(changed(row)) for _ in range(draw(st.integers(1, 3)))]


@SETTINGS
@given(data_sets(), KINDS, st.booleans(), st.booleans())
def test_rows_with_other_values(
    folder: Path,
    renderer: Renderer,
    rows: tuple[str, list[dict[str, Any]]],
    kind: Rows,
    named: bool,
    whole: bool,
) -> None:
    form, items = rows
    text = json.dumps(items) if whole else "".join(json.dumps(row) + "\n" for row in items)
    assert (
        outcome(
            folder / ("rows.json" if whole else "rows.jsonl"),
            text.encode(),
            kind,
            renderer,
            form if named else "auto",
        )
        in SOUND
    )


@SETTINGS
@given(
    st.lists(
        st.sampled_from(
            ({"uid": "x", "prompt": "2 + 2", "answer": "4"}, {"question_id": 1, "turns": TURNS[:1]})
        ).flatmap(changed)
    )
)
def test_questions_with_other_values(folder: Path, rows: list[dict[str, Any]]) -> None:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        load_questions(Source(path=str(file)), None, 0)
    except ValueError as error:
        assert not fault_of(error) and str(error).startswith(str(file)), error


@SETTINGS
@given(st.data(), KINDS)
def test_lines_with_other_characters(
    folder: Path, renderer: Renderer, data: st.DataObject, kind: Rows
) -> None:
    content = (
        data.draw(st.sampled_from([json.dumps(row) for rows in ROWS.values() for row in rows])).encode()
        + b"\n"
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        more = data.draw(
            st.binary(max_size=4)
            | st.sampled_from((b"[", b"}", b'"', b"\r", b"NaN", b"\\", b"\xef\xbb\xbf", b"1e999"))
        )
        content = content[:at] + more + content[data.draw(st.integers(at, len(content))) :]
    assert (
        outcome(
            folder / data.draw(st.sampled_from(("cut.jsonl", "cut.json", "cut.csv"))), content, kind, renderer
        )
        in SOUND
    )


@settings(max_examples=100)
@given(st.lists(st.lists(CHARACTERS, min_size=1, max_size=4), min_size=1, max_size=4), KINDS)
def test_tables_of_text(folder: Path, renderer: Renderer, cells: list[list[str]], kind: Rows) -> None:
    text = io.StringIO()
    writer = csv.writer(text, escapechar="\\")
    writer.writerow(("prompt", "chosen", "rejected", "response", "label", "reward")[: len(cells[0])])
    writer.writerows(cells)
    assert (
        outcome(folder / "table.csv", text.getvalue().encode("utf-8", "surrogatepass"), kind, renderer)
        in SOUND
    )


@settings(max_examples=60)
@given(st.binary(max_size=60), st.sampled_from((".jsonl", ".json", ".csv", ".parquet", ".txt", "")))
def test_any_bytes(folder: Path, renderer: Renderer, content: bytes, suffix: str) -> None:
    assert outcome(folder / f"bytes{suffix}", content, "sft", renderer) in SOUND


@pytest.mark.parametrize("form", ROWS)
def test_the_rows_are_right_before_they_are_changed(folder: Path, renderer: Renderer, form: str) -> None:
    for row in ROWS[form]:
        text = json.dumps(row).encode()
        assert [
            kind for kind in LOADERS if outcome(folder / "right.jsonl", text, kind, renderer) == "accepted"
        ], row
