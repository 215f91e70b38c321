"""Credit of a recorded rollout against numbers computed by hand, for every estimator; and what is masked when
a reward is missing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Term
from rlhf_core.stages.ppo.rewards.credit import credit
from rlhf_core.stages.ppo.roles.role_passes import on_tokens
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores
from tests.support.recorded_rollout import (
    OLD,
    REFERENCE,
    REWARDS,
    TERMS,
    VALUES,
    advantages,
    answers,
    arrays,
    close,
    credited,
    ppo,
)

# By hand: KL (k1) = 0.5, 0, -1 and -0.5, 0; token rewards with coefficient 0.1: -0.05, 0, 0.1 + 2 and 0.05, 0
# - 1. GAE, gamma 1, lambda 0.5: A: 2.1 - 1.5 = 0.6;  (0 + 1.5 - 1) + 0.5 * 0.6 = 0.8;  (-0.05 + 1 - 0.5) +
# 0.5 * 0.8 = 0.85 B: -1 + 0.5 = -0.5;  (0.05 - 0.5 - 0.25) - 0.5 * 0.5 = -0.95
GAE = [[0.85, 0.8, 0.6], [-0.95, -0.5]]
RETURNS = [[1.35, 1.8, 2.1], [-0.7, -1.0]]  # + values
# Mean 0.8 / 5 = 0.16; variance (0.69^2 + 0.64^2 + 0.44^2 + 1.11^2 + 0.66^2) / 5 = 2.747 / 5 = 0.5494
STD = 0.5494**0.5
WHITE = [[0.69 / STD, 0.64 / STD, 0.44 / STD], [-1.11 / STD, -0.66 / STD]]


def test_advantages_and_returns_of_the_recorded_rollout() -> None:
    found = credited()
    assert advantages(found) == [close(row) for row in WHITE]
    assert [e.returns[1:].tolist() for e in found.experience] == [close(row) for row in RETURNS]
    assert advantages(credited(ppo(whiten_advantages=False))) == [close(row) for row in GAE]
    assert all(e.advantages[0] == e.returns[0] == 0 for e in found.experience), "the prompt earns nothing"
    assert found.usable == [0, 1]


def test_metrics_of_the_recorded_rollout() -> None:
    found = credited()
    assert found.kl == close(-0.2)  # (0.5 + 0 - 1 - 0.5 + 0) / 5
    expected = {
        "kl/mean": -0.2,
        "kl/per_answer": -0.5,  # (-0.5 - 0.5) / 2
        "reward/mean": 0.5,
        "reward/std": 1.5,
        "return/mean": 3.55 / 5,
        "response/length": 2.5,
        "response/truncated": 0.5,
        "sampler/gap": (math.log(4) + math.log(2)) / 5,
        "sampler/capped": 0.2,
        # position 0.99 * 4 = 3.96 of 0, 0, 0, ln 2, ln 4
        "sampler/gap_p99": math.log(2) + 0.96 * (math.log(4) - math.log(2)),
        "rollout/usable": 1.0,
        # returns - values has variance 0.5494; returns minus their mean of 0.71: 0.64, 1.09, 1.39, -1.41,
        # -1.71
        "value/explained_variance": 1 - 0.5494 / ((0.4096 + 1.1881 + 1.9321 + 1.9881 + 2.9241) / 5),
    }
    assert {name: found.metrics[name] for name in expected} == close(expected)


def test_equal_returns_leave_nothing_to_explain() -> None:
    found = credited(ppo(lambd=1.0), rewards=[1.0, 1.0], kl_coef=0.0)
    assert {float(value) for e in found.experience for value in e.returns[1:]} == {1.0}
    assert found.metrics["value/explained_variance"] == 0.0


def test_the_share_of_clipped_rewards() -> None:
    assert credited().metrics["reward/clipped"] == 0  # rewards 2 and -1
    assert credited(ppo(reward_clip=1.5)).metrics["reward/clipped"] == 0.5


def test_without_a_reference_no_kl_is_told() -> None:
    told = credited(ppo(init_kl_coef=0.0)).metrics
    assert not [name for name in told if name.startswith("kl/")]
    assert "kl/mean" in credited(ppo(init_kl_coef=0.0, reference="base")).metrics


def test_what_no_loss_reads_does_not_travel() -> None:
    usual = credited(ppo())
    lean = credited(ppo(kl_in="loss", kl_estimator="k3", sampler_is="off"))
    assert all(
        e.ref_logprobs is None and e.sampler_logprobs is not None and e.values is not None
        for e in usual.experience
    )
    assert all(e.ref_logprobs is not None and e.sampler_logprobs is None for e in lean.experience)


def range_of(config: PPO, rewards: list[float] = REWARDS, cut: bool = False) -> float | None:
    """How far values may move; `cut`: a limit cut the first answer."""
    rollouts = answers((not cut, True))
    scores = Scores(arrays(OLD), arrays(REFERENCE), arrays(VALUES), Rewards({"model": np.array(rewards)}, {}))
    return credit(rollouts, scores, 0.1 if config.init_kl_coef else 0.0, {}, config, TERMS).value_clip


def test_values_may_move_by_a_share_of_the_spread_of_all_returns() -> None:
    flat = np.array([x for row in RETURNS for x in row])
    assert range_of(ppo()) == close(0.2 * flat.std())
    of_trained = 0.5 * ((0.95**2 + 0.5**2) / 2) ** 0.5  # the distances of the second answer's values
    assert range_of(ppo(value_clip=0.5, mask_truncated=True), cut=True) == close(of_trained)
    assert range_of(ppo(value_clip=None)) is None and range_of(ppo(advantage_estimator="rloo")) is None
    equal = ppo(init_kl_coef=0.0, lambd=1.0)
    far = np.array([2.5, 2.0, 1.5, 2.75, 3.5])  # from values to returns that are all 3
    assert range_of(equal, [3.0, 3.0]) == close(0.2 * np.sqrt((far**2).mean()))


# The other estimators; rewards are 1.5 from their mean. The KL of the whole answer, here k2, is 0.125 + 0 +
# 0.5 and 0.125 + 0, or 0.25 from its mean, and costs a tenth of it.


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # standard deviation of two: their distance / sqrt 2; the KL as for rloo
        ("grpo", 1.5 / (3 / 2**0.5 + 1e-4) - 0.05),
        ("dr_grpo", 1.5 - 0.025),
        ("rloo", 3 - 0.05),
    ],
)
def test_group_estimators_of_the_recorded_rollout(estimator: str, expected: float) -> None:
    found = credited(ppo(advantage_estimator=estimator, kl_estimator="k2"))
    assert advantages(found) == [close([expected] * 3), close([-expected] * 2)]
    assert "value/explained_variance" not in found.metrics


def test_reinforce_pp_of_the_recorded_rollout() -> None:
    # Of five tokens three have the reward 2 and two -1: mean 0.8, variance 2.16. The KL costs -0.05, -0.1,
    # -0.1 and -0.05, 0 to go: mean -0.06.
    high = 1.2 / 2.16**0.5
    low = -1.8 / 2.16**0.5
    found = advantages(credited(ppo(advantage_estimator="reinforce_pp")))
    assert found == [close([high - 0.01, high + 0.04, high + 0.04]), close([low - 0.01, low - 0.06])]
    # With the group's mean of 0.5 off the rewards, 1.5 and -1.5, the same after whitening.
    assert advantages(credited(ppo(advantage_estimator="reinforce_pp_baseline"))) == found
    # Without whitening, returns to go of -0.05, 0, 2.1 and 0.05, -1.
    plain = credited(ppo(advantage_estimator="reinforce_pp", whiten_advantages=False))
    assert advantages(plain) == [close([2.05, 2.1, 2.1]), close([-0.95, -1.0])]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.0, 1.0, -10.0])
def test_answers_of_equal_reward_learn_no_more_than_their_kl(estimator: str, reward: float) -> None:
    """The KLs of the answers differ by 0.5 nats: no estimator divides them by their own deviation."""
    found = credited(
        ppo(advantage_estimator=estimator, kl_estimator="k2"), [reward] * 4, copies=2, kl_coef=0.1
    )
    sizes = [abs(value) for row in advantages(found) for value in row]
    assert 0 < max(sizes) <= 0.1 * 0.5 + 1e-6
    without = credited(
        ppo(advantage_estimator=estimator, kl_estimator="k2"), [reward] * 4, copies=2, kl_coef=0.0
    )
    assert advantages(without) == [close([0.0] * len(row)) for row in advantages(without)]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_the_kl_costs_the_same_whatever_the_scale_of_the_rewards(estimator: str) -> None:
    def costs(scale: float) -> np.ndarray:
        rewards = [scale * reward for reward in REWARDS]
        config = ppo(advantage_estimator=estimator, reward_clip=1e6, kl_estimator="k2")
        with_kl, without = (credited(config, rewards, kl_coef=coef) for coef in (0.1, 0.0))
        gaps = zip(advantages(with_kl), advantages(without), strict=True)
        return np.concatenate([np.subtract(*pair) for pair in gaps])

    assert costs(1.0) == pytest.approx(costs(1000.0), abs=1e-3)
    assert np.abs(costs(1.0)).max() > 0.01


def test_rewards_are_clipped_before_kl_and_penalties() -> None:
    found = credited(ppo(advantage_estimator="dr_grpo", reward_clip=0.5))
    # 0.5 + 0.05 and -0.5 + 0.05: mean 0.05
    assert advantages(found) == [close([0.5] * 3), close([-0.5] * 2)]
    # Three tokens at a limit of 3 with a buffer of 2: (3 - 2 - 3) / 2 = -1; two tokens: (3 - 2 - 2) / 2 =
    # -0.5; both times 0.4
    found = credited(
        ppo(
            advantage_estimator="dr_grpo",
            reward_clip=0.5,
            generate_max_len=3,
            overlong_buffer=2,
            overlong_penalty=0.4,
        )
    )
    # 0.55 - 0.4 = 0.15 and -0.45 - 0.2 = -0.65, mean -0.25
    assert advantages(found) == [close([0.4] * 3), close([-0.4] * 2)]
    assert found.metrics["reward/overlong"] == close(-0.3)


# What has no reward.

NAN = float("nan")


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp"])
def test_an_answer_without_reward_changes_nothing_for_the_others(estimator: str) -> None:
    """The same answers with a third prompt's, whose rewards failed: as if they had never been sampled."""
    config = ppo(advantage_estimator=estimator)
    alone = credited(config)
    with_failed = credited(config, [*REWARDS, NAN, NAN], copies=2)
    assert with_failed.usable == [0, 1]
    assert advantages(with_failed)[:2] == advantages(alone)
    assert not any(
        e.advantages.any() or (e.returns is not None and e.returns.any()) for e in with_failed.experience[2:]
    )
    for name in ("kl/mean", "kl/per_answer", "reward/mean", "reward/std", "return/mean"):
        assert with_failed.metrics[name] == close(alone.metrics[name]), name
    assert with_failed.metrics["reward/model/failed"] == 2 and with_failed.metrics["rollout/usable"] == 0.5


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_goes_on_without_its_failed_answer(estimator: str) -> None:
    """Groups of four with a failure are groups of the others; an answer left alone has nothing to be compared
    with."""
    four = ppo(advantage_estimator=estimator, n_samples_per_prompt=4)
    found = credited(four, [2.0, NAN, NAN, -1.0, 5.0, NAN, NAN, NAN], copies=4, kl_coef=0.0)
    two = credited(ppo(advantage_estimator=estimator), kl_coef=0.0)
    assert found.usable == [0, 3]
    assert [advantages(found)[0], advantages(found)[3]] == advantages(two)
    assert not np.any(found.experience[4].advantages), "the lone answer of the second group"
    with pytest.raises(ValueError, match="each prompt needs two answers with a reward"):
        credited(four, [2.0, NAN, NAN, NAN], copies=2)


