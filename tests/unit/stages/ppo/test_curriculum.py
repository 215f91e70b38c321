"""The prompts that a curriculum draws: their weights against the formula, the edges of pass rates, sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, chisquare

from rlhf_core.config import PPO
from rlhf_core.config.ppo.curriculum_fields import Curriculum
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows.pass_rate_column import pass_rates
from rlhf_core.stages.ppo.ppo_setup import setup_of
from rlhf_core.stages.ppo.sampling.curriculum_draws import CurriculumDraws
from rlhf_core.stages.ppo.sampling.pass_rates import PassCounts, count_group, counts_before, weights_of

N = 4
RIGHT = np.ones(N)
WRONG = np.zeros(N)


def draws(
    prompts: int,
    batch: int = 1,
    known: Sequence[float] | None = None,
    sources: Sequence[int] | None = None,
    seed: int = 0,
    **fields: Any,
) -> CurriculumDraws:
    rates = np.full(prompts, np.nan) if known is None else np.array(known)
    of_source = np.zeros(prompts, np.int64) if sources is None else np.array(sources)
    return CurriculumDraws(Curriculum(**fields), of_source, rates, N, 1.0, batch, seed)


def counts(right: Sequence[float], answered: Sequence[float]) -> PassCounts:
    return PassCounts(
        np.array(right, float), np.array(answered, float), np.array(right) == np.array(answered)
    )


@pytest.mark.parametrize("target", [0.5, 0.2, 0.9])
@pytest.mark.parametrize(("right", "answered"), [(0, 0), (0, 8), (8, 8), (3, 8), (0.5, 2.5), (500, 1000)])
def test_a_weight_is_the_mean_under_the_beta_distribution(
    target: float, right: float, answered: float
) -> None:
    """By numeric integration of the definition."""
    known = beta(right + 1, answered - right + 1)
    mean, _ = quad(
        lambda p: p ** (2 * target) * (1 - p) ** (2 - 2 * target) * known.pdf(p),
        0,
        1,
        points=[known.mean()],
        limit=500,
    )
    assert weights_of(counts([right], [answered]), target)[0] == pytest.approx(mean, rel=1e-6)


def test_the_default_weight_is_the_expected_learnability() -> None:
    right, answered = np.array([0.0, 0, 8, 4, 7]), np.array([0.0, 8, 8, 8, 8])
    a, b = right + 1, answered - right + 1
    found = weights_of(counts(right.tolist(), answered.tolist()), 0.5)
    np.testing.assert_allclose(found, a * b / ((a + b) * (a + b + 1)), rtol=1e-12)
    assert found[3] == found.max() and found[1] == pytest.approx(found[2])
    # with many answers that is p (1 - p)
    assert weights_of(counts([3e7], [1e8]), 0.5)[0] == pytest.approx(0.21, rel=1e-6)


@pytest.mark.parametrize("target", [0.1, 0.5, 0.75])
def test_the_largest_weight_is_at_the_target(target: float) -> None:
    rates = np.arange(1, 100) / 100
    found = weights_of(PassCounts(rates * 1e6, np.full(99, 1e6), rates > 1), target)
    assert rates[found.argmax()] == pytest.approx(target)


def test_prompts_are_drawn_by_their_weights() -> None:
    """Batches of one, so that places are independent: the counts have the multinomial distribution."""
    known = [0.0, 0.25, 0.5, 0.75, 1.0, float("nan")]
    drawn = draws(6, known=known, solved_every=0)
    found = Counter(drawn.prompt_at(place) for place in range(6000))
    weights = weights_of(counts_before(np.array(known), N), 0.5)
    expected = 6000 * weights / weights.sum()
    observed = [found[prompt] for prompt in range(6)]
    assert chisquare(observed, expected).pvalue > 0.01
    assert chisquare(observed, np.full(6, 1000.0)).pvalue < 1e-9, "the test can tell weights apart"


def test_without_a_signal_every_prompt_is_drawn_alike() -> None:
    drawn = draws(5)
    found = Counter(drawn.prompt_at(place) for place in range(5000))
    assert chisquare([found[prompt] for prompt in range(5)]).pvalue > 0.01


def test_a_batch_in_a_row_has_different_prompts() -> None:
    drawn = draws(7, batch=4)
    taken = [drawn.prompt_at(place) for place in range(400)]
    assert all(len(set(taken[start : start + 4])) == 4 for start in range(397))
    assert set(taken) == set(range(7))


def test_one_prompt_is_drawn_again_and_again() -> None:
    drawn = draws(1)
    for place in range(5):
        assert drawn.prompt_at(place) == 0
        drawn.measure([place], RIGHT[None])
    assert drawn.metrics() == {
        "curriculum/solved": 1.0,
        "curriculum/unseen": 0.0,
        "curriculum/mean_pass_rate": 1.0,
    }


@pytest.mark.parametrize("every", [1, 3])
def test_a_solved_prompt_comes_back_after_so_many_times_the_prompts(every: int) -> None:
    drawn = draws(10, batch=2, solved_every=every)
    places: dict[int, list[int]] = {}
    for start in range(0, 2000, 2):
        for place in (start, start + 1):
            places.setdefault(drawn.prompt_at(place), []).append(place)
        rewards = [RIGHT if drawn.prompt_at(place) == 3 else WRONG for place in (start, start + 1)]
        drawn.measure([start, start + 1], np.array(rewards))
    gaps = np.diff(places[3])
    assert len(gaps) > 10 and gaps.min() >= every * 10
    assert all(np.diff(places[prompt]).min() < 10 for prompt in range(10) if prompt != 3)


def test_when_all_are_solved_the_least_recent_comes() -> None:
    drawn = draws(6, batch=2, solved_every=4)
    taken = []
    for place in range(60):
        taken.append(drawn.prompt_at(place))
        drawn.measure([place], RIGHT[None])
    first = taken[:6]
    assert sorted(first) == list(range(6)), "unsolved ones first"
    assert taken == first * 10
    assert drawn.metrics()["curriculum/solved"] == 1.0


def test_all_solved_from_the_column_are_all_drawn() -> None:
    drawn = draws(6, batch=2, known=[1.0] * 6)
    assert sorted(drawn.prompt_at(place) for place in range(6)) == list(range(6))


def test_a_prompt_that_is_solved_no_more_is_as_any_other() -> None:
    drawn = draws(1)
    drawn.prompt_at(0)
    drawn.prompt_at(1)
    drawn.measure([0], RIGHT[None])
    assert drawn.metrics()["curriculum/solved"] == 1.0
    drawn.measure([1], np.array([[1.0, 1, 1, 0]]))
    assert drawn.metrics()["curriculum/solved"] == 0.0


def test_zero_passes_keep_a_weight() -> None:
    """A prompt that nothing solves comes seldom, and never stops coming."""
    drawn = draws(2, known=[0.0, 0.5], discount=1.0)
    for place in range(4000):
        prompt = drawn.prompt_at(place)
        drawn.measure([place], (WRONG if prompt == 0 else np.array([1.0, 1, 0, 0]))[None])
    late = Counter(drawn.prompt_at(place) for place in range(4000, 8000))
    assert 0 < late[0] < 0.05 * late[1]


def test_earlier_answers_count_less() -> None:
    found = counts_before(np.array([0.5, np.nan]), 4)
    count_group(found, 0, 4, 4, 4, 0.5)
    count_group(found, 1, 1, 3, 4, 0.5)
    count_group(found, 1, 0, 0, 4, 0.5)
    assert (found.right.tolist(), found.answered.tolist()) == ([5.0, 1.0], [6.0, 3.0])
    assert found.solved.tolist() == [True, False]
    count_group(found, 0, 0, 2, 4, 0.0)
    assert (found.right[0], found.answered[0], found.solved[0]) == (0.0, 2.0, False)


def test_answers_without_a_reward_do_not_count() -> None:
    drawn = draws(1)
    nan = float("nan")
    for place in (0, 1):
        drawn.prompt_at(place)
    drawn.measure([0], np.array([[nan, nan, nan, nan]]))
    assert drawn.metrics() == {"curriculum/solved": 0.0, "curriculum/unseen": 1.0}
    drawn.measure([1], np.array([[1.0, nan, 0.0, 0.9999999]]))
    assert drawn.metrics()["curriculum/mean_pass_rate"] == pytest.approx(2 / 3)


def test_a_prompt_is_solved_only_when_all_its_answers_have_a_reward() -> None:
    drawn = draws(1)
    nan = float("nan")
    shares = []
    for place, rewards in enumerate(([1.0, nan, nan, nan], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, nan])):
        drawn.prompt_at(place)
        drawn.measure([place], np.array([rewards]))
        shares.append(drawn.metrics()["curriculum/solved"])
    assert shares == [0.0, 1.0, 0.0]


def test_sources_keep_their_shares() -> None:
    """The weights of one source are far larger, and say nothing about the other's share."""
    sources = [0] * 5 + [1] * 15
    known = [0.5] * 5 + [0.0] * 15
    drawn = draws(20, known=known, sources=sources)
    found = Counter(sources[drawn.prompt_at(place)] for place in range(4000))
    assert chisquare([found[0], found[1]], [1000, 3000]).pvalue > 0.01


