"""The judges that need no endpoint (the rule, a reward model's scores), and battles in both orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from evaluation.judges.judge_prompt import judge_prompt
from evaluation.judges.offline import KnownAnswerJudge, Match, RewardModelJudge, battles
from evaluation.scores.scoring import win_rate
from rlhf_core.data.documents import Document
from rlhf_core.records import Game
from tests.support.judging import question


def test_the_judge_answers_hard_prompts_itself_and_creative_ones_not() -> None:
    hard, creative = (
        judge_prompt(Match(question(category=c), "four", "five")) for c in ("hard_prompt", "creative_writing")
    )
    assert (
        "write your own answer" in hard[0]["content"]
        and "write your own answer" not in creative[0]["content"]
    )
    said = hard[1]["content"]
    assert said.index("What is 2 + 2?") < said.index("four") < said.index("five")
    assert judge_prompt(Match(question(), "five", "four"))[1]["content"] != said


def test_the_rule_prefers_the_known_answer_and_sees_no_whitespace() -> None:
    judge = KnownAnswerJudge("rule", "answer")
    asked = question(answer="a b")
    games = judge.judge(
        [
            Match(asked, a, b)
            for a, b in [(" a\n b ", "b a"), ("ab", "a b"), ("a b", "a  b"), ("x", ""), ("A B", "a b.")]
        ]
    )
    assert [game.score for game in games] == ["A>B", "B>A", "A=B", "A=B", "A=B"]


def test_the_rule_says_which_question_has_no_known_answer() -> None:
    with pytest.raises(ValueError, match="question q1: there is no column 'solution'"):
        KnownAnswerJudge("rule", "solution").judge([Match(question(answer="4"), "4", "5")])
    assert KnownAnswerJudge("rule", "answer").right(question(answer=4), "4")
    for nothing, found in ((None, "null"), ("", "empty"), (" \n", "empty")):
        with pytest.raises(
            ValueError,
            match=(
                f"question q1: column 'answer' is {found}, and the rule judge compares answers with it: fill"
            ),
        ):
            KnownAnswerJudge("rule", "answer").right(question(answer=nothing), "")


class Characters:
    """A renderer whose tokens are characters: enough to see what a reward judge scores."""

    def document_within(self, messages: Sequence[dict[str, str]], limit: int) -> tuple[Document, bool]:
        tokens = [ord(character) for character in messages[-1]["content"]]
        return Document(tokens[-limit:], [False] * len(tokens[-limit:])), len(tokens) > limit

    def answer_tokens(self, prompt: list[int], response: str) -> Document:
        said = [*map(ord, response), 0]
        return Document(prompt + said, [False] * len(prompt) + [True] * len(said))


def reward_judge(
    tie: float = 0.0, answer_max_len: int = 100
) -> tuple[RewardModelJudge, list[list[Document]]]:
    """A judge that likes long answers, and the batches it scored."""
    seen: list[list[Document]] = []

    def score(documents: list[Document]) -> list[float]:
        seen.append(documents)
        return [float(sum(document.mask)) for document in documents]

    return RewardModelJudge("reward_model", score, Characters(), tie, 5, answer_max_len), seen  # type: ignore[arg-type]


def test_the_higher_reward_wins_and_a_small_difference_ties() -> None:
    matches = [Match(question(), a, b) for a, b in [("long answer", "short"), ("a", "bb"), ("xx", "yy")]]
    assert [game.score for game in reward_judge()[0].judge(matches)] == ["A>B", "B>A", "A=B"]
    assert [game.score for game in reward_judge(tie=1.0)[0].judge(matches)] == ["A>B", "A=B", "A=B"]


@pytest.mark.parametrize("scores", [[math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf], [math.nan] * 2])
def test_a_score_that_is_not_finite_gives_no_verdict(scores: list[float]) -> None:
    judge = replace(reward_judge()[0], score=lambda documents: scores)
    assert [game.score for game in judge.judge([Match(question(), "one", "other")])] == [None]


def test_a_reward_judge_scores_each_answer_once_within_the_limits() -> None:
    judge, seen = reward_judge(answer_max_len=4)
    judge.judge([Match(question(), "too long", "abc"), Match(question(), "abc", "too long")])
    (documents,) = seen
    texts = ["".join(map(chr, document.tokens)) for document in documents]
    # the cut answer has no end-of-turn token, the whole one has
    assert texts == ["+ 2?"[-5:].rjust(5) + "too ", " + 2?abc\0"]


class Scripted:
    """A judge that prefers the longer answer, or whoever is shown first."""

    name = "scripted"

    def __init__(self, first_wins: bool = False):
        self.first_wins = first_wins
        self.matches: list[Match] = []

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        self.matches += matches
        return [
            Game(
                score="A>B" if self.first_wins or len(m.answer_a) > len(m.answer_b) else "B>A",
                judgment={"answer": ""},
            )
            for m in matches
        ]


def test_both_orders_of_every_battle_are_put_to_the_judge() -> None:
    questions = [question("1"), question("2")]
    judge = Scripted()
    judged = battles(
        judge,
        questions,
        {"sft": ["s1", "s2"], "dpo": ["longer1", "l"], "ppo": ["longest1", "longest2"]},
        [("dpo", "sft"), ("ppo", "sft")],
    )
    assert [(m.question.uid, m.answer_a, m.answer_b) for m in judge.matches[:4]] == [
        ("1", "s1", "longer1"), ("1", "longer1", "s1"), ("2", "s2", "l"), ("2", "l", "s2"),
    ]  # fmt: skip
    assert [(j.model, j.uid, j.score) for j in judged] == [
        ("dpo", "1", 1.0),
        ("dpo", "2", 0.0),
        ("ppo", "1", 1.0),
        ("ppo", "2", 1.0),
    ]
    assert all(judgment.scores[0] == judgment.scores[1] for judgment in judged)


def test_a_judge_that_looks_at_the_order_alone_gives_one_half() -> None:
    questions = [question(str(number)) for number in range(5)]
    judged = battles(
        Scripted(first_wins=True), questions, {"sft": ["a"] * 5, "ppo": ["bb"] * 5}, [("ppo", "sft")]
    )
    rate = win_rate(judged)
    assert (rate.win_rate, rate.swap_consistency) == (0.5, 0.0)
