"""Final answers that are equal and that are not, in all the forms that responses have; hostile ones; and rows
without an answer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rewarding.verifiers import MathReward
from rlhf_core.config.rewards import RewardSource
from rlhf_core.data.documents import Prompt
from rlhf_core.environments.verifiers import forked as forked_checks
from rlhf_core.environments.verifiers.final_answer import final_answer
from rlhf_core.environments.verifiers.verifier_checks import require_verifiable
from rlhf_core.rewards.clients import client_of
from rlhf_core.rewards.reward_contract import Sample

pytest.importorskip("math_verify", reason="needs math-verify: make setup")


def rewards(*answers: tuple[Any, str], finished: bool = True, **fields: Any) -> list[float]:
    """The rewards of responses, each with its row's answer, from the processes that a stage starts."""
    samples = [Sample([], response, {"answer": known}, finished, "") for known, response in answers]
    client = client_of(MathReward(concurrency=1, **fields))
    try:
        return np.asarray(client.score(samples, 0).rewards).tolist()
    finally:
        client.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox {x}", "x"),
        (r"\boxed{1}, and then \boxed{2", None),
        (r"\boxed{}", None),
        ("He has 40 + 2 = 42.\n#### 42\n", "42"),
        ("#### 1\n#### 2", "2"),
        ("The answer is **7** (3 + 4).", "7"),
        ("Answer: 3x + 7.", "3x + 7"),
        ("**Answer:** 42", "42"),
        ("**Answer**:\n- 42", "42"),
        ("The answer is yes.", "yes"),
        ("The final answer is:\n\\[\n\\frac{1}{2}\n\\]", r"\frac{1}{2}"),
        ("The answer is $5! + 1.5$.", "5! + 1.5"),
        ("The answer is 5, so it holds.", "5"),
        ("The answer is $12$ km/h.", r"12 \text{km/h}"),
        ("The answer is $5 in all", r"5 \text{in all}"),
        ("The answer is 3 1/2.", "3 1/2"),
        ("The answer is 42. I hope this answer is clear.", "42"),
        ("The answer is minus 5", "-5"),
        ("The answer is negative 5.", "-5"),
        ("The answer is - 5 degrees", r"-5 \text{degrees}"),
        ("The answer is \u2013 5", "-5"),
        ("The answer is \u22125", "-5"),
        (" 1,234.50.\n", "1,234.50"),
        (r"\(x\)", "x"),
        ("I do not know.", None),
        ("", None),
        ("The answer is", None),
        (r"\boxed{" + "1" * 2000 + "}", None),
    ],
)
def test_the_last_answer_of_the_clearest_kind_is_final(text: str, found: str | None) -> None:
    assert final_answer(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "Thus 72.",
        "We have 3 apples and 4, which makes $7$.",
        "The answer is not 5, it is 6",
        "The answer is 5 or 6",
        "The answer is $x=5$ or $x=6$",
        "The answer is $x=5$, $y=6$",
        "The answer is between 5 and 10",
        "The answer is at least 5",
        "The answer is 5?",
        "The answer is approximately 5 but really 7",
        "The answer is **5** or **6**",
        "The answer is 5. No, the answer is 6 of 10.",
        "The answer is 5. Wait, that answer is wrong.",
        "The answer is 10 000 people",
        "The answer is 5,5 litres",
        "The answer is 5 million",
        "The answer is 5x dollars",
        "The answer is 2 pi metres",
        "The answer is x-5 apples",
        "The answer is x = 5 apples",
    ],
)
def test_what_is_ambiguous_is_no_answer(text: str) -> None:
    assert final_answer(text) is None