def test_a_source_without_a_free_prompt_is_passed_over() -> None:
    drawn = draws(4, batch=4, sources=[0, 0, 0, 2])
    taken = [drawn.prompt_at(place) for place in range(40)]
    assert all(sorted(taken[start : start + 4]) == [0, 1, 2, 3] for start in range(0, 40, 4))


def test_the_column_is_read() -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("one", {"rate": 0}),
        ("two", {"rate": None}),
        ("three", {}),
        ("four", {"rate": 0.5}),
    ]
    np.testing.assert_array_equal(pass_rates("rate", rows), [0, np.nan, np.nan, 0.5])
    np.testing.assert_array_equal(pass_rates(None, rows), [np.nan] * 4)
    for wrong in (1.5, -0.1, "0.5", True, float("nan")):
        with pytest.raises(ValueError, match=r"two: rate is .* a pass rate is from 0 to 1"):
            pass_rates("rate", [("one", {"rate": 1}), ("two", {"rate": wrong})])
    with pytest.raises(ValueError, match=r"curriculum\.pass_rate_key: no row has the column 'share'"):
        pass_rates("share", rows)


def ppo(**fields: Any) -> PPO:
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8}
    given = {"prompts": {"sources": "p.jsonl"}, "advantage_estimator": "grpo", **sizes, **fields}
    return PPO.model_validate(given)