# What is given before the last token.


def test_steps_of_an_answer_are_credited_where_they_end() -> None:
    """Answer A of tokens 0, 1, 2, a character each: steps of 0.5 and 1.5; B has a plain reward."""
    config = ppo(
        advantage_estimator="reinforce_pp",
        whiten_advantages=False,
        gamma=0,
        init_kl_coef=0.0,
        reward="checks.py:steps",
    )
    rollouts = answers((True, True))
    rewards = Rewards({"steps": np.array([2.0, -1.0])}, {}, {"steps": {0: [(2, 0.5), (3, 1.5)]}})
    scores = Scores(arrays(OLD), None, None, rewards)
    terms = [Term("steps", 2.0, "none", None)]
    config = config.model_copy(update={"reward": (config.reward[0].model_copy(update={"weight": 2.0}),)})
    found = credit(rollouts, scores, 0.0, {}, config, terms, lambda tokens: list(range(1, 1 + len(tokens))))
    assert [e.advantages[1:].tolist() for e in found.experience] == [close([0, 1, 3]), close([0, -2])]
    clipped = credit(
        rollouts,
        scores,
        0.0,
        {},
        config.model_copy(update={"reward_clip": 1.5}),
        terms,
        lambda tokens: list(range(1, 1 + len(tokens))),
    )
    # 3 of 4 are clipped: all steps in proportion
    assert clipped.experience[0].advantages[1:].tolist() == close([0, 0.375, 1.125])


