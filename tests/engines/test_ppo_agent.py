"""PPO on an agent that knows only the address of a model: a loop with OpenAI's client plays the guessing game,
in one conversation or, where it forgets, in two."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import finish, write_request
from tests.engines.test_ppo_environment import ASKED, IGNORANT, NUMBERS, guesser, ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
__all__ = ["guesser"]
ITERATIONS = 40
PLAYER = f"""
import re
from openai import OpenAI

ASKED = {ASKED!r}

def play(task, base_url, api_key, forgets=False):
    client = OpenAI(base_url=base_url, api_key=api_key)
    secret = task["number"] % {NUMBERS} + 1
    messages = [{{"role": "user", "content": ASKED}}]
    for _ in range(2):
        reply = client.chat.completions.create(model="any", messages=messages).choices[0].message
        found = re.search("[0-9]", reply.content)
        if found is None:
            return 0.0
        guess = int(found.group())
        if guess == secret:
            return 1.0
        said = "higher" if guess < secret else "lower"
        messages += [reply.model_dump(exclude_none=True), {{"role": "user", "content": said}}]
        if forgets and task["number"] % 2:
            messages = messages[:1]
    return 0.0
"""


def played(guesser: Path, name: str, iterations: int, **options: bool) -> Path:
    (guesser / "player.py").write_text(PLAYER)
    agent = {"agent": f"{guesser / 'player.py'}:play", "max_turns": 2, "options": options, "timeout": 600.0}
    config = ppo(guesser, agent, max_steps=iterations)
    write_request(guesser / name, config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / name)
    return guesser / name


def test_what_an_agent_got_is_what_is_trained_on(guesser: Path) -> None:
    run = played(guesser, "forgets", 3, forgets=True)
    lines = read_metrics(run)
    assert len(lines) == 3
    for line in lines:  # log-probs of engine and trainer agree in all conversations
        assert line["sampler/ratio_gap"] < 1e-3 and line["sync/probe_gap"] < 1e-3
        assert line["policy/first_ratio_gap"] < 1e-3
        assert 1 < line["environment/conversations"] < line["environment/turns"] <= 2
        assert line["environment/attempts"] == 1
    rows = [
        json.loads(line)
        for file in sorted((run / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    said = [[message["content"] for message in row["messages"]] for row in rows if row["turns"] == 2]
    lengths = {len(texts) for texts in said}
    assert lengths == {2, 4}, "one conversation of four messages, or the last of two with two messages"
    assert {texts[2] for texts in said if len(texts) == 4} <= {"higher", "lower"}


@pytest.mark.long
def test_the_game_is_learned(guesser: Path) -> None:
    lines = read_metrics(played(guesser, "agent", ITERATIONS))
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:5], lines[-5:])
    )
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (5 * 256))
    assert last[:, 0].mean() - first[:, 0].mean() > 5 * error
    assert last[:, 0].mean() - 5 * error > IGNORANT, "it wins more often than one that does not listen"
