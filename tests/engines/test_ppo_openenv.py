"""GRPO on a server of OpenEnv, with all engines: the guessing game, played over its protocol, is learned."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import finish, write_request
from tests.engines.test_ppo_environment import ASKED, IGNORANT, NUMBERS, guesser, ppo
from tests.unit.environments.test_openenv import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
__all__ = ["guesser"]
ITERATIONS = 40
SERVER = f"""
import asyncio, json, sys
from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.http11 import Response

SCHEMA = {{"title": "GuessAction", "properties": {{"guess": {{"type": "string"}}}}, "required": ["guess"]}}

def http(connection, request):
    if request.path == "/schema":
        body = json.dumps({{"action": SCHEMA}}).encode()
        return Response(200, "OK", Headers({{"content-length": str(len(body))}}), body)

def said(text, reward=None, done=False):
    return json.dumps({{"type": "observation", "data": {{"observation": {{"said": text}}, "reward": reward, "done": done}}}})

async def session(socket):
    secret = guesses = 0
    async for text in socket:
        message = json.loads(text)
        if message["type"] == "reset":
            secret, guesses = message["data"]["seed"] % {NUMBERS} + 1, 0
            await socket.send(said(""))
            continue
        guesses += 1
        guess = next((int(letter) for letter in message["data"]["guess"] if letter.isdigit()), None)
        won = guess == secret
        end = won or guess is None or guesses == 2
        told = "" if end else "higher" if guess < secret else "lower"
        await socket.send(said(told, float(won), end))

async def main():
    async with serve(session, "127.0.0.1", int(sys.argv[1]), process_request=http):
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(sys.executable, SERVER, tmp_path_factory.mktemp("server")) as url:
        yield url


def played(guesser: Path, server: str, name: str, iterations: int) -> Path:
    environment = {"openenv": server, "max_turns": 2, "timeout": 600.0, "options": {"seconds": 120.0}}
    config = ppo(guesser, environment, advantage_estimator="grpo", max_steps=iterations)
    write_request(guesser / name, config, {"base": str(guesser / "sft" / "checkpoint")})
    finish(guesser / name)
    return guesser / name


def test_the_server_plays(guesser: Path, server: str) -> None:
    run = played(guesser, server, "openenv-short", 2)
    lines = read_metrics(run)
    assert len(lines) == 2
    for line in lines:
        assert line["sampler/ratio_gap"] < 1e-3 and line["policy/first_ratio_gap"] < 1e-3
        assert 1 < line["environment/turns"] <= 2 and line["environment/attempts"] == 1
        assert 0 < line["reward/mean"] < 1
    rows = [
        json.loads(line)
        for file in sorted((run / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    said = [[message["content"] for message in row["messages"]] for row in rows if row["turns"] == 2]
    assert said and {(texts[0], texts[2] in ("higher", "lower")) for texts in said} == {(ASKED, True)}


@pytest.mark.long
def test_the_game_is_learned(guesser: Path, server: str) -> None:
    lines = read_metrics(played(guesser, server, "openenv", ITERATIONS))
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:5], lines[-5:])
    )
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (5 * 256))
    assert last[:, 0].mean() - first[:, 0].mean() > 5 * error
    assert last[:, 0].mean() - 5 * error > IGNORANT, "it wins more often than one that does not listen"