def paid(
    steps: list[tuple[int, float]], weight: float = 1.0, estimator: str = "reinforce_pp"
) -> list[list[float]]:
    """The advantages of two answers of four tokens, a character each, with the same steps. With gamma 0 they
    are the rewards of the tokens."""
    config = ppo(
        advantage_estimator=estimator,
        whiten_advantages=False,
        gamma=1 if estimator == "reinforce_pp_baseline" else 0,
        init_kl_coef=0.0,
        reward="checks.py:steps",
    )
    (source,) = config.reward
    config = config.model_copy(update={"reward": (source.model_copy(update={"weight": weight}),)})
    document = Document([7, 0, 1, 2, 3], [False, *[True] * 4])
    zeros = np.zeros(5, np.float32)
    rollouts = [Rollout(Prompt((), [7], {}, False), document, zeros, True)] * 2
    total = sum(reward for _, reward in steps)
    rewards = Rewards({"steps": np.array([total, total])}, {}, {"steps": {0: steps, 1: steps}})
    terms = [Term("steps", weight, "none", None)]
    scores = Scores([zeros, zeros], None, None, rewards)
    found = credit(rollouts, scores, 0.0, {}, config, terms, lambda tokens: list(range(1, 1 + len(tokens))))
    return [on_tokens(e.advantages, e.document)[1:].tolist() for e in found.experience]


