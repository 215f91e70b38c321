"""What a check tells of verifiers before any work: rows that they cannot read, and what the machine lacks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PPO, Data
from rlhf_core.data.rows.mixture import CHECKED_ROWS, mixture_of
from rlhf_core.environments import sandbox
from rlhf_core.environments.verifiers import verifier_checks
from rlhf_core.preflight.model_checks import vocabulary_problems
from rlhf_core.preflight.verifier_problems import verified_rows_problems, verifier_needs


def node(tmp_path: Path, *rows: dict[str, Any], **fields: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "q", **row}) + "\n" for row in rows))
    prompts = {"sources": str(tmp_path / "rows.jsonl")}
    return SimpleNamespace(name="ppo", config=PPO(**{"prompts": prompts, "critic": "sft", **fields}))


def test_a_row_without_an_answer_is_named(tmp_path: Path) -> None:
    found = node(tmp_path, {"answer": "1"}, {"solution": "2"}, reward="math")
    (problem,) = verified_rows_problems(found)
    assert problem.startswith("stages.ppo.prompts: ") and "rows.jsonl" in problem
    assert "column 'answer' holds no text or number but None; its columns are" in problem
    assert "name another column in answer" in problem


def test_rows_with_answers_and_other_rewards_have_no_problem(tmp_path: Path) -> None:
    assert verified_rows_problems(node(tmp_path, {"answer": "1"}, {"answer": 2}, reward="math")) == []
    assert verified_rows_problems(node(tmp_path, {}, reward="a.py:f")) == []
    missing = {"sources": str(tmp_path / "none.jsonl")}
    assert verified_rows_problems(node(tmp_path, reward="math", prompts=missing)) == []  # told with the data


def test_validation_rows_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "q"}\n')
    held_out = {"sources": str(tmp_path / "held.jsonl")}
    (problem,) = verified_rows_problems(node(tmp_path, {"answer": "1"}, reward="math", eval_prompts=held_out))
    assert problem.startswith("stages.ppo.eval_prompts: ") and "held.jsonl" in problem


def test_rows_name_one_of_several_environments(tmp_path: Path) -> None:
    several = {
        "environments": {"game": "guess", "sums": "tools"},
        "advantage_estimator": "reinforce_pp",
        "critic": None,
    }
    rows = {"environment": "game"}, {"environment": "sum"}
    (problem,) = verified_rows_problems(node(tmp_path, *rows, **several))
    assert problem.startswith("stages.ppo.prompts: ") and "rows.jsonl, row 2: " in problem
    assert problem.endswith("the environment 'sum', which the stage does not have: did you mean sums?")
    assert verified_rows_problems(node(tmp_path, *rows[:1], **several)) == []
    assert (
        verified_rows_problems(
            node(tmp_path, *rows, environment="guess", advantage_estimator="reinforce_pp", critic=None)
        )
        == []
    )


def test_a_pass_rate_that_is_none_is_told_before_the_run(tmp_path: Path) -> None:
    how: dict[str, Any] = {"reward": "a.py:f", "curriculum": {"right": 1, "pass_rate_key": "rate"}}
    (problem,) = verified_rows_problems(node(tmp_path, {"rate": 0.5}, {"rate": 7}, **how))
    assert "row 2: rate is 7, and a pass rate is from 0 to 1, or null" in problem
    assert verified_rows_problems(node(tmp_path, {"rate": 0.5}, {"rate": None}, **how)) == []


def test_a_missing_package_is_told_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = "needs the package math-verify, which is not installed: pip install 'math-verify[antlr4_13_2]'"
    assert verifier_needs(node(tmp_path, reward="math")) == [f"stages.ppo.reward: math {told}"]
    assert verifier_needs(node(tmp_path, reward="a.py:f")) == []


def test_a_machine_without_bubblewrap_runs_no_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: False)
    (problem,) = verifier_needs(node(tmp_path, reward="code"))
    assert problem.startswith("stages.ppo.reward: code runs programs in bubblewrap")
    assert "apt-get install bubblewrap" in problem
    assert verifier_needs(node(tmp_path, reward={"verifier": "code", "sandbox": "none"})) == []


def test_tests_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (problem,) = verified_rows_problems(node(tmp_path, {"tests": "assert f(1) =="}, reward="code"))
    assert "the verifier code cannot read this row: column 'tests' holds tests that are no Python" in problem
    assert verified_rows_problems(node(tmp_path, {"tests": "assert f(1) == 2"}, reward="code")) == []


def test_generated_questions_need_their_package_and_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_checks, "installed_release", lambda: "0.1.25")
    monkeypatch.setattr(sandbox, "available", lambda: False)
    (problem,) = verifier_needs(node(tmp_path, reward="reasoning_gym"))
    assert problem.startswith("stages.ppo.reward: reasoning_gym runs programs in bubblewrap")
    open_to_all = {"verifier": "reasoning_gym", "sandbox": "none"}
    assert verifier_needs(node(tmp_path, reward=open_to_all)) == []
    monkeypatch.setattr(verifier_checks, "installed_release", lambda: "")
    (problem,) = verifier_needs(node(tmp_path, reward=open_to_all))
    assert problem.endswith("which is not installed: pip install alignflow[reasoning-gym]")


@pytest.mark.parametrize(
    ("instruction", "tag", "told"),
    [
        ("Write it between <answer> and </answer>.", "answer", ""),
        ("", "final", ""),
        ("Be brief.", None, ""),
        ("Be brief.", "answer", "instruction does not ask for <answer>, the tag of the reward"),
        ("End with <answer>4</answer>.", None, "instruction asks for <answer>, and the reward has tag: null"),
    ],
)
def test_questions_ask_for_the_form_that_is_scored(
    instruction: str, tag: str | None, told: str, tmp_path: Path
) -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make setup-dev")
    source = {"reasoning_gym": {"tasks": "gcd", "size": 2, "instruction": instruction}}
    reward = {"verifier": "reasoning_gym", "tag": tag}
    problems = verified_rows_problems(node(tmp_path, reward=reward, prompts={"sources": source}))
    assert len(problems) == bool(told)
    assert told in "".join(problems)


def test_a_row_with_an_unknown_teacher_is_told_before_the_run(tmp_path: Path) -> None:
    how: dict[str, Any] = {"reward": "a.py:f", "teachers": {"math": "org/math", "code": "sft"}}
    rows = {"teacher": "math"}, {}, {"teacher": None}, {"teacher": "maths"}
    (problem,) = verified_rows_problems(node(tmp_path, *rows, **how))
    assert problem.startswith("stages.ppo.prompts: ") and "rows.jsonl, row 4: " in problem
    assert problem.endswith("the teacher 'maths', which the stage does not have: did you mean math?")
    assert verified_rows_problems(node(tmp_path, *rows[:3], **how)) == []
    assert verified_rows_problems(node(tmp_path, *rows, reward="a.py:f")) == []


def test_a_teacher_with_another_tokenizer_is_named(tmp_path: Path) -> None:
    found = node(tmp_path, reward="a.py:f", teachers={"math": "org/math", "code": "sft"})
    found.kind = "ppo"

    def unlike(own: str, other: str) -> str | None:
        return f"{other} has other tokens than {own}" if other == "org/math" else None

    told = vocabulary_problems(found, lambda name: name, unlike)
    assert told == ["stages.ppo.teachers.math: org/math has other tokens than sft"]


@pytest.mark.parametrize(
    ("how", "good", "told"),
    [
        (
            {"environments": {"game": "guess"}, "advantage_estimator": "reinforce_pp", "critic": None},
            {"environment": "game"},
            "the row names no environment",
        ),
        ({"reward": "a.py:f", "teachers": {"math": "sft"}}, {"teacher": "math"}, "the teacher 'last'"),
        (
            {"reward": "a.py:f", "curriculum": {"right": 1, "pass_rate_key": "rate"}},
            {"rate": 0.5},
            "rate is 'last', and a pass rate is from 0 to 1",
        ),
    ],
)
def test_what_rows_name_is_checked_in_all_of_them(
    how: dict[str, Any], good: dict[str, Any], told: str, tmp_path: Path
) -> None:
    count = CHECKED_ROWS + 5
    last = {"teacher": "last", "rate": "last"}
    found = node(tmp_path, *[good] * (count - 1), last, **how)
    (problem,) = verified_rows_problems(found)
    assert f"rows.jsonl, row {count}: " in problem and told in problem
    used = {"sources": str(tmp_path / "rows.jsonl"), "max_samples": count - 1}
    found.config = found.config.model_copy(update={"prompts": Data.model_validate(used)})
    assert verified_rows_problems(found) == []


def test_rows_that_a_mixture_leaves_out_name_what_they_like(tmp_path: Path) -> None:
    """The mixture takes 30 rows of each file; the 20 that are left of the second one are not checked."""
    (tmp_path / "short.jsonl").write_text('{"prompt": "q", "teacher": "math"}\n' * 30)
    sources = [{"path": str(tmp_path / name), "probability": 0.5} for name in ("short.jsonl", "rows.jsonl")]
    how = {"reward": "a.py:f", "teachers": {"math": "sft"}, "prompts": {"sources": sources}}
    rows = [{"teacher": "math"}] * 50
    mixture = mixture_of(node(tmp_path, *rows, **how).config.prompts, 5)
    assert mixture is not None
    used = [place >= 0 for place in mixture.places[1]]
    unused = [row if here else {"teacher": "other"} for row, here in zip(rows, used, strict=True)]
    assert 20 <= used.count(False) < 25 and verified_rows_problems(node(tmp_path, *unused, **how), 5) == []
    unused[used.index(True)] = {"teacher": "other"}
    (problem,) = verified_rows_problems(node(tmp_path, *unused, **how), 5)
    assert f"rows.jsonl, row {used.index(True) + 1}: " in problem
