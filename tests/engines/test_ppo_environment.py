"""PPO on episodes of an environment, with all its engines: the guessing game is learned, and faults of an
environment are survived."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO, SFT, Data, Ranks
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.engines.test_ppo import SHARE, assert_same_end, common, finish, kill_and_finish, write_request
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITERATIONS = 40
NUMBERS = 3
ASKED = "Guess a number from 1 to 3."
# the largest share of games that two guesses win when the second does not depend on what was said
IGNORANT = max(
    sum(secret in guesses for secret in range(1, NUMBERS + 1)) / NUMBERS
    for guesses in product(range(1, NUMBERS + 1), repeat=2)
)
FAULTY = """
import asyncio, os, random, time

class Faulty:
    async def rollout(self, task, model):
        answer = await model.answer()
        fault = random.choice(["raise", "hang", "block", "exit", "garbage"]) if random.random() < 0.3 else ""
        if fault == "raise": raise RuntimeError("planted")
        if fault == "hang": await asyncio.sleep(100)
        if fault == "block": time.sleep(100)
        if fault == "exit": os._exit(1)
        if fault == "garbage": return "garbage"
        if task["number"] == 3: raise RuntimeError("always")
        model.reward(0.5)
        second = await model.answer({"role": "system", "content": "more"}, "now")
        return sum(letter in "aeiou" for letter in answer.text + second.text) / 20
"""


@pytest.fixture(scope="module")
def guesser(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the form of the game from games with random guesses, and the folder of its
    data."""
    folder = tmp_path_factory.mktemp("guesser")
    rng = random.Random(0)

    def said(*texts: str) -> list[dict[str, str]]:
        return [
            {"role": role, "content": text}
            for role, text in zip(["user", "assistant"] * 2, texts, strict=True)
        ]

    def number() -> str:
        return str(rng.randint(1, NUMBERS))

    games = [said(ASKED, number(), rng.choice(["higher", "lower"]), number()) for _ in range(2500)]
    (folder / "games.jsonl").write_text("".join(json.dumps({"messages": game}) + "\n" for game in games))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": ASKED, "number": i}) + "\n" for i in range(64))
    )
    sizes = dict(
        max_len=64, train_batch_size=64, micro_train_batch_size=16, learning_rate=3e-3, ranks=Ranks(cpus=1)
    )
    config = SFT(data=Data(sources=str(folder / "games.jsonl")), model="base", **sizes)
    RunDir(folder / "sft").prepare(stage_request(config, material / "base", seed=3))
    finish(folder / "sft")
    return folder


def ppo(guesser: Path, environment: dict[str, Any], **fields: Any) -> PPO:
    sizes = dict(
        rollout_batch_size=32, n_samples_per_prompt=8, train_batch_size=64, micro_train_batch_size=32
    )
    sizes |= dict(
        micro_rollout_batch_size=32, prompt_max_len=48, generate_max_len=16, max_epochs=1, num_episodes=100
    )
    common_fields = common(guesser) | dict(
        prompts=Data(sources=str(guesser / "prompts.jsonl")), export_at=(), save_steps=10
    )
    how = dict(
        advantage_estimator="rloo", init_kl_coef=0.0, actor_ranks=Ranks(cpus=SHARE), actor_learning_rate=1e-3
    )
    one = {"environment": environment} if environment else {}
    return PPO(**{**common_fields, **sizes, **how, **one, **fields})


@pytest.fixture(scope="module")
def game(guesser: Path) -> Path:
    config = ppo(
        guesser,
        {"path": "guess", "max_turns": 2, "options": {"largest": NUMBERS, "guesses": 2}},
        max_steps=ITERATIONS,
    )
    write_request(guesser / "game", config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / "game")
    return guesser / "game"


def test_the_game_is_learned(game: Path) -> None:
    lines = read_metrics(game)
    assert len(lines) == ITERATIONS
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:5], lines[-5:])
    )
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (5 * 256))
    assert last[:, 0].mean() - first[:, 0].mean() > 5 * error
    assert IGNORANT == 2 / 3
    assert last[:, 0].mean() - 5 * error > IGNORANT, "it wins more often than one that does not listen"


