"""Scores of answers to questions of reasoning-gym: its own, for right, wrong, missing and hostile answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rewarding.verifiers import ReasoningGymReward
from rlhf_core.config.rewards import RewardSource
from rlhf_core.data.documents import Prompt
from rlhf_core.environments import sandbox
from rlhf_core.environments.verifiers.reasoning_gym_verifier import _reply, _score
from rlhf_core.environments.verifiers.verifier_checks import require_verifiable
from rlhf_core.rewards.clients import client_of
from rlhf_core.rewards.reward_contract import RewardsFailed, Sample
from tests.unit.data.rows.test_reasoning_gym_rows import rows

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make setup-dev")
closed_in = pytest.mark.skipif(not sandbox.available(), reason="no bubblewrap works here")
pytestmark = [closed_in, pytest.mark.timeout(300)]
TASKS = [
    "gcd",
    "spell_backward",
    "n_queens",
    "prime_factorization",
    "polynomial_multiplication",
    "knight_swap",
]


def sample(row: dict[str, Any], response: str, finished: bool = True) -> Sample:
    return Sample([], response, row, finished, "")


def scores(*samples: Sample, allowed: int = 0, **fields: Any) -> list[float]:
    """The scores from the processes that a stage starts; nan for none."""
    client = client_of(ReasoningGymReward(concurrency=1, **fields))
    try:
        return np.asarray(client.score(samples, allowed).rewards).tolist()
    finally:
        client.close()


def test_right_answers_of_all_kinds_of_tasks_score_1() -> None:
    known = rows(TASKS, size=2 * len(TASKS))
    assert scores(*(sample(row, f"So:\n<answer> {row['answer']}\n</answer>.") for row in known)) == [1.0] * 12


def test_wrong_missing_and_cut_answers() -> None:
    row = rows("gcd", size=1)[0]
    right = f"<answer>{row['answer']}</answer>"
    found = scores(
        sample(row, "<answer>-1</answer>"),
        sample(row, row["answer"]),
        sample(row, ""),
        sample(row, right, finished=False),
        sample(row, f"<answer>-1</answer> no, {right}"),
        sample(row, f"{right} no, <answer>-1</answer>"),
    )
    assert found == [0, 0, 0, 0, 1, 0]


def test_a_score_between_0_and_1_is_the_tasks_own() -> None:
    row = rows("spell_backward", size=1)[0]
    (partly,) = scores(sample(row, f"<answer>{row['answer'][:-1]}</answer>"))
    assert 0 < partly < 1


def test_the_answer_may_have_another_tag_or_be_the_whole_response() -> None:
    row = rows("gcd", size=1)[0]
    assert scores(sample(row, f" {row['answer']}\n"), sample(row, "x"), tag=None) == [1, 0]
    tagged = [sample(row, f"<{tag}>{row['answer']}</{tag}>") for tag in ("final", "answer")]
    assert scores(*tagged, tag="final") == [1, 0]


def test_an_answer_for_which_the_task_raises_has_no_reward() -> None:
    row = rows("prime_factorization", size=1)[0]
    raises = sample(row, "<answer>none</answer>")
    right = sample(row, f"<answer>{row['answer']}</answer>")
    assert np.isnan(scores(raises, right, allowed=1)).tolist() == [True, False]
    with pytest.raises(RewardsFailed, match="left 1 of 2 answers without a reward"):
        scores(raises, right)


def test_an_answer_that_runs_as_python_reaches_nothing_and_costs_no_other_its_reward(tmp_path: Any) -> None:
    row = rows("n_queens", size=1)[0]
    file = tmp_path / "written"
    hostile = [
        "__import__('os')._exit(0)",
        "[i for i in iter(int, 1)]",
        f"open({str(file)!r}, 'w')",
        "__import__('time').sleep(1000)",
    ]
    right = sample(row, f"<answer>{row['answer']}</answer>")
    samples = [right, *(sample(row, f"<answer>{text}</answer>") for text in hostile), right]
    found = scores(*samples, allowed=3, timeout=1)
    assert [found[0], found[3], found[5]] == [1, 0, 1] and not file.exists()
    assert np.isnan([found[1], found[2], found[4]]).all()


def test_rows_that_are_not_generated_are_refused() -> None:
    sources: list[RewardSource] = [ReasoningGymReward()]
    known, other = rows("gcd", size=1)[0], {"answer": "1", "task": "gcd"}
    prompts = [Prompt((), [1], row, False) for row in (known, other)]
    require_verifiable(sources, prompts[:1])
    with pytest.raises(ValueError, match=r"prompts: number 2: .* is not of a data source reasoning_gym") as e:
        require_verifiable(sources, prompts)
    assert str(e.value).endswith("its columns are answer, task: correct the row")


def test_the_last_pair_of_tags_counts_and_not_a_mention() -> None:
    row = rows("gcd", size=1)[0]
    right = row["answer"]
    found = scores(
        sample(row, f"I will use <answer> tags. <answer>{right}</answer>"),
        sample(row, f"<answer>{right}</answer> is what stands in <answer>."),
        sample(row, f"</answer><answer>{right}"),
    )
    assert found == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("line", ["garbage", "[]", '"x"', "{}", '{"score": "1"}'])
def test_lines_that_are_no_reply_are_no_score(line: str) -> None:
    assert _score(_reply(line)) is None


@pytest.mark.parametrize(("told", "score"), [("1" + "0" * 400, 1.0), ("-" + "9" * 400, 0.0), ("0.25", 0.25)])
def test_scores_are_between_0_and_1(told: str, score: float) -> None:
    assert _score(_reply(f'{{"score": {told}}}')) == score
