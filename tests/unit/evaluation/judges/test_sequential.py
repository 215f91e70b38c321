"""Asking in turns: it stops when the interval is narrow, favours nobody, and its intervals still hold the
truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from evaluation.judges.offline import Match
from evaluation.judges.sequential import battles_in_turns, interval_width
from evaluation.scores.scoring import win_rate
from rlhf_core.data.questions import Question
from rlhf_core.records import Game

QUESTIONS = [Question(f"q{n}", "all", ({"role": "user", "content": str(n)},), {}) for n in range(400)]
SIDES = [("ppo", "sft"), ("dpo", "sft"), ("dpo", "ppo")]


class Table:
    """A judge that wins `table[side]` for the model, and remembers what it was asked."""

    name = "table"

    def __init__(self, wins: dict[str, float], seed: int):
        generator = np.random.default_rng(seed)
        self.better = {model: generator.random(len(QUESTIONS)) < share for model, share in wins.items()}
        self.asked: list[list[str]] = []

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        self.asked.append([match.question.uid for match in matches])
        return [Game(score=self._score(match), judgment={"answer": ""}) for match in matches]

    def _score(self, match: Match):  # type: ignore[no-untyped-def]
        for model, better in self.better.items():
            if model in (match.answer_a, match.answer_b):
                wins = better[int(match.question.uid[1:])]
                return "A>B" if (match.answer_a == model) == wins else "B>A"
        return "A=B"


def ask(wins: dict[str, float], width: float, step: int = 50, seed: int = 0):  # type: ignore[no-untyped-def]
    judge = Table(wins, seed)
    answers = {model: [model] * len(QUESTIONS) for model in ("sft", "ppo", "dpo")}
    return judge, battles_in_turns(judge, QUESTIONS, answers, SIDES, width, step, seed)


def test_a_clear_case_stops_early_and_the_others_go_on() -> None:
    judge, judged = ask({"ppo": 0.98, "dpo": 0.5}, width=0.15)
    counts = {side: sum((j.model, j.baseline) == side for j in judged) for side in SIDES}
    assert counts["ppo", "sft"] < counts["dpo", "sft"] <= 400
    assert counts["ppo", "sft"] % 50 == 0 and len(judge.asked) == max(counts.values()) / 50
    for side, count in counts.items():
        ours = [j for j in judged if (j.model, j.baseline) == side]
        assert len({j.uid for j in ours}) == count
        assert interval_width([j.score for j in ours]) <= 0.15 or count == 400
        rate = win_rate(ours)
        assert rate.ci_high - rate.ci_low < 0.17


def test_questions_come_in_a_seeded_random_order_and_are_reported_in_their_own() -> None:
    judge, judged = ask({"ppo": 0.9, "dpo": 0.9}, width=0.2)
    again, same = ask({"ppo": 0.9, "dpo": 0.9}, width=0.2)
    assert judge.asked == again.asked and judged == same
    first = [int(uid[1:]) for uid in dict.fromkeys(judge.asked[0])]
    assert first != sorted(first) and max(first) > 300
    uids = [int(j.uid[1:]) for j in judged if (j.model, j.baseline) == SIDES[0]]
    assert uids == sorted(uids)


def test_without_a_stop_every_question_is_asked_once() -> None:
    judge, judged = ask({"ppo": 0.5, "dpo": 0.5}, width=0.001, step=70)
    assert len(judged) == 3 * 400 and sum(map(len, judge.asked)) == 2 * 3 * 400


def test_a_few_equal_verdicts_do_not_look_certain() -> None:
    assert interval_width([0.5] * 10) > 0.15
    assert interval_width([1.0] * 10) > 0.25
    assert interval_width([]) == interval_width([None]) == 1
    assert interval_width([1.0] * 600) < 0.05


def test_intervals_after_stopping_cover_the_truth() -> None:
    """400 evaluations that stop at their own time: 95 % intervals hold the true rate 92 to 98 % of the time,
    and the mean is unbiased."""
    covered = 0
    estimates = []
    for seed in range(400):
        scores = np.random.default_rng(seed).choice([0.0, 0.5, 1.0], size=600, p=[0.25, 0.2, 0.55])
        for stop in range(50, 601, 50):
            if interval_width(list(scores[:stop])) <= 0.14:
                break
        seen = scores[:stop]
        half = 1.96 * seen.std() / np.sqrt(stop)
        covered += abs(seen.mean() - 0.65) <= half
        estimates.append(seen.mean())
    assert 0.92 <= covered / 400 <= 0.98
    assert np.mean(estimates) == pytest.approx(0.65, abs=0.006)  # three standard errors