def test_each_row_plays_in_its_own_environment(guesser: Path) -> None:
    """One guess of two numbers, two of three; held-out games too."""
    names = ["one", "two"]
    rows = [{"prompt": ASKED, "number": i, "environment": names[i % 2]} for i in range(64)]
    (guesser / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = [{"prompt": f"{ASKED} ", "environment": name} for name in names]
    (guesser / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    config = ppo(
        guesser,
        {},
        environments={
            "one": {"path": "guess", "max_turns": 1, "options": {"largest": 2, "guesses": 1}},
            "two": {"path": "guess", "max_turns": 2, "options": {"largest": NUMBERS, "guesses": 2}},
        },
        prompts=Data(sources=str(guesser / "named.jsonl")),
        eval_prompts=Data(sources=str(guesser / "held-out.jsonl")),
        eval_steps=2,
        max_steps=2,
    )
    write_request(guesser / "several", config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / "several")
    played = [
        json.loads(line)
        for file in sorted((guesser / "several" / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert {row["turns"] for row in played} == {1, 2}
    lines = read_metrics(guesser / "several")
    assert len(lines) == 2
    for line in lines:
        assert 0 <= line["environment/one/right"] <= line["environment/one/reward"] <= 1
        assert line["environment/two/length"] > line["environment/one/length"] > 0
    result = json.loads((guesser / "several" / "result.json").read_text())["metrics"]
    assert {"eval/one/reward/mean", "eval/two/reward/mean", "environment/two/right"} <= result.keys()


def test_the_secret_changes_and_only_guesses_are_trained_on(game: Path) -> None:
    rows = [
        json.loads(line)
        for file in sorted((game / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    won = [row["messages"][-1]["content"] for row in rows if row["rewards"]["environment"] == 1]
    assert {answer.strip() for answer in won} >= {"1", "2", "3"}, "every number was a secret"
    lines = read_metrics(game)
    tokens = load_tokenizer(str(game / "checkpoint"))(ASKED + "higher2").input_ids
    for line in lines:  # log-probs of engine and trainer agree on what was sampled, in all turns
        assert line["sampler/ratio_gap"] < 1e-3 and line["sync/probe_gap"] < 1e-3
        assert 1 <= line["environment/turns"] <= 2 and line["environment/attempts"] == 1
        assert line["response/length"] < len(tokens) / 2


@pytest.fixture(scope="module")
def faulty(guesser: Path) -> Path:
    (guesser / "faulty.py").write_text(FAULTY)
    environment = dict(
        path=str(guesser / "faulty.py:Faulty"), max_attempts=12, timeout=1.0, processes=2, max_turns=3
    )
    sizes = dict(rollout_batch_size=16, n_samples_per_prompt=2, train_batch_size=32, generate_max_len=40)
    config = ppo(
        guesser, environment, max_steps=4, max_failed_rewards=0.2, advantage_estimator="reinforce_pp", **sizes
    )
    write_request(guesser / "faulty", config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / "faulty")
    return guesser / "faulty"


def test_faults_are_counted_and_never_scored(faulty: Path) -> None:
    lines = read_metrics(faulty)
    for line in lines:
        assert 1 < line["environment/attempts"] < 4
        assert line["reward/mean"] >= 0.5, "a failed episode is no 0"
        assert line["rollout/usable"] == pytest.approx(1 - line["reward/environment/failed"] / 32)
    # the two of the prompt that always fails, once in 64 prompts
    assert sum(line["reward/environment/failed"] for line in lines) == 2


@pytest.mark.long
def test_a_killed_run_ends_the_same(guesser: Path, game: Path) -> None:
    config = ppo(guesser, {"path": "guess", "max_turns": 2}, max_steps=4, save_steps=2)
    for name in ("whole", "killed"):
        write_request(guesser / name, config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / "whole")
    kill_and_finish(guesser / "killed")
    assert_same_end(guesser / "whole", guesser / "killed")
