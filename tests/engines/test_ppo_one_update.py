"""PPO whose iteration is one optimiser step, with all its engines: no scoring pass of the actor. Truncated
distributions, stop texts, rewards of steps, and a teacher in place of a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhf_core.config import PPO, SFT, Data, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.engines.test_ppo import SHARE, common, finish, write_request
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = '''
def digits(responses):
    """1 for each digit, at its place."""
    return [[[i + 1, 1.0] for i, letter in enumerate(response) if letter.isdigit()] for response in responses]
'''
ONE_UPDATE = dict(
    n_samples_per_prompt=4, train_batch_size=32, max_epochs=1, export_at=(), actor_ranks=Ranks(cpus=SHARE)
)


@pytest.fixture(scope="module")
def truncated(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """REINFORCE++ of immediate rewards of steps, on two ranks, from truncated distributions; answers end at a
    text, too."""
    folder = tmp_path_factory.mktemp("truncated")
    (folder / "checks.py").write_text(STEPS)
    how = dict(
        advantage_estimator="reinforce_pp", gamma=0, init_kl_coef=0.0, temperature=0.9, top_p=0.9, top_k=40
    )
    ranks = {"actor_ranks": Ranks(num_ranks_per_node=2, cpus=SHARE)}
    fields = {
        **common(material),
        **ONE_UPDATE,
        **how,
        **ranks,
        "max_steps": 16,
        "reward": f"{folder / 'checks.py'}:digits",
        "stop": ["e"],
    }
    write_request(folder / "run", PPO(**fields), {"base": str(material / "base")})
    finish(folder / "run")
    return folder / "run"


def test_steps_are_learned_from_truncated_distributions(truncated: Path) -> None:
    lines = read_metrics(truncated)
    assert len(lines) == 16
    for line in lines:
        # the trainer's distribution is the sampler's
        assert line["sampler/gap_p99"] < 1e-3 and line["sampler/gap"] < 1e-4
        assert abs(line["policy/first_ratio"] - 1) < 1e-6
        assert "work/actor/score" not in line
        assert line["work/actor/train"] > 0
    before, after = (sum(line["reward/mean"] for line in part) / 4 for part in (lines[:4], lines[-4:]))
    assert after > 1.5 * before


def test_answers_end_at_the_stop_text(truncated: Path, material: Path) -> None:
    rows = [
        json.loads(line)
        for file in sorted((truncated / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    ended = [row["response"] for row in rows if "e" in row["response"]]
    places = [response.index("e") for response in ended]
    # a token may have more text
    assert len(ended) > 10 and all(place >= len(text) - 8 for place, text in zip(places, ended, strict=True))
    assert all(row["finished"] for row in rows if "e" in row["response"])
    assert AutoTokenizer.from_pretrained(truncated / "checkpoint").eos_token


def test_the_sampler_is_the_old_policy_of_several_steps(material: Path, tmp_path: Path) -> None:
    """Two runs of two optimiser steps an iteration, one with a scoring pass of the actor: the same curve, since
    engine and trainer differ by rounding alone."""
    how = {**common(material), **ONE_UPDATE, "train_batch_size": 8, "n_samples_per_prompt": 2}
    how |= {"advantage_estimator": "grpo", "max_steps": 2, "reward": f"{tmp_path / 'checks.py'}:digits"}
    (tmp_path / "checks.py").write_text(STEPS)
    for name in ("truncate", "in_ratio"):
        write_request(tmp_path / name, PPO(**how, sampler_is=name), {"base": str(material / "base")})
        finish(tmp_path / name)
    usual, in_ratio = (read_metrics(tmp_path / name) for name in ("truncate", "in_ratio"))
    assert all("work/actor/score" in line for line in usual)
    assert not any("work/actor/score" in line for line in in_ratio)
    for ours, theirs in zip(in_ratio, usual, strict=True):
        assert ours["sampler/gap"] < 1e-4 and abs(ours["policy/first_ratio"] - 1) < 1e-4
        for name in ("reward/mean", "kl/mean", "policy/grad_norm", "policy/ratio"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


@pytest.fixture(scope="module")
def teacher(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student after SFT."""
    folder = tmp_path_factory.mktemp("teacher") / "sft"
    sizes = dict(
        max_len=96, train_batch_size=64, micro_train_batch_size=16, learning_rate=3e-3, ranks=Ranks(cpus=1)
    )
    sft = SFT(model="base", data=Data(sources=str(material / "sft.jsonl"), max_samples=1280), **sizes)
    RunDir(folder).prepare(stage_request(sft, material / "base", seed=3))
    finish(folder)
    return folder / "checkpoint"


def distilled(folder: Path, material: Path, teacher: Path, **how: object) -> list[dict[str, float]]:
    """Metrics of 24 iterations of one step on 128 answers, without a reward."""
    sizes = dict(
        rollout_batch_size=16, n_samples_per_prompt=8, train_batch_size=128, micro_train_batch_size=32
    )
    fields = {
        **common(material),
        **ONE_UPDATE,
        **sizes,
        "advantage_estimator": "reinforce_pp",
        "reward": "none",
        "init_kl_coef": 1.0,
        "max_steps": 24,
        "num_episodes": 50,
        "reference": "teacher",
        **how,
    }
    write_request(folder, PPO(**fields), {"base": str(material / "base"), "teacher": str(teacher)})
    finish(folder)
    lines = read_metrics(folder)
    assert all(line["reward/mean"] == 0 for line in lines)
    return lines


def ends(lines: list[dict[str, float]], name: str = "kl/mean") -> tuple[float, float]:
    """The means of the first and the last four iterations."""
    before, after = (sum(line[name] for line in part) / 4 for part in (lines[:4], lines[-4:]))
    return before, after


def test_a_teacher_is_learned_without_a_reward(material: Path, teacher: Path, tmp_path: Path) -> None:
    """The KL to the teacher falls by a quarter or more; with its most probable tokens in the loss, in fewer
    iterations."""
    sampled = distilled(tmp_path / "sampled", material, teacher, gamma=0, whiten_advantages=False)
    before, after = ends(sampled)
    assert before > 0.5 and after < 0.75 * before, (before, after)
    whole = distilled(tmp_path / "whole", material, teacher, teacher_top_k=20, kl_in="loss")
    first, last = ends(whole)
    print(
        f"KL by iteration: {[round(line['kl/mean'], 3) for line in sampled]} from the sampled token,"
        f" {[round(line['kl/mean'], 3) for line in whole]} from 20 tokens,"
        f" {[round(line['policy/teacher_kl'], 3) for line in whole]} in the loss"
    )
    assert last < 0.75 * first, (first, last)
    of_cells = ends(whole, "policy/teacher_kl")
    assert of_cells[1] < 0.75 * of_cells[0], of_cells
    assert all("work/actor/score" not in line for line in whole), "the training pass has all log-probs"
