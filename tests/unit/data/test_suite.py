"""The file of a regression suite: what is added, what is left as it was, and every fault in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Source
from rlhf_core.data.questions import load_questions
from rlhf_core.data.suite import SuiteQuestion, add_to_suite, read_suite


def question(uid: str = "q1", prompt: Any = "Why?", **changes: Any) -> SuiteQuestion:
    return SuiteQuestion(uid=uid, prompt=prompt, reason="lost", **changes)


def test_a_question_is_added_once_with_its_time(tmp_path: Path) -> None:
    suite = tmp_path / "new" / "suite.jsonl"
    added = add_to_suite(suite, [question(), question("q2", "How?", answer="so", source="night 3")])
    assert [one.uid for one in added] == ["q1", "q2"] and all(one.added.endswith("+00:00") for one in added)
    assert (
        add_to_suite(
            suite,
            [question(), question("other", "Why?"), question("x", [{"role": "user", "content": "How?"}])],
        )
        == []
    )
    assert read_suite(suite) == added


def test_earlier_lines_stay_as_they_were(tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    first = '{"prompt": "Older?",   "reason": "reported", "own": [1]}'
    suite.write_text(first)  # without a line break at its end
    add_to_suite(suite, [question()])
    assert suite.read_text().splitlines()[0] == first and [one.text for one in read_suite(suite)] == [
        "Older?",
        "Why?",
    ]


def test_a_uid_of_another_prompt_is_made_longer(tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    add_to_suite(suite, [question(), question("q1", "Something else?")])
    first, second = read_suite(suite)
    assert first.uid == "q1" and second.uid.startswith("q1-") and len(second.uid) == 11


def test_an_evaluation_reads_a_suite_as_questions(tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How?"}]
    add_to_suite(suite, [question(answer="because"), question("q2", chat, category="creative_writing")])
    one, other = load_questions(Source(path=str(suite)), None, 0)
    assert one.uid == "q1"
    assert one.prompt == "Why?"
    assert one.known_answer("answer") == "because"
    assert one.row["reason"] == "lost"
    assert other.messages == tuple(chat) and other.category == "creative_writing"


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "reported.jsonl"
    file.write_text(
        '{"prompt": "a"}\n[]\n{"reason": "r"}\n{"prompt": [], "reason": "r"}\n{\n{"prompt": "b", "reason":'
        ' "wrong"}\n'
    )
    with pytest.raises(ValueError) as error:
        read_suite(file)
    told = str(error.value)
    for part in (
        "line 1: reason: Field required",
        "line 2: is not a JSON object",
        "line 3: prompt",
        "line 4: ",
        "line 5: ",
    ):
        assert part in told, part
    assert "line 6" not in told
    with pytest.raises(ValueError, match="there is no such file"):
        read_suite(tmp_path / "none.jsonl")


def test_a_reason_for_all_fills_only_missing_ones(tmp_path: Path) -> None:
    file = tmp_path / "reported.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"prompt": "a"}, {"prompt": "b", "reason": "own"}))
    )
    assert [one.reason for one in read_suite(file, "reported by a user")] == ["reported by a user", "own"]
