"""GRPO on an environment of the package verifiers, which runs in an interpreter of its own, with all engines: its
tasks are the prompts, its harness plays the guessing game, its rubric gives the reward."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.config import Data
from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import finish, write_request
from tests.engines.test_ppo_environment import ASKED, IGNORANT, NUMBERS, guesser, ppo
from tests.unit.environments.test_verifiers_package import INTERPRETERS, installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not INTERPRETERS, reason="set ALIGNFLOW_TEST_VERIFIERS to interpreters that have verifiers (0.4.0)"
    ),
]
__all__ = ["guesser"]
ITERATIONS = 40
GAME = f"""
import httpx
import verifiers.v1 as vf

ASKED = {ASKED!r}

def number_in(text):
    return next((int(letter) for letter in text or "" if letter.isdigit()), None)

class GuessData(vf.TaskData):
    secret: int

class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def won(self, trace) -> float:
        return float(self.data.secret in [number_in(said.content) for said in trace.assistant_messages])

class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for i in range(64):
            yield GuessTask(GuessData(prompt=ASKED, secret=i % {NUMBERS} + 1), self.config.task)

class GuessHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{{"role": "user", "content": data.prompt}}]
        async with httpx.AsyncClient(headers={{"authorization": f"Bearer {{secret}}"}}, timeout=600, verify=False) as client:
            for _ in range(2):
                asked = {{"model": ctx.model, "messages": messages}}
                reply = await client.post(f"{{endpoint}}/chat/completions", json=asked)
                reply.raise_for_status()
                said = reply.json()["choices"][0]["message"]
                guess = number_in(said["content"])
                if guess is None or guess == data.secret:
                    break
                told = "higher" if guess < data.secret else "lower"
                messages += [said, {{"role": "user", "content": told}}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["GuessTaskset", "GuessHarness"]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has a release of verifiers with tasksets, and the game."""
    version = "import importlib.metadata as m; print(m.version('verifiers'))"
    for base in INTERPRETERS:
        told = subprocess.run([base, "-c", version], check=True, stdout=subprocess.PIPE, text=True).stdout
        if not told.startswith("0.1."):
            return installed(base, tmp_path_factory.mktemp("venv") / "venv", "guess_number", GAME)
    pytest.skip("ALIGNFLOW_TEST_VERIFIERS names no interpreter with verifiers 0.2 or later")


def played(guesser: Path, python: str, name: str, iterations: int) -> Path:
    package = {"verifiers": "guess-number", "python": python, "max_turns": 2, "timeout": 600.0}
    prompts = Data.model_validate(
        {"sources": {"verifiers": {"environment": "guess-number", "python": python}}}
    )
    config = ppo(guesser, package, prompts=prompts, advantage_estimator="grpo", max_steps=iterations)
    write_request(guesser / name, config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / name)
    return guesser / name


def test_the_package_plays_and_its_tokens_are_trained_on(guesser: Path, python: str) -> None:
    run = played(guesser, python, "verifiers-short", 2)
    lines = read_metrics(run)
    assert len(lines) == 2
    for line in lines:  # log-probs of engine and trainer agree
        assert line["sampler/ratio_gap"] < 1e-3 and line["policy/first_ratio_gap"] < 1e-3
        assert 1 < line["environment/turns"] <= 2 and line["environment/conversations"] == 1
        assert line["environment/attempts"] == 1 and 0 < line["reward/mean"] < 1
    rows = [
        json.loads(line)
        for file in sorted((run / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    said = [[message["content"] for message in row["messages"]] for row in rows if row["turns"] == 2]
    assert said and {texts[2] for texts in said} <= {"higher", "lower"}


@pytest.mark.long
def test_the_game_is_learned(guesser: Path, python: str) -> None:
    lines = read_metrics(played(guesser, python, "verifiers", ITERATIONS))
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:5], lines[-5:])
    )
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (5 * 256))
    assert last[:, 0].mean() - first[:, 0].mean() > 5 * error
    assert last[:, 0].mean() - 5 * error > IGNORANT, "it wins more often than one that does not listen"