@pytest.mark.parametrize(
    ("steps", "weight", "expected"),
    [
        ([(1, 30.0), (4, 10.0)], 1.0, [7.5, 0, 0, 2.5]),  # a sum of 40, clipped to 10
        ([(1, 50.0), (4, 50.0)], 0.1, [5, 0, 0, 5]),  # a weighted sum of 10: nothing to clip
        ([(1, 20.0), (2, -15.0), (4, 1.0)], 1.0, [20, -15, 0, 1]),  # a sum of 6: nothing to clip
    ],
)
def test_large_steps_keep_their_proportions(
    steps: list[tuple[int, float]], weight: float, expected: list[float]
) -> None:
    assert paid(steps, weight) == [close(expected)] * 2


def test_steps_of_equal_answers_teach_a_group_nothing() -> None:
    assert paid([(2, 0.5), (4, 0.5)], estimator="reinforce_pp_baseline") == [[0.0] * 4] * 2


def test_a_teacher_rewards_each_token_by_its_own_log_prob() -> None:
    fields = dict(advantage_estimator="reinforce_pp", whiten_advantages=False, gamma=0)
    fields |= dict(reward="none", reference="teacher")
    found = credited(ppo(**fields, init_kl_coef=1.0), rewards=[0.0, 0.0], kl_coef=1.0)
    gaps = [
        [r - o for o, r in zip(old[1:], ref[1:], strict=True)]
        for old, ref in zip(OLD, REFERENCE, strict=True)
    ]
    assert advantages(found) == [close(row) for row in gaps]


@pytest.mark.parametrize(
    "changes", [{"reference": None}, {"init_kl_coef": 0.0}, {"kl_in": "loss", "kl_estimator": "k3"}]
)
def test_without_a_reward_there_must_be_a_teacher(changes: dict[str, object]) -> None:
    fields = dict(advantage_estimator="reinforce_pp", reward="none", reference="teacher", init_kl_coef=1.0)
    ppo(**fields)
    with pytest.raises(ValueError, match=r"reward none learns .* teacher: set reference to the teacher"):
        ppo(**{**fields, **changes})
    with pytest.raises(ValueError, match="eval_prompts and dynamic_filtering compare rewards"):
        ppo(**fields, eval_prompts={"sources": "p.jsonl"})


def test_rewards_standardised_in_groups_are_standardised_over_the_iteration_and_not_again_in_groups() -> None:
    """Three groups with grpo: two sources differ in one, one source in another, and none in the last."""
    by_source = {
        "right": np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
        "short": np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    }
    terms = [Term(name, 1.0, "group", None) for name in by_source]
    sources = [{"function": f"a.py:{name}", "normalize": "group"} for name in by_source]
    config = ppo(advantage_estimator="grpo", reward=sources, init_kl_coef=0)
    prompt = Prompt((), [7], {}, False)
    rollouts = [
        Rollout(prompt, Document([7, 1], [False, True]), np.zeros(2, np.float32), True) for _ in range(6)
    ]
    zeros = [np.zeros(2, np.float32)] * 6
    found = credit(rollouts, Scores(zeros, None, None, Rewards(by_source, {})), 0.0, {}, config, terms)
    given = [float(np.max(np.abs(e.advantages))) for e in found.experience]
    assert given[0] == given[1] == pytest.approx(2 * given[2], rel=1e-3) and given[2] == given[3] > 0
    assert given[4] == given[5] == 0
    assert sum(value**2 for value in given) / 5 == pytest.approx(1, rel=1e-3)  # sample deviation of them all
