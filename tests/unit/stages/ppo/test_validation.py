"""Validation of PPO: what is measured of the answers, which prompts are left out, and which iteration is the
best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO
from rlhf_core.config.kinds import metrics_of
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import term_of
from rlhf_core.rollout.engine_contract import Sampling, answer_of
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.rollout_group import SeededPrompt, rollout
from rlhf_core.stages.ppo.sampling.validation import (
    REWARD,
    Best,
    Validation,
    answer_as,
    load_validation,
    measured,
    pass_at,
    sampling_of,
)

NAN = float("nan")


def config(**more: object) -> PPO:
    return PPO.model_validate(
        {"advantage_estimator": "rloo", "n_samples_per_prompt": 2, "reward": "f.py:f", **more}
    )


def rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(Prompt((), [5], {}, False), Document([5, 6, 7], [False, True, True]), np.zeros(3), i % 2 == 0)
        for i in range(count)
    ]


def validation(values: list[float], n: int, right: float | None = None, **groups: range) -> dict[str, float]:
    found = config(prompts={"sources": "x"})
    terms = [term_of(source, None, "none") for source in found.reward]
    asked = Validation([], groups, [], Sampling(n, 1.0, 8, []), terms, right, 0)
    return measured(Rewards({found.reward[0].title: np.array(values)}, {}), rollouts(len(values)), asked)


def test_the_interval_is_over_prompts() -> None:
    found = validation([1, 3, 2, 2, 0, 4, 5, 7], n=2)  # means 2, 2, 2, 6
    assert found["eval/reward/mean"] == 3
    assert found["eval/response/length"] == 2
    assert found["eval/response/truncated"] == 0.5
    half = 3.182 * 2 / 2  # Student's quantile of three degrees of freedom, times the standard error
    assert (
        found["eval/reward/ci_high"] - 3 == pytest.approx(half, rel=1e-3) == 3 - found["eval/reward/ci_low"]
    )


def test_equal_rewards_of_unknown_scale_have_no_interval() -> None:
    """Four prompts that all score -1 do not show that every prompt does."""
    assert "eval/reward/ci_low" not in validation([-1.0] * 4, n=1)
    assert validation([1.0] * 4, n=1)["eval/reward/ci_low"] < 0.6, "like a rate"
    rounded = 0.33 + 0.56 + 0.11  # weights of three sources, a rounding error above 1
    assert rounded > 1 and validation([rounded] * 4, n=1)["eval/reward/ci_low"] < 0.6


def test_answers_without_a_reward_do_not_count() -> None:
    found = validation([1, NAN, NAN, NAN, 3, 5], n=2)
    assert found["eval/reward/mean"] == pytest.approx(2.5)
    assert validation([NAN, 4], n=2)["eval/reward/mean"] == 4


@pytest.mark.parametrize("prompts", [3, 6, 60])
def test_intervals_cover_the_truth(prompts: int) -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        found = validation(list(rng.normal(1.0, 2.0, prompts) + rng.normal(0, 1, prompts)), n=1)
        inside += found["eval/reward/ci_low"] <= 1.0 <= found["eval/reward/ci_high"]
    assert 0.91 < inside / 400 < 0.985


def test_right_answers_and_pass_at_k() -> None:
    found = validation([1, 0, 0, 0, 1, 1], n=2, right=0.5)
    assert found["eval/right/mean"] == pytest.approx(0.5) and found["eval/pass@2"] == pytest.approx(2 / 3)
    assert found["eval/pass@1"] == found["eval/right/mean"]
    assert 0 < found["eval/right/ci_low"] < 0.5 < found["eval/right/ci_high"] < 1
    perfect = validation([1, 1, 1], n=1, right=0.5)  # three of three prove little
    assert (perfect["eval/right/ci_low"], perfect["eval/right/ci_high"]) == pytest.approx(
        (0.05 ** (1 / 3), 1)
    )
    assert not [name for name in validation([1, 0], n=2) if "right" in name or "pass" in name]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_pass_at_is_the_share_of_all_choices_with_a_right_answer(n: int) -> None:
    for right in range(n + 1):
        for k in range(1, n + 1):
            chosen = list(combinations([True] * right + [False] * (n - right), k))
            assert pass_at(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_k_is_told_for_powers_of_two_and_all_answers() -> None:
    """By counting all choices of k answers to each prompt; a prompt with fewer answers says nothing."""
    table = [[1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, NAN, NAN, 0]]
    found = validation([value for row in table for value in row], n=6, right=0.5)
    told = {name: value for name, value in found.items() if "pass@" in name}
    expected = {}
    for k in (1, 2, 4, 6):
        given = [[value for value in row if value == value] for row in table]
        chances = [
            np.mean([max(chosen) for chosen in combinations(row, k)]) for row in given if len(row) >= k
        ]
        expected[f"eval/pass@{k}"] = np.mean(chances)
    assert told == pytest.approx(expected)
    declared = set(
        metrics_of(
            config(prompts={"sources": "x"}, eval_prompts={"sources": "y"}, eval_samples=6, eval_right=0.5)
        )
    )
    assert set(told) <= declared
    assert "eval/pass@6" not in validation([1, NAN, NAN, NAN, NAN, NAN], n=6, right=0.5)


def test_answers_are_sampled_as_in_the_training_unless_the_recipe_says_otherwise() -> None:
    held: dict[str, Any] = dict(
        prompts={"sources": "x"}, eval_prompts={"sources": "y"}, temperature=0.8, top_p=0.9
    )
    usual = sampling_of(config(**held), 2, [7])
    assert (usual.temperature, usual.top_p, usual.n, usual.logprobs) == (0.8, 0.9, 2, False)
    other = sampling_of(config(**held, eval_temperature=0.0, eval_top_p=0.5), 1, [7])
    assert (other.temperature, other.top_p) == (0.0, 0.5)
    with pytest.raises(ValueError, match="eval_temperature=0 gives the same answer every time"):
        config(**held, eval_temperature=0, eval_samples=2)
    with pytest.raises(
        ValueError, match=r"eval_prompts is not set, but .*eval_temperature, eval_top_p applies to it"
    ):
        config(prompts={"sources": "x"}, eval_temperature=0.5, eval_top_p=0.5)


class Engines:
    """In place of the fleet: answers are the seeds they are asked with, of the checkpoint that was loaded; an
    engine dies when it is told to, and is then sent the actor's weights."""

    def __init__(self, deaths: int):
        self.deaths = deaths
        self.revivals = 0
        self.weights = "actor"
        self.asked: list[tuple[str, list[int]]] = []

    def load(self, checkpoint: Path) -> None:
        self.weights = checkpoint.name

    def start_rollouts(self, seeded: Sequence[SeededPrompt], sampling: Sampling) -> Any:
        if len(self.asked) < self.deaths:
            self.weights = "actor"
            self.revivals = self.revivals + 1
        self.asked.append((self.weights, [seed for _, seed in seeded]))
        rollouts = [rollout(prompt, answer_of([6], [], True)) for prompt, _ in seeded]
        return lambda: [one for one in rollouts for _ in range(sampling.n)]

    def reward_while_asleep(self, found: Sequence[Rollout], allowed: int) -> Rewards:
        return Rewards({"f": np.full(len(found), float(self.weights == "iteration3"))}, {})

    def decode(self, tokens: Sequence[int], skip: bool) -> str:
        return "text"