def test_equal_answers_are_right_and_others_wrong() -> None:
    right = [
        ("42", r"\boxed{41}? No: \boxed{42}"),
        ("Natalia sold 48. #### 72", "The answer is 72."),
        (72, "#### 72"),
        (0.5, r"\boxed{\frac{1}{2}}"),
        ("50%", "The answer is 0.5"),
        ("1,000", "Answer: 1000 in all"),
        ("1000", "Answer: $1{,}000$"),
        (r"\frac{14}{3}", r"\boxed{4\frac{2}{3}}"),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
        ("[1,2)", r"\boxed{[1, 2)}"),
        ("x=3", r"\boxed{3}"),
        ("3", r"\boxed{x = 3}"),
        ("x^2+2x+1", "The answer is $(x+1)^2$."),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
        ("10", r"\boxed{10\text{ apples}}"),
        ("B", r"The answer is \textbf{(B)}"),
        ("Yes", "The answer is yes."),
        ("10^{5000}", r"\boxed{10^{5000}}"),
        (-3, "answer: -3"),
        ("\u22125", "The answer is minus 5."),
        ("5", "The answer is 5 km."),
        ("5 km", r"\boxed{5}"),
        ("5 km", "The answer is 5 km."),
        ("5 minutes", r"\boxed{5\text{ minute}}"),
        ("10 m^2", r"\boxed{10\text{ m}^2}"),
        ("12_8", r"\boxed{12_{8}}"),
        ("1.6e-19", r"\boxed{1.6\cdot10^{-19}}"),
        ("3.5", "The answer is 3 1/2 cups."),
        ("-3.5", r"\boxed{-3 1/2}"),
        ("1/3", r"\boxed{0.\overline{3}}"),
        (r"0.1\overline{6}", r"\boxed{\frac{1}{6}}"),
        ("1/3", r"\boxed{0.333333}"),
        ("1/81", r"\boxed{0.012346}"),
        ("5 percent", r"\boxed{5\%}"),
        ("2", r"\boxed{\sqrt{4}}"),
        ("6", r"\boxed{2\times3}"),
    ]
    wrong = [
        ("41", r"\boxed{41}? No: \boxed{42}"),
        ("1", r"\boxed{1, 2}"),
        ("1", r"\boxed{1 \text{ or } 2}"),
        ("[1,2)", r"\boxed{[1,2]}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("yes", r"\boxed{sey}"),
        ("B", r"\boxed{C}"),
        ("3", r"\boxed{x}"),
        ("-3", "10-3"),
        ("42", r"\boxed{42"),
        ("42", "I do not know."),
        ("42", ""),
        ("0.333", r"\boxed{1/3}"),
        ("5", "The answer is minus 5."),
        ("5 m", r"\boxed{5\text{ km}}"),
        ("5 km", "The answer is 5 m."),
        ("10 hours", r"\boxed{10\text{ minutes}}"),
        ("10 m^3", r"\boxed{10\text{ m}^2}"),
        (r"\frac{1}{2}\text{ km}", r"\boxed{\frac{1}{2}\text{ m}}"),
        ("12:30 am", r"\boxed{12:30 \text{ pm}}"),
        ("12_8", r"\boxed{12_9}"),
        ("6.626e-34", r"\boxed{1.6e-19}"),
        ("0.00000007", r"\boxed{0.00000003}"),
        ("0", r"\boxed{10^{-9}}"),
        ("5", r"\boxed{5 \text{ million}}"),
        ("1/2", "The answer is 3 1/2"),
        ("5", r"\boxed{5–10}"),
    ]
    assert rewards(*right) == [1.0] * len(right)
    assert rewards(*wrong) == [0.0] * len(wrong)


def test_a_hostile_answer_is_wrong_and_the_others_keep_their_rewards() -> None:
    hostile = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{1000000000!}",
        r"\boxed{" + "(" * 300 + "3" + ")" * 300 + "}",
        r"\boxed{" + r"\frac{1}{" * 91 + "3" + "}" * 92,
        "\\boxed{\x00}",
    ]
    answers = [part for text in hostile for part in (("3", text), ("3", r"\boxed{3.0}"))]
    assert rewards(*answers, timeout=1.0) == [0.0, 1.0] * len(hostile)


def test_a_process_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError

    monkeypatch.setattr(forked_checks, "_limit_memory", fails)
    with pytest.raises(OSError, match="did not start"):
        forked_checks.forked(lambda place: True, 1, 1.0)


def test_a_check_that_crashes_or_does_not_end_is_false() -> None:
    checks = [lambda: True, lambda: os._exit(0), lambda: 1 / 0, lambda: 7 ** (7**12) > 0, lambda: True]
    assert forked_checks.forked(lambda place: bool(checks[place]()), 5, 1.0) == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_a_cut_answer_is_wrong() -> None:
    assert rewards(("42", r"\boxed{42}"), finished=False) == [0.0]


def test_the_answer_may_be_a_key_in_a_column() -> None:
    row = {"reward_model": {"ground_truth": "7"}, "text": '{"a": {"b": 7}}', "a.b": "8"}
    for column, response in (("reward_model.ground_truth", "7"), ("text.a.b", "7"), ("a.b", "#### 8")):
        client = client_of(MathReward(answer=column, concurrency=1))
        assert client.score([Sample([], response, row, True, "")], 0).rewards.tolist() == [1.0]
        client.close()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"solution": "7"}, "holds no text or number but None; its columns are solution"),
        ({"answer": "  "}, "is empty"),
        ({"answer": None}, "but None"),
        ({"answer": ["7"]}, r"but \['7'\]"),
        ({"answer": True}, "but True"),
        ({"answer": r"\frac{1}{"}, "whose braces do not pair"),
        ({"answer": "}1{"}, "whose braces do not pair"),
    ],
)
def test_a_row_without_an_answer_is_told_before_any_work(row: dict[str, Any], told: str) -> None:
    sources: list[RewardSource] = [MathReward()]
    prompts = [Prompt((), [1], {"answer": 7}, False), Prompt((), [1], row, False)]
    with pytest.raises(ValueError, match=f"eval_prompts: number 2: .* math cannot read this row: .*{told}"):
        require_verifiable(sources, prompts[:1], prompts)
    require_verifiable(sources, prompts[:1])
