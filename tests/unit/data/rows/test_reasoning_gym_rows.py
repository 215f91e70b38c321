"""Questions that reasoning-gym generates: the same for the same recipe, in the shares that it asks for; tasks and
options that do not exist are named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Data
from rlhf_core.data.rows import reasoning_gym_rows as generated
from rlhf_core.data.rows.mixture import check_columns, checked_rows, load_rows

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make setup-dev")
# their questions, or what scores an answer, follow the order of a set of texts
OF_SETS = ["isomorphic_strings", "ransom_note", "polynomial_multiplication", "word_ladder", "knight_swap"]


def rows(tasks: Any, **fields: Any) -> list[dict[str, Any]]:
    source = {"reasoning_gym": {"tasks": tasks, **fields}}
    return load_rows(Data.model_validate({"sources": source}), 0)


def questions(tasks: Any, **fields: Any) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows(tasks, **fields)]


def test_every_beginning_has_the_tasks_in_their_shares() -> None:
    names = [row["task"] for row in rows({"lcm": {"weight": 3}, "gcd": {}}, size=400)]
    assert Counter(names) == {"lcm": 300, "gcd": 100}
    for end in range(4, 401, 4):
        assert names[:end].count("gcd") == end // 4
    assert Counter(row["task"] for row in rows(["lcm", "gcd"], size=10)) == {"lcm": 5, "gcd": 5}


def test_the_prompt_has_the_question_the_instruction_and_the_system_message() -> None:
    (row,) = rows("gcd", size=1, instruction="Be brief.", system="You count.")
    system, user = row["prompt"]
    assert system == {"role": "system", "content": "You count."}
    assert user["role"] == "user" and user["content"].endswith("\n\nBe brief.")
    (bare,) = rows("gcd", size=1, instruction="")
    assert [message["content"] for message in bare["prompt"]] == [
        user["content"].removesuffix("\n\nBe brief.")
    ]
    assert questions("gcd", size=1)[0].endswith("between <answer> and </answer>.")
    assert int(row["answer"]) > 0


def test_the_same_fields_give_the_same_rows_in_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows(OF_SETS, size=10)
    generated._generated.cache_clear()
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert rows(OF_SETS, size=10) == first


def test_another_seed_gives_other_questions() -> None:
    """Within a task, reasoning-gym seeds question i with seed + i."""
    wide = {"products": {"min_digits": 6, "max_digits": 8}}
    one, other = (questions(wide, size=50, seed=seed) for seed in (0, 1))
    assert len({*one, *other}) == 100
    assert questions(wide, size=20) == one[:20]


def test_a_list_becomes_the_tuple_that_an_option_is() -> None:
    sums = {"basic_arithmetic": {"operators": ["+"], "allow_parentheses": False}}
    asked = questions(sums, size=20, instruction="")
    assert not any("*" in question or "/" in question for question in asked)


def test_rows_are_each_readers_own() -> None:
    rows("gcd", size=1)[0]["prompt"].clear()
    assert rows("gcd", size=1)[0]["prompt"]


def test_the_check_before_work_generates_a_few() -> None:
    data = Data.model_validate({"sources": {"reasoning_gym": {"tasks": "gcd", "size": 10**9}}})
    check_columns(data, "prompt")
    assert len(list(checked_rows(data, "prompt"))) == 8
    with pytest.raises(ValueError, match="there is no column 'chosen', nor 'rejected'"):
        check_columns(data, "preference")


def test_generated_rows_mix_with_those_of_a_file(tmp_path: Any) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "q"}\n' * 5)
    sources = [
        {"reasoning_gym": {"tasks": "gcd", "size": 5}, "probability": 0.5},
        {"path": str(tmp_path / "p.jsonl"), "probability": 0.5},
    ]
    found = load_rows(Data.model_validate({"sources": sources}), 0)
    assert [row.get("task") for row in found].count("gcd") == 5 == len(found) / 2


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        ("leg_count", "reasoning-gym has no task 'leg_count': did you mean leg_counting?"),
        ("qqq", "has no task 'qqq': correct its name"),
        ("composite", "has no task 'composite'"),
        ({"gcd": {}, "leg_counting": {"min_animal": 1}}, "has no option 'min_animal', .* mean min_animals?"),
        ({"leg_counting": {"min_animals": 0}}, "leg_counting refuses its options: min_animals must be pos"),
        ({"leg_counting": {"min_animals": "x"}}, "the task leg_counting refuses its options: '>' not supp"),
    ],
)
def test_wrong_tasks_are_one_sentence(tasks: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        rows(tasks, size=5)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("reasoning_gym: ")


def test_a_question_that_cannot_be_generated_is_named() -> None:
    with pytest.raises(ValueError, match=r"the task leg_counting cannot generate its question 1: .*options"):
        rows({"leg_counting": {"min_instances": 1.5, "max_instances": 2.5}}, size=5)


def test_a_machine_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "installed_release", lambda: "")
    with pytest.raises(ValueError, match=r"not installed: pip install alignflow\[reasoning-gym\]"):
        rows("gcd", size=1)


def test_a_process_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "WORKER", "rlhf_core.no_such_module")
    with pytest.raises(ValueError, match="the process that generates prompts exited with status 1"):
        rows("gcd", size=7)


def test_a_file_cannot_bring_what_scores_an_answer(tmp_path: Path) -> None:
    """The verifier unpickles it, and a file may come from a stranger."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "q", "task": "gcd", "reasoning_gym": "gASVAAAA"}\n')
    (row,) = load_rows(Data.model_validate({"sources": str(file)}), 0)
    assert "reasoning_gym" not in row and row["task"] == "gcd"