@pytest.mark.parametrize("deaths", [0, 2])
def test_the_best_iteration_answers_again_with_seeds_of_its_own(tmp_path: Path, deaths: int) -> None:
    fleet = Engines(deaths)
    run = RunDir(tmp_path)
    terms = [term_of(source, None, "none") for source in config(prompts={"sources": "x"}).reward]
    asked = Validation(
        [Prompt((), [5], {}, False)] * 2, {}, [1, 2], Sampling(1, 1.0, 8, []), terms, None, 0, [3, 4]
    )
    found = answer_as(fleet, fleet, asked, run, tmp_path / "iteration3")  # type: ignore[arg-type]
    assert found[REWARD] == 1.0 and fleet.asked == [("actor", [3, 4])] * deaths + [("iteration3", [3, 4])]
    assert len((tmp_path / "validation" / "checkpoint.jsonl").read_text().splitlines()) == 2


def test_each_data_source_has_its_own() -> None:
    found = validation([1, 2, 3, 10], n=1, right=3, first=range(3), second=range(3, 4))
    assert found["eval/reward/mean"] == 4
    assert found["eval/first/reward/mean"] == 2
    assert found["eval/second/reward/mean"] == 10
    assert found["eval/first/right/mean"] == pytest.approx(1 / 3)


def test_the_best_iteration() -> None:
    best = Best(0, {REWARD: 1.0})
    for iteration, reward in ((10, 2.0), (20, 2.0), (30, 1.0)):
        best = best.after(iteration, {REWARD: reward})
    assert best == Best(10, {REWARD: 2.0}, since=2)
    assert best.after(40, {REWARD: 3.0}) == Best(40, {REWARD: 3.0})


