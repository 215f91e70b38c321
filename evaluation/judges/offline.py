"""Defines judges that work offline, by a rule for known answers or with a reward model, and runs the battles
of any judge.

A judge receives matches, each of which is a question and two answers, A and B, and returns one verdict for
each. Every battle is judged in both orders, even by offline judges: no verdict is derived from its mirror
image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Document
from rlhf_core.data.questions import Question
from rlhf_core.records import Game, Judgment

SCORES = "A scores {:.4f}, B scores {:.4f}."  # the text of a reward judge's game


@dataclass(frozen=True)
class Match:
    """The input of a judge."""

    question: Question
    answer_a: str
    answer_b: str


class Judge(Protocol):
    """The interface of a judge, which has a name and returns one game for each match, in order."""

    @property
    def name(self) -> str: ...

    def judge(self, matches: Sequence[Match]) -> list[Game]: ...


def battles(
    judge: Judge,
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[str]],
    sides: Sequence[tuple[str, str]],
) -> list[Judgment]:
    """Judges each (model, baseline) pair of `sides` on every question, in two games.

    `answers[model][i]` is the answer to `questions[i]`. A is the baseline in game 0 and the model in game
    1. Returns the judgments in the order of `sides`, then of the questions.
    """
    matches = []
    for model, baseline in sides:
        for question, theirs, ours in zip(questions, answers[baseline], answers[model], strict=True):
            matches += [Match(question, theirs, ours), Match(question, ours, theirs)]
    games = judge.judge(matches)
    assert len(games) == len(matches), f"{judge.name} returned {len(games)} verdicts for {len(matches)} games"
    pairs = zip(games[::2], games[1::2], strict=True)
    return [
        Judgment(
            uid=question.uid,
            category=question.category,
            judge=judge.name,
            model=model,
            baseline=baseline,
            games=next(pairs),
        )
        for model, baseline in sides
        for question in questions
    ]


@dataclass(frozen=True)
class KnownAnswerJudge:
    """Lets a right answer beat a wrong answer; two right or two wrong answers tie. Right means equal to the
    known answer, up to whitespace."""

    name: str
    answer_key: str

    def known(self, question: Question) -> str:
        """Returns the known answer to a question. Raises ValueError when there is none."""
        return question.known_answer(self.answer_key)

    def right(self, question: Question, answer: str) -> bool:
        """Returns whether an answer equals the known answer, up to whitespace."""
        return answer.split() == self.known(question).split()

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        return [self._game(match) for match in matches]

    def _game(self, match: Match) -> Game:
        a = self.right(match.question, match.answer_a)
        b = self.right(match.question, match.answer_b)
        words = (
            f"A is {'right' if a else 'wrong'}, B is {'right' if b else 'wrong'}; the answer is"
            f" {self.known(match.question)!r}."
        )
        score = "A=B"
        if a != b:
            score = "A>B" if a else "B>A"
        return Game(score=score, judgment={"answer": words})


@dataclass(frozen=True)
class RewardModelJudge:
    """Lets the answer with the higher reward-model score win; a difference of at most `tie` is a tie. If a
    score is not finite, there is no verdict.

    `score` maps documents to scores. Prompts are truncated to `prompt_max_len` tokens, as for the models that
    answered. Answers keep their first `answer_max_len` tokens, including the end of turn, so an answer
    truncated at the limit has no end of turn.
    """

    name: str
    score: Callable[[list[Document]], list[float]]
    renderer: Renderer
    tie: float
    prompt_max_len: int
    answer_max_len: int

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        texts = {(m.question.uid, text): m.question for m in matches for text in (m.answer_a, m.answer_b)}
        documents = [self.document(question, text) for (_, text), question in texts.items()]
        scores = dict(zip(texts, self.score(documents), strict=True))
        return [
            self._game(scores[m.question.uid, m.answer_a], scores[m.question.uid, m.answer_b])
            for m in matches
        ]

    def document(self, question: Question, text: str) -> Document:
        """Returns the tokens of prompt and answer for the reward model."""
        prompt, _ = self.renderer.document_within(question.messages, self.prompt_max_len)
        document = self.renderer.answer_tokens(list(prompt.tokens), text)
        return replace(document.cut(len(prompt) + self.answer_max_len), pictures=prompt.pictures)

    def _game(self, a: float, b: float) -> Game:
        words = {"answer": SCORES.format(a, b)}
        if not (math.isfinite(a) and math.isfinite(b)):
            return Game(score=None, judgment=words)
        if abs(a - b) <= self.tie:
            return Game(score="A=B", judgment=words)
        return Game(score="A>B" if a > b else "B>A", judgment=words)


def score_gap(game: Game) -> float | None:
    """Returns the score of A minus the score of B in a reward judge's game; None for a game of another judge,
    or when a score is not finite."""
    found = re.fullmatch(
        SCORES.replace(".", r"\.").replace(r"{:\.4f}", r"(-?\d+\.\d+)"), game.judgment.get("answer", "")
    )
    return float(found[1]) - float(found[2]) if found else None
