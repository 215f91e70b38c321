"""Questions and answers in the formats of Arena-Hard and ours, style counts, and the names of files and
judges."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evaluation.answers.local_answers import file_name, read_answers
from evaluation.judges.factory import judge_names
from evaluation.scores.style import markdown
from rlhf_core.config import OpenAIJudge, RewardJudge, RuleJudge, Source
from rlhf_core.data.questions import load_questions
from tests.support.text_rows import rows_of_text

ARENA_HARD = Path(__file__).parents[5] / "shared" / "data" / "arena-hard"


def write(folder: Path, *rows: dict[str, Any]) -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path))


def test_both_versions_of_arena_hard_questions_are_read(tmp_path: Path) -> None:
    old = dict(question_id="old", category="arena-hard-v0.1", cluster="c", turns=[{"content": "What?"}])
    new = {"uid": "new", "category": "hard_prompt", "subcategory": "math", "prompt": "Why?"}
    bare = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]}
    first, second, third = load_questions(write(tmp_path, old, new, bare), None, 0)
    assert (first.uid, first.prompt, second.uid, second.category) == ("old", "What?", "new", "hard_prompt")
    assert third.category == "all" and third.prompt == "system: Be brief.\n\nuser: How?"
    (again,) = load_questions(write(tmp_path, bare), None, 0)
    assert again.uid == third.uid  # a digest of the prompt, wherever the row stands
    assert [q.uid for q in load_questions(write(tmp_path, old, new), 1, 0)] == ["old"]


def test_a_question_without_a_known_answer_is_named_by_file_and_row(tmp_path: Path) -> None:
    source = write(tmp_path, {"question": "x", "gold_answer": "y", "answer": 0})
    (question,) = load_questions(source.model_copy(update={"prompt_key": "question"}), None, 0)
    assert question.known_answer("answer") == "0"
    told = (
        f"{source.path}, row 1: there is no column 'gold', which the rule judge compares answers with; its"
        " other columns are "
    )
    with pytest.raises(
        ValueError,
        match=(
            f"^{re.escape(told)}gold_answer, answer: set answer_key: gold_answer in the rule judge, or choose"
            " another judge"
        ),
    ):
        question.known_answer("gold")


@pytest.mark.parametrize(
    ("rows", "message"),
    rows_of_text(r"""
    [{uid: a, prompt: x}, {uid: a, prompt: y}] | row 2: has the uid 'a' of row 1
    [{prompt: x}, {prompt: x}] | row 2: has the uid .* of row 1 \(without a uid: the same prompt\)
    [{text: x}] | row 1: there is no column 'prompt', nor 'turns'; its columns are text: set prompt_key in the questions
    [{answer: y, question: x}] | its columns are answer, question: set prompt_key: question in the questions
    [{prompt: '  '}] | row 1: the prompt is empty
    [{prompt: 3}] | row 1: column 'prompt' must be a string or a list of messages, found int: write it as text
    [{turns: [3]}] | row 1: message 1
    """),
)
def test_bad_questions_are_refused_with_their_row(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_questions(write(tmp_path, *rows), None, 0)


@pytest.mark.skipif(
    not ARENA_HARD.is_dir(), reason="the question files of arena-hard-auto are not beside the repository"
)
@pytest.mark.parametrize(("name", "count", "categories"), [("v0.1", 500, 1), ("v2.0", 750, 2)])
def test_the_published_question_files_are_read(name: str, count: int, categories: int) -> None:
    questions = load_questions(Source(path=str(ARENA_HARD / f"{name}-question.jsonl")), None, 0)
    assert len(questions) == count and len({question.category for question in questions}) == categories


def test_markdown_is_counted_outside_code() -> None:
    text = "# One\n## Two\n- a\n* b\n1. c\n**bold** and __bold__\n```\n# not one\n- not one\n**no**\n```\n"
    assert markdown(text) == {
        "header_count": {"h1": 1, "h2": 1, "h3": 0, "h4": 0, "h5": 0, "h6": 0},
        "list_count": {"ordered": 1, "unordered": 2},
        "bold_count": {"**": 1, "__": 1},
    }


def test_published_answers_are_read(tmp_path: Path) -> None:
    file = tmp_path / "o3.jsonl"
    row = {
        "uid": "a",
        "ans_id": "1",
        "model": "o3",
        "messages": [{"role": "user", "content": "x"}],
        "tstamp": 1.0,
        "metadata": {"token_len": 7},
    }
    row["messages"].append({"role": "assistant", "content": {"answer": "line\u2028separator"}})  # type: ignore[attr-defined]
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    questions = load_questions(write(tmp_path, {"uid": "a", "prompt": "x"}), None, 0)
    answers = read_answers(file, questions)
    assert answers is not None and (answers[0].text, answers[0].tokens) == ("line\u2028separator", 7)
    assert read_answers(file, load_questions(write(tmp_path, {"uid": "b", "prompt": "x"}), None, 0)) is None


def test_names_become_files_that_never_collide() -> None:
    names = ["sft", "dpo-1", "meta/llama", "meta_llama", "meta:llama", "../x", ".hidden"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names) and files[:2] == ["sft", "dpo-1"]
    assert all("/" not in file and not file.startswith(".") for file in files)


def test_judges_of_the_same_name_are_told_apart() -> None:
    judges = (
        OpenAIJudge(model="gpt-4-turbo"),
        OpenAIJudge(model="gpt-4"),
        RuleJudge(),
        RewardJudge(),
        RewardJudge(tie=1.0),
        RuleJudge(),
    )
    assert list(judge_names(judges)) == "gpt-4-turbo gpt-4 rule reward_model reward_model-2 rule-2".split()
