"""Signals of drift on simulated data: planted drifts are found at a stated rate, and without drift alarms are
as rare as the level says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.stats import spearmanr

from evaluation.drift.answer_drift import answer_signals, refuses
from evaluation.drift.drift_report import Signal
from evaluation.drift.judge_drift import agreement, judge_anchors
from evaluation.drift.prompt_drift import divergence, prompt_signals
from evaluation.drift.resampling import spearman
from evaluation.judges.offline import SCORES, Match
from rlhf_core.data.anchors import AnchorPairs
from rlhf_core.data.questions import Question
from rlhf_core.records import Game, Judgment

SIMULATIONS = 200
LEVEL = 0.05
MOST_FALSE = 18  # of 200 at level 0.05: a binomial count is above it with probability 0.8 %
ROUNDS = 200
ZIPF = 1 / np.arange(1, 301) ** 1.1
PAST = ZIPF / ZIPF.sum()
NEW = np.roll(PAST, 100)


def prompts(
    generator: np.random.Generator, share_new: float = 0.0, longer: float = 1.0, count: int = 100
) -> list[str]:
    """Prompts of words of one topic, or for a share of them of a new topic; on average 12 words, times
    `longer`."""
    sizes = np.maximum(1, (longer * generator.geometric(1 / 12, count)).astype(int))
    topics = generator.random(count) < share_new
    texts = (
        generator.choice(300, p=NEW if new else PAST, size=size)
        for new, size in zip(topics, sizes, strict=True)
    )
    return [" ".join(f"w{word}" for word in text) for text in texts]


def answers(
    generator: np.random.Generator, refusing: float, longer: float = 1.0, count: int = 100
) -> list[str]:
    lengths = np.maximum(1, (longer * generator.geometric(1 / 60, count)).astype(int))
    refused = generator.random(count) < refusing
    return [
        "I'm sorry, but I can't help with that." if no else "x" * length
        for no, length in zip(refused, lengths, strict=True)
    ]


def alarms(simulate: Callable[[np.random.Generator, int], bool], simulations: int) -> int:
    """The number of simulations with an alarm."""
    return sum(simulate(np.random.default_rng(seed), seed) for seed in range(simulations))


def of(signals: Sequence[Signal], name: str) -> Signal:
    return next(signal for signal in signals if signal.name == name)


def p_of(signals: Sequence[Signal], name: str) -> float:
    found = of(signals, name).p
    assert found is not None
    return found


def test_prompts_without_drift_raise_as_few_alarms_as_the_level_says() -> None:
    words = 0
    lengths = 0
    for seed in range(SIMULATIONS):
        generator = np.random.default_rng(seed)
        found = prompt_signals(prompts(generator), prompts(generator), ROUNDS, seed)
        words += p_of(found, "prompts/divergence") < LEVEL
        lengths += p_of(found, "prompts/length") < LEVEL
    assert words <= MOST_FALSE and lengths <= MOST_FALSE


def test_a_quarter_of_prompts_on_a_new_topic_is_found() -> None:
    def alarm(generator: np.random.Generator, seed: int) -> bool:
        found = of(
            prompt_signals(prompts(generator, 0.25), prompts(generator), ROUNDS, seed), "prompts/divergence"
        )
        assert found.value > 0 and found.low <= found.value <= found.high
        return found.p is not None and found.p < LEVEL

    assert alarms(alarm, 50) >= 45


def test_prompts_that_are_twice_as_long_are_found() -> None:
    def alarm(generator: np.random.Generator, seed: int) -> bool:
        return (
            p_of(
                prompt_signals(prompts(generator, longer=2), prompts(generator), ROUNDS, seed),
                "prompts/length",
            )
            < LEVEL
        )

    assert alarms(alarm, 50) >= 45


def test_answers_without_drift_raise_few_alarms() -> None:
    """The 2.5 % bound of the ratio above 1, and the test of refusals."""
    lengths = 0
    refusals = 0
    for seed in range(SIMULATIONS):
        generator = np.random.default_rng(seed)
        found = answer_signals(answers(generator, 0.1), answers(generator, 0.1), ROUNDS, seed)
        lengths += of(found, "answers/length").low > 1
        refusals += p_of(found, "refusals/rise") < LEVEL
    assert lengths <= MOST_FALSE and refusals <= MOST_FALSE


def test_longer_answers_and_more_refusals_are_found() -> None:
    longer = 0
    refusing = 0
    for seed in range(50):
        generator = np.random.default_rng(seed)
        longer += (
            of(
                answer_signals(answers(generator, 0, 1.6), answers(generator, 0), ROUNDS, seed),
                "answers/length",
            ).low
            > 1
        )
        refusing += (
            p_of(
                answer_signals(answers(generator, 0.25), answers(generator, 0.05), ROUNDS, seed),
                "refusals/rise",
            )
            < LEVEL
        )
    assert longer >= 40 and refusing >= 40


def test_the_interval_of_the_length_ratio_covers_the_truth() -> None:
    covered = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        found = of(
            answer_signals(answers(generator, 0, 1.5, 300), answers(generator, 0, 1.0, 300), ROUNDS, seed),
            "answers/length",
        )
        # whole numbers of characters take a third of one off, on average
        covered += found.low <= 1.5 * (60 - 1 / 3) / 60 <= found.high
    assert 90 <= covered <= 99


def judgments(generator: np.random.Generator, noise: float, judge: str, count: int = 60) -> list[Judgment]:
    """Battles of a common truth: a judge gives the winner, a reward model the difference."""
    truth = np.random.default_rng(7).normal(size=count)
    seen = truth + noise * generator.normal(size=count)

    def game(gap: float) -> Game:
        text = SCORES.format(gap, 0.0) if judge == "rm" else "so be it"
        return Game(score="A>B" if gap > 0 else "B>A", judgment={"answer": text})

    return [
        Judgment(
            uid=f"q{n}",
            category="all",
            judge=judge,
            model="new",
            baseline="old",
            games=(game(-gap), game(gap)),
        )
        for n, gap in enumerate(seen)
    ]


def test_a_reward_model_that_left_the_judge_is_found() -> None:
    """The upper bound of the correlation is below 0.5 for one that guesses, and almost never for one that
    agrees."""
    for noise, (least, most) in {0.2: (0, 1), 20.0: (45, 50)}.items():
        found = 0
        for seed in range(50):
            generator = np.random.default_rng(seed)
            signal = agreement(
                judgments(generator, 0.2, "judge"), judgments(generator, noise, "rm"), ROUNDS, seed
            )
            assert signal is not None
            found += signal.high < 0.5
        assert least <= found <= most, noise


def test_a_correlation_needs_questions_and_differences() -> None:
    generator = np.random.default_rng(0)
    rewarded = judgments(generator, 0.1, "rm")
    assert agreement(rewarded[:5], rewarded, ROUNDS, 0) is None
    same = [one.model_copy(update={"games": rewarded[0].games}) for one in rewarded]
    assert agreement(same, rewarded, ROUNDS, 0) is None


class Changed:
    """A judge that names the better answer, but B on a share of the questions, whatever it is."""

    name = "judge"

    def __init__(self, generator: np.random.Generator, likes_b: float, count: int = 60):
        self.always_b = {f"q{n}" for n in np.flatnonzero(generator.random(count) < likes_b)}

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        wins = [
            match.answer_a.endswith("b") if match.question.uid in self.always_b else "good" in match.answer_a
            for match in matches
        ]
        return [Game(score="A>B" if won else "B>A", judgment={}) for won in wins]


def anchors(count: int = 60) -> AnchorPairs:
    questions = [Question(f"q{n}", "all", ({"role": "user", "content": "?"},), {}) for n in range(count)]
    texts = {
        side: [f"good {side}" if (n % 2 == 0) == (side == "b") else f"bad {side}" for n in range(count)]
        for side in "ab"
    }
    return AnchorPairs(questions, texts, np.array([0.0 if n % 2 else 1.0 for n in range(count)]))


def test_a_judge_that_changed_is_found_by_its_anchors() -> None:
    same = judge_anchors(Changed(np.random.default_rng(0), 0.0), anchors())
    assert of(same, "anchors/changed").value == 0
    assert of(same, "anchors/shift").value == 0
    assert p_of(same, "anchors/shift") == 1
    assert 0 < of(same, "anchors/changed").high < 0.1
    found = 0
    for seed in range(30):
        signals = judge_anchors(Changed(np.random.default_rng(seed), 0.5), anchors())
        found += p_of(signals, "anchors/shift") < LEVEL and of(signals, "anchors/changed").low > 0.05
    assert found >= 28


def test_formulas_against_scipy_and_by_hand() -> None:
    generator = np.random.default_rng(0)
    one = generator.normal(size=30)
    other = generator.integers(0, 3, 30) * 1.0
    assert spearman(one[None], other[None])[0] == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)
    assert divergence(np.array([1.0, 0]), np.array([0, 1.0])) == pytest.approx(1)
    assert divergence(np.array([0.5, 0.5]), np.array([0.5, 0.5])) == 0


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I\u2019m unable to assist with this request.", True),
        ("As an AI language model, I cannot do it.", True),
        ("I must decline.", True),
        ("Sorry for the delay! The answer is 4.", False),
        ("You cannot divide by zero.", False),
        ("Sure. " + "x " * 200 + "I can't help with that.", False),
        ("Ich kann dabei nicht helfen.", False),  # other languages are not found
        ("", False),
    ],
)
def test_refusals_are_english_beginnings(answer: str, refused: bool) -> None:
    assert refuses(answer) == refused
