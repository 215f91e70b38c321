"""What a row of each format says, and the sentence for each malformed one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rlhf_core.feedback.parse import Unusable, feedback_of

PROMPT = ({"role": "user", "content": "q"},)
LOG = {
    "request": {"model": "asked", "messages": [{"role": "user", "content": "q"}], "user": "ann"},
    "response": dict(
        model="answered", created=1_790_000_000, choices=[{"message": {"role": "assistant", "content": "a"}}]
    ),
}


@pytest.mark.parametrize(
    ("row", "kind", "answers", "ranks"),
    [
        ({"response": "a", "thumb": "up"}, "thumb", ("a",), (1,)),
        ({"response": "a", "thumb": "down"}, "thumb", ("a",), (0,)),
        ({"response": "a", "label": False}, "thumb", ("a",), (0,)),
        ({"response": "a", "rating": -1}, "thumb", ("a",), (0,)),
        ({"response": "a", "rating": 1.0}, "thumb", ("a",), (1,)),
        ({"response": "a", "thumb": None, "label": True}, "thumb", ("a",), (1,)),
        ({"ranking": [["a"], [], ["b"]]}, "ranking", ("a", "b"), (0, 1)),
        ({"response": "a", "edited": "b"}, "edit", ("a", "b"), (1, 0)),
        ({"chosen": "a", "rejected": "b"}, "ranking", ("a", "b"), (0, 1)),
        ({"chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"}, "ranking", ("a", "b"), (0, 1)),
        ({"ranking": ["a", "b", "c"]}, "ranking", ("a", "b", "c"), (0, 1, 2)),
        ({"ranking": ["a", ["b", "c"], "d"]}, "ranking", ("a", "b", "c", "d"), (0, 1, 1, 2)),
        ({"answer_a": "a", "answer_b": "b", "verdict": "A>>B"}, "ranking", ("a", "b"), (0, 1)),
        ({"answer_a": "a", "answer_b": "b", "verdict": "B>A"}, "ranking", ("a", "b"), (1, 0)),
    ],
)
def test_each_kind_of_row(
    row: dict[str, Any], kind: str, answers: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    read = feedback_of({"prompt": "q", **row})
    assert (read.kind, read.prompt, read.answers, read.ranks) == (kind, PROMPT, answers, ranks)


@pytest.mark.parametrize("feedback", [{"rating": "up"}, {"thumb": 1}, {"label": True}])
def test_a_logged_completion_with_its_feedback(feedback: dict[str, Any]) -> None:
    read = feedback_of({**LOG, "feedback": feedback}, "log")
    assert (read.kind, read.answers, read.ranks, read.model, read.annotator, read.source) == (
        "thumb",
        ("a",),
        (1,),
        "answered",
        "ann",
        "log",
    )
    assert read.at == datetime.fromtimestamp(1_790_000_000, UTC)


def test_a_stored_completion_in_one_object_with_an_edit() -> None:
    row = {
        "messages": LOG["request"]["messages"],
        **LOG["response"],
        "metadata": {"edited": "better", "user": "bob"},
    }
    read = feedback_of(row)
    assert (read.kind, read.answers, read.annotator) == ("edit", ("a", "better"), "bob")


@pytest.mark.parametrize(
    "at", ["2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31T12:00:00", 1769860800]
)
def test_times_are_utc(at: Any) -> None:
    assert feedback_of({"prompt": "q", "response": "a", "thumb": "up", "at": at}).at == datetime(
        2026, 1, 31, 12, tzinfo=UTC
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "response": "a"}, "no feedback"),
        ({"prompt": "q", "response": "a", "edited": "a"}, "two equal answers"),
        ({"prompt": "q", "ranking": [["a", "b"]]}, "prefers no answer"),
        ({"prompt": "q", "ranking": [["a", "b"], []]}, "prefers no answer"),
        ({"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": "A=B"}, "a tie"),
        ({"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": None}, "skipped"),
        ({"undone": "x"}, "taken back"),
        (
            {**LOG, "response": {"choices": [{"message": {"content": None}}]}, "feedback": {"rating": 1}},
            "without text",
        ),
        (
            dict(prompt=[{"role": "user", "content": [{"type": "image_url"}]}], response="a", thumb="up"),
            "images",
        ),
    ],
)
def test_rows_that_judge_nothing_are_counted_apart(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        feedback_of(row)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([1], "must be a JSON object, found list"),
        ({"prompt": "q", "response": "a", "thumb": "sideways"}, "thumb must be up or down"),
        ({"prompt": "q", "response": "a", "thumb": 3}, "thumb must be up or down"),
        ({"prompt": "q", "response": " ", "thumb": "up"}, "response must be a text of 1 to"),
        ({"prompt": "q", "response": 5, "thumb": "up"}, "response must be a text"),
        ({"prompt": "", "response": "a", "thumb": "up"}, "prompt must be a text or a list"),
        ({"prompt": [{"role": "boss", "content": "q"}], "response": "a", "thumb": "up"}, "needs a role"),
        (
            {"prompt": [{"role": "assistant", "content": "q"}], "response": "a", "thumb": "up"},
            "nothing to answer",
        ),
        ({"prompt": "q", "ranking": ["a", "a"]}, "ranking must be a list of two or more different"),
        ({"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": "A"}, "verdict must be one of"),
        ({"prompt": "q", "ranking": [str(n) for n in range(17)]}, "ranking has 17 answers: give at most 16"),
        (
            {"prompt": "q", "ranking": ["a", "b" * 1_000_001]},
            "each answer of ranking must have at most 1,000,000 characters",
        ),
        (
            {"prompt": [{"role": "user", "content": "q" * 600_000}] * 2, "response": "a", "thumb": 1},
            "the prompt must have at most 1,000,000",
        ),
        ({"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": ["A>B"]}, "verdict must be one of"),
        (
            {"prompt": "q", "response": "a", "thumb": "up", "at": "0001-01-01T00:00:00+14:00"},
            "at must be a time",
        ),
        (
            {"prompt": "q", "response": "a", "thumb": "up", "annotator": "x" * 201},
            "annotator must be a text of at most 200",
        ),
        (
            {"prompt": "q", "response": "a", "thumb": "up", "user": "x" * 201},
            "user must be a text of at most 200",
        ),
        ({"prompt": "q", "response": "a", "thumb": "up", "at": "yesterday"}, "at must be a time"),
        ({"prompt": "q", "response": "a", "thumb": "up", "annotator": ["x"]}, "annotator must be a text"),
        ({"choices": 5, "messages": []}, "a log needs request.messages"),
    ],
)
def test_malformed_rows_are_one_sentence(row: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as told:
        feedback_of(row)
    assert not isinstance(told.value, Unusable)


def test_a_time_that_is_null_gives_way_to_the_next_column() -> None:
    read = feedback_of({"prompt": "q", "response": "a", "thumb": "up", "at": None, "created": 5})
    assert read.at == datetime.fromtimestamp(5, UTC)


def test_a_name_for_all_rows_is_not_cut_either() -> None:
    with pytest.raises(ValueError, match="at most 200"):
        feedback_of({"prompt": "q", "response": "a", "thumb": "up"}, annotator="x" * 201)