def test_right_is_the_highest_reward_of_verifiers() -> None:
    assert ppo(curriculum={}, reward="math").right_from == 1.0
    assert ppo(curriculum={}, reward=["math", {"verifier": "code", "weight": 0.5}]).right_from == 1.5
    assert ppo(curriculum={"right": 0.3}).right_from == 0.3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, r"set curriculum\.right"),
        ({"reward": ["math", "reward_model"]}, r"set curriculum\.right"),
        ({"reward": {"verifier": "math", "weight": -1}}, r"set curriculum\.right"),
        ({"reward": "none", "reference": "teacher", "init_kl_coef": 1}, "reward is none"),
        (
            {"reward": {"judge": {"model": "j"}, "rubric": "good", "compare": "group"}},
            "compare: group gives every group",
        ),
    ],
)
def test_what_has_no_right_answers_is_refused(fields: dict[str, Any], told: str) -> None:
    more = {"kl_in": "reward"} if fields.get("reward") == "none" else {}
    ppo(**fields, **more)
    with pytest.raises(ValueError, match=told):
        ppo(curriculum={}, **fields, **more)


def test_without_a_curriculum_nothing_changes() -> None:
    prompts = [Prompt((), [i], {}, False) for i in range(10)]
    paths = {"reward:reward_model": "rm"}
    plain = setup_of(ppo(), prompts, paths, [0], 3).order
    assert plain.curriculum is None
    drawn = setup_of(ppo(curriculum={"right": 1}), prompts, paths, [0], 3, [0] * 10).order
    assert drawn.take(0, 8) == drawn.take(0, 8) and drawn.take(4, 2) == drawn.take(0, 8)[4:6]
    assert [prompt.tokens for prompt, _ in drawn.take(0, 8)] != [p.tokens for p, _ in plain.take(0, 8)]