def test_prompts_of_the_training_are_left_out(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (material / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:20]) + "\n")
    (tmp_path / "held.jsonl").write_text("\n".join(lines[15:30]) + "\n")
    row = json.loads(lines[0])
    (tmp_path / "other.jsonl").write_text(
        "".join(json.dumps(row | {"prompt": f"{i}?"}) + "\n" for i in range(3))
    )
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    two = [{"path": str(tmp_path / name), "probability": 0.5} for name in ("held.jsonl", "other.jsonl")]
    recipe = config(
        prompts={"sources": str(tmp_path / "train.jsonl")}, eval_prompts={"sources": two}, prompt_max_len=64
    )
    training = load_prompts(recipe.prompts, renderer, 64, 0).items
    known = {tuple(prompt.tokens) for prompt in training}
    found = load_validation(recipe, renderer, training, [], [], 0)
    assert found is not None and not known & {tuple(prompt.tokens) for prompt in found.prompts}
    assert len(set(found.seeds) | set(found.fresh_seeds)) == 2 * len(found.prompts)
    assert list(found.groups) == ["held", "other"]
    assert list(found.groups["other"])[-1] == len(found.prompts) - 1
    assert "eval_prompts are prompts of the training, too: they are left out" in capsys.readouterr().out
    same = recipe.model_copy(update={"eval_prompts": recipe.prompts})
    with pytest.raises(ValueError, match="every one of eval_prompts is a prompt of the training, too"):
        load_validation(same, renderer, training, [], [], 0)
    assert (
        load_validation(recipe.model_copy(update={"eval_prompts": None}), renderer, training, [], [], 0)
        is None
    )


def test_a_file_named_like_a_task_is_a_group_of_its_own(material: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make setup-dev")
    (tmp_path / "gcd.jsonl").write_text('{"prompt": "a?"}\n{"prompt": "b?"}\n')
    generated = {"reasoning_gym": {"tasks": ["gcd", "lcm"], "size": 6}, "probability": 0.5}
    sources = [{"path": str(tmp_path / "gcd.jsonl"), "probability": 0.5}, generated]
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    prompts = {"sources": str(material / "prompts.jsonl")}
    recipe = config(prompts=prompts, eval_prompts={"sources": sources}, prompt_max_len=512)
    found = load_validation(recipe, renderer, [], [], [], 0)
    assert found is not None
    sizes = {name: len(places) for name, places in found.groups.items()}
    assert sizes == {"gcd": 2, "gcd-task": 3, "lcm": 3}


def test_fields_without_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="eval_prompts is not set, but stop_when applies to it:"):
        config(prompts={"sources": "x"}, stop_when=2)


def test_answers_without_log_probs_are_rollouts() -> None:
    """As those of validation, which asks for none."""
    found = rollout(Prompt((), [1, 2], {}, False), answer_of([3, 4], [], True))
    assert found.answer == [3, 4] and found.sampler_logprobs.tolist() == [0, 0, 0, 0]


def test_a_weighed_sum_just_below_the_bound_is_right() -> None:
    """0.7 + 0.2 + 0.1 is 0.9999999999999999."""
    found = validation([0.7 + 0.2 + 0.1, 0.0], n=2, right=1.0)
    assert found["eval/right/mean"] == 0.5
