"""Rollouts that a run keeps for one without engines: what is read is what was written, and what does not fit is
refused."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt, compact
from rlhf_core.data.pictures.picture_source import EncodedPicture, PictureSource
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.iteration import Carried, measure_pass_rates, ppo_iteration, sampled_of
from rlhf_core.stages.ppo.iteration_loop import IterationLoop
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.rollout_records import Own, Rollout, stored
from rlhf_core.stages.ppo.sampling.kept_answers import KeptAnswers
from rlhf_core.stages.ppo.sampling.sampled_answers import MeasuredGroups, Sampled, Setup
from rlhf_core.stages.ppo.sampling.stored import (
    kept_iterations,
    read_kept,
    remove_kept,
    write_ahead,
    write_kept,
)
from tests.unit.stages.ppo.test_ppo_sampling import PROMPTS, Fleet


def ppo(**fields: Any) -> PPO:
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8}
    given = {"prompts": {"sources": "p.jsonl"}, "advantage_estimator": "grpo", **sizes, **fields}
    return PPO.model_validate(given)


def setup(prompts: Sequence[Prompt] = PROMPTS, actor: str = "models/base", **fields: Any) -> Setup:
    return setup_of(ppo(**fields), prompts, {"actor": actor, "reward:reward_model": "rm"}, [0], 0)


def answers() -> tuple[list[Rollout], Rewards]:
    """Two answers each to prompts 7 and 2; one is an episode, one has experts, one no reward."""
    rollouts = []
    for number in (7, 2):
        for j in range(2):
            experts = np.full((3, 2, 1), j, np.int16) if number == 2 else None
            document = compact([number], [5 + j, 6, 7], experts)
            logprobs = np.array([0, -0.1, -0.2, -1 / 3], np.float32)
            rollouts.append(Rollout(PROMPTS[number], document, logprobs, bool(j), versions=[(1, 4)]))
    episode_prompt = Prompt(({"role": "user", "content": "7 and tools"},), [7, 8], PROMPTS[7].row, True)
    document = Document([7, 8, 1, 2, 3], [False, False, True, False, True])
    own = Own(0.5, np.array([0, 0, 0.25, 0, 0], np.float32), "", 2, 1, 0.1, ended_by="turns")
    talk = ({"role": "user", "content": "x"},)
    rollouts[1] = Rollout(episode_prompt, document, np.zeros(5, np.float32), False, talk, own)
    return rollouts, Rewards(
        {"reward_model": np.array([0.1 + 0.2, 1.0, math.nan, -2.0])}, {"reward_model": "e"}
    )


def test_kept_rollouts_are_read_bit_for_bit(tmp_path: Path) -> None:
    rollouts, rewards = answers()
    statistics = {"reward_model": Running(4, 0.1, 1 / 3)}
    write_kept(tmp_path / "kept", 3, setup(), rollouts, rewards, statistics)
    found = read_kept(tmp_path / "kept", 3, setup())
    assert (found.position, found.statistics) == (3, statistics)
    assert found.rewards is not None and found.rewards.errors == rewards.errors
    np.testing.assert_array_equal(found.rewards.by_source["reward_model"], rewards.by_source["reward_model"])
    for one, other in zip(found.rollouts, rollouts, strict=True):
        assert (one.prompt, one.finished, list(one.versions)) == (
            other.prompt,
            other.finished,
            list(other.versions),
        )
        assert list(one.document.tokens) == list(other.document.tokens)
        np.testing.assert_array_equal(one.document.mask_array, other.document.mask_array)
        np.testing.assert_array_equal(one.sampler_logprobs, other.sampler_logprobs)
        if other.document.experts is not None:
            np.testing.assert_array_equal(one.document.experts, other.document.experts)
    assert found.rollouts[1].own is not None and found.rollouts[1].own.ended_by == "turns"


def with_images(rollout: Rollout, *contents: bytes) -> Rollout:
    """The episode with images that its environment sent."""
    pictures = tuple(
        EncodedPicture(place, place + 1, PictureSource("", None, content))
        for place, content in enumerate(contents)
    )
    prompt = replace(rollout.prompt, pictures=pictures[:2])
    return replace(rollout, prompt=prompt, document=replace(rollout.document, pictures=pictures))


def test_an_image_of_several_answers_is_stored_once(tmp_path: Path) -> None:
    rollouts, rewards = answers()
    one, other = (bytes([number]) * 3000 for number in (1, 2))
    rollouts = [with_images(rollouts[1], one, one, other), *[with_images(rollouts[1], one)] * 3]
    write_kept(tmp_path, 1, setup(), rollouts, rewards, {})
    write_ahead(tmp_path, Sampled(rollouts, None, 4, {}, 0))
    for name in ("iteration1.jsonl", "ahead.jsonl"):
        text = (tmp_path / name).read_text()
        assert [text.count(base64.b64encode(content).decode()) for content in (one, other)] == [1, 1]
    found = read_kept(tmp_path, 1, setup()).rollouts
    assert [rollout.document.pictures for rollout in found] == [
        rollout.document.pictures for rollout in rollouts
    ]
    assert found[0].prompt.pictures == rollouts[0].prompt.pictures
    first, second = (rollout.document.pictures[0].source.data for rollout in found[2:])
    assert first is second


def test_images_that_an_earlier_release_stored_with_each_answer_are_read(tmp_path: Path) -> None:
    rollouts, rewards = answers()
    rollouts = [with_images(rollouts[1], b"image", b"image")] * 4
    write_kept(tmp_path, 1, setup(), rollouts, rewards, {})
    head = json.loads((tmp_path / "iteration1.jsonl").read_text().splitlines()[0])
    del head["images"]
    lines = [json.dumps(row) for row in (head, *map(stored, rollouts))]
    (tmp_path / "iteration1.jsonl").write_text("\n".join(lines) + "\n")
    found = read_kept(tmp_path, 1, setup()).rollouts
    assert [rollout.document.pictures for rollout in found] == [rollouts[0].document.pictures] * 4


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n_samples_per_prompt": 4}, r"n_samples_per_prompt 2 \(here 4\)"),
        ({"temperature": 0.5}, r"temperature 1\.0 \(here 0\.5\)"),
        ({"top_p": 0.9, "top_k": 5}, r"top_p 1\.0 \(here 0\.9\), top_k 0 \(here 5\)"),
        ({"rollout_batch_size": 8}, r"rollout_batch_size 4 \(here 8\)"),
        (
            {"reward": {"function": "checks.py:length"}},
            r"rewards \['reward_model'\] \(here \['length'\]\)",
        ),
        ({"reward": {"model": "reward_model", "normalize": "running"}}, "another normalize of reward_model"),
    ],
)
def test_rollouts_of_another_recipe_are_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    """All differences in one sentence: also that of the prompts."""
    rollouts, rewards = answers()
    write_kept(tmp_path, 1, setup(), rollouts, rewards, {})
    with pytest.raises(ValueError, match=f"kept with {told}[^,]*: take the values of that run"):
        read_kept(tmp_path, 1, setup(**fields))
    others = [Prompt((), [i + 50], {}, False) for i in range(10)]
    with pytest.raises(ValueError, match=f"kept with {told}[^,]*, other prompts: take the values"):
        read_kept(tmp_path, 1, setup(others, **fields))


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    """An episode is compared by its row, because an environment may write its prompt."""
    rollouts, rewards = answers()
    write_kept(tmp_path, 1, setup(), rollouts, rewards, {})
    episodes = [rollouts[1]] * 4
    write_kept(tmp_path, 2, setup(), episodes, rewards, {})
    rows = [replace(prompt, row={"answer": 1}) for prompt in PROMPTS]
    read_kept(tmp_path, 2, setup())
    for iteration, prompts in ((1, PROMPTS[:5]), (1, PROMPTS[1:] + PROMPTS[:1]), (2, rows)):
        with pytest.raises(ValueError, match="it was kept with other prompts: take"):
            read_kept(tmp_path, iteration, setup(prompts))


def test_another_actor_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts, rewards = answers()
    for iteration in (1, 2):
        write_kept(tmp_path, iteration, setup(), rollouts, rewards, {})
        read_kept(tmp_path, iteration, setup())
    assert not capsys.readouterr().out
    for iteration in (1, 2):
        read_kept(tmp_path, iteration, setup(actor="models/other"))
    assert capsys.readouterr().out.count("by a run of the actor models/base, not models/other") == 1


def test_a_resumed_run_keeps_no_rollouts_of_an_earlier_attempt(tmp_path: Path) -> None:
    remove_kept(tmp_path / "none", 0)
    for name in ("iteration2.jsonl", "iteration3.jsonl", "iteration3.npz", "iteration10.jsonl", "other"):
        (tmp_path / name).touch()
    remove_kept(tmp_path, 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["iteration2.jsonl", "other"]
    run = RunDir(tmp_path / "run")
    (run / "kept_rollouts").mkdir(parents=True)
    (run / "kept_rollouts" / "iteration1.jsonl").touch()
    fleet: Any = SimpleNamespace(probe=lambda *_, **__: SimpleNamespace(gap=0.0, bound=1.0))
    IterationLoop(fleet, setup(), None, run, 2, 0).begin(None)
    assert not list((run / "kept_rollouts").iterdir())


def test_a_curriculum_learns_nothing_from_kept_rollouts() -> None:
    """It has drawn no prompt of which it could count the answers."""
    _, rewards = answers()
    without = setup(train_only="kept", curriculum={"right": 1.0})
    assert without.order.curriculum is not None
    assert measure_pass_rates(without, MeasuredGroups(()), rewards) == {}
    assert measure_pass_rates(setup(curriculum={"right": 1.0}), MeasuredGroups(()), rewards)


def test_iterations_are_counted_from_the_first_without_a_gap(tmp_path: Path) -> None:
    config = ppo(train_only=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no iteration1\.jsonl: name the folder kept_rollouts"):
        kept_iterations(config, 9)
    for number in (1, 2, 4):
        (tmp_path / f"iteration{number}.jsonl").touch()
    assert [kept_iterations(config, most) for most in (1, 9)] == [1, 2]


def test_without_engines_only_what_trains_is_placed() -> None:
    config = ppo(advantage_estimator="gae", train_only="kept")
    assert list(config.placed) == ["actor", "critic", "reference"]
    assert list(ppo(advantage_estimator="gae").placed)[-2:] == ["reward:reward_model", "sampler"]
    assert ppo(train_only="kept", colocate_all=True).together == [["actor", "reference"]]
    with pytest.raises(ValueError, match="leave one of them out"):
        ppo(train_only="kept", rollouts_only=True)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_iteration_trains_on_kept_rollouts_alone(staleness: int, tmp_path: Path) -> None:
    config = ppo(train_only=str(tmp_path), max_staleness=staleness)
    given = setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    writer: Any = Fleet(lambda prompt, j: float(j * prompt))
    rollouts = writer.start_rollouts(given.order.take(0, 4), given.sampling)()
    rewards = writer.reward(rollouts, 0)
    write_kept(tmp_path, 1, given, rollouts, rewards, {"reward_model": Running(8, 1.0, 2.0)})
    group: Any = SimpleNamespace()
    kept = KeptAnswers(config, group, group, folder=tmp_path)

    class Trains(Fleet):
        engines = kept  # type: ignore[assignment]

    fleet: Any = Trains(lambda prompt, j: math.nan)
    done = ppo_iteration(fleet, given, Carried(0, {}), 0.1, schedule_of(config, 0, 2, 0))
    assert fleet.said == ["score models only", "train"]
    assert done.carried == Carried(1, {"reward_model": Running(8, 1.0, 2.0)})
    assert done.metrics["reward/mean"] == pytest.approx(np.mean(rewards.by_source["reward_model"]))
    assert sampled_of(fleet, given, Carried(0, {}), None).position == 1


def test_an_iteration_may_train_nothing() -> None:
    config = ppo(rollouts_only=True)
    given = setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    fleet: Any = Fleet(lambda prompt, j: float(j))
    schedule = schedule_of(config, 0, 2, 0)._replace(rates={})
    done = ppo_iteration(fleet, given, Carried(0, {}), 0.1, schedule)
    assert fleet.said == ["sample", "score"] and done.metrics["reward/mean"] == 0.5
    assert config.scores_actor and "kl/mean" in done.metrics
