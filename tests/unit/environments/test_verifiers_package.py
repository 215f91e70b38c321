"""Environments of the package verifiers, installed in an interpreter of its own, against engines that answer at
once. Needs such interpreters: ALIGNFLOW_TEST_VERIFIERS has their paths, with a colon between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import Source
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.rows.row_files import raw_rows
from rlhf_core.data.rows.verifiers_rows import verifiers_release
from rlhf_core.environments.episode_contract import Episode
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from tests.unit.environments.test_episodes import AtOnce, renderer, run

__all__ = ["renderer"]
INTERPRETERS = [path for path in os.environ.get("ALIGNFLOW_TEST_VERIFIERS", "").split(":") if path]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not INTERPRETERS,
        reason="set ALIGNFLOW_TEST_VERIFIERS to interpreters that have verifiers (0.1.14, 0.4.0)",
    ),
]
LIMITS = Limits(turns=3, prompt_tokens=100, tokens=200, answer_tokens=50)
OLD = """
import verifiers as vf
from datasets import Dataset

FAULTS = ["", "", "score", "step", "limit"]

def right(completion, info, **named):
    if info["fault"] == "score":
        raise KeyError("planted")
    return float(len([said for said in completion if said["role"] == "assistant"]) == info["turns"])

class Game(vf.MultiTurnEnv):
    @vf.stop
    async def played(self, state, **named):
        turns = 99 if state["info"]["fault"] == "limit" else state["info"]["turns"]
        return len(state["trajectory"]) >= turns

    async def env_response(self, messages, state, **named):
        if state["info"]["fault"] == "step":
            raise vf.Error("planted step")
        return [{"role": "user", "content": "more"}]

def load_environment(turns=2, answers=5):
    rows = [
        {"prompt": [{"role": "user", "content": f"task {i}"}], "answer": str(i), "info": {"fault": fault, "turns": turns}}
        for i, fault in enumerate(FAULTS[:answers])
    ]
    return Game(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=-1)
"""
NEW = """
import httpx
import verifiers.v1 as vf

FAULTS = ["", "", "score", "step", "limit"]

class PlantedData(vf.TaskData):
    answer: str
    fault: str
    turns: int

    note: str | None
    left: int | None = 3

class PlantedTask(vf.Task[PlantedData]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.data.fault == "score":
            raise KeyError("planted")
        assert self.data.note is None and self.data.left is None
        return float(trace.num_turns == self.data.turns)

class PlantedConfig(vf.TasksetConfig):
    turns: int = 2
    answers: int = 5
    endless: bool = False

class PlantedTaskset(vf.Taskset[PlantedTask, PlantedConfig]):
    def __init__(self, config):
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self):
        for i, fault in enumerate(FAULTS[: self.config.answers]):
            data = PlantedData(prompt=f"task {i}", answer=str(i), fault=fault, turns=self.config.turns, note=None, left=None)
            yield PlantedTask(data, self.config.task)

class PlantedHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(99 if data.fault == "limit" else data.turns):
                asked = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=asked)
                if data.fault == "step":
                    raise RuntimeError("planted step")
                reply.raise_for_status()
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["PlantedTaskset", "PlantedHarness"]
"""


def installed(base: str, folder: Path, module: str = "planted_game", code: str = "") -> str:
    """An interpreter that has what `base` has, and a module: the planted game unless given."""
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    path = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, others = (
        subprocess.run([of, "-c", path], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        for of in (python, base)
    )
    (Path(own) / "others.pth").write_text(others + "\n")
    planted = OLD if (Path(others) / "verifiers" / "envs").is_dir() else NEW
    (Path(own) / f"{module}.py").write_text(code or planted)
    return python


@pytest.fixture(scope="module", params=INTERPRETERS or [""])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return installed(request.param, tmp_path_factory.mktemp("venv") / "venv")


def options(python: str, **fields: Any) -> dict[str, Any]:
    old = verifiers_release("planted-game", python)["verifiers"].startswith("0.1.")
    return fields if old else {"taskset": fields}


def rows_of(python: str, **fields: Any) -> list[dict[str, Any]]:
    given = {"environment": "planted-game", "python": python, "options": options(python, **fields)}
    return list(raw_rows(Source.model_validate({"verifiers": given}), None))


Play = Callable[..., list[Episode]]


@pytest.fixture(scope="module")
def play(renderer: Renderer, python: str) -> Iterator[Play]:
    background = Background()
    config = Environment(verifiers="planted-game", python=python, timeout=60.0, max_attempts=1)
    config = config.model_copy(update={"options": options(python, turns=2)})
    episodes = Episodes(config, renderer, LIMITS, background, AtOnce(renderer))  # type: ignore[arg-type]

    def played(*rows: dict[str, Any]) -> list[Episode]:
        return run(episodes, renderer, rows, [row["prompt"][-1]["content"] for row in rows])

    yield played
    episodes.close()
    background.close()


def test_tasks_become_rows(python: str) -> None:
    rows = rows_of(python, answers=3)
    assert [row["prompt"][-1] for row in rows] == [{"role": "user", "content": f"task {i}"} for i in range(3)]
    assert [row["answer"] for row in rows] == ["0", "1", "2"]
    assert "task 1" in rows[1]["verifiers"] and json.loads(rows[1]["verifiers"])


def test_the_rubric_gives_the_reward(play: Play, python: str, renderer: Renderer) -> None:
    done = play(*rows_of(python)[:2])
    for episode in done:
        assert episode.rewards == [0.0, 1.0] and not episode.failure, episode.failure
        texts = [message["content"] for message in episode.trajectory.messages]
        assert texts[-3].startswith("ok") and texts[-2] == "more" and texts[-1].startswith("ok")


def test_a_rubric_that_raises_is_a_failed_attempt(play: Play, python: str) -> None:
    (episode,) = play(rows_of(python)[2])
    assert episode.rewards == [] and "KeyError" in episode.failure and "planted" in episode.failure
    assert "planted_game.py, line " in episode.failure


def test_a_step_that_raises_is_a_failed_attempt(play: Play, python: str) -> None:
    (episode,) = play(rows_of(python)[3])
    assert episode.rewards == [] and "planted step" in episode.failure


def test_a_limit_of_turns_cuts_the_episode(play: Play, python: str) -> None:
    (episode,) = play(rows_of(python)[4])
    assert episode.rewards == [0.0, 0.0, 0.0] and not episode.failure, episode.failure


def seats_only(python: str) -> None:
    if "taskset" not in options(python):
        pytest.skip("this release has no seats")


def test_an_endless_taskset_needs_a_size(python: str) -> None:
    seats_only(python)
    given = {"environment": "planted-game", "python": python, "options": {"taskset": {"endless": True}}}
    for first in (None, 2):
        with pytest.raises(ValueError, match="planted-game do not end: set size, beside environment"):
            list(raw_rows(Source.model_validate({"verifiers": given}), first))
    assert len(list(raw_rows(Source.model_validate({"verifiers": {**given, "size": 2}}), None))) == 2


def test_the_seat_of_the_policy_has_no_retries(python: str) -> None:
    seats_only(python)
    given = {"environment": "planted-game", "python": python}
    source = {"verifiers": {**given, "options": {"agent": {"retries": {"max_retries": 1}}}}}
    with pytest.raises(ValueError, match=r"leave retries out of options\.agent"):
        list(raw_rows(Source.model_validate(source), None))


def test_a_harness_that_executes_code_needs_a_runtime(python: str) -> None:
    seats_only(python)
    executing = NEW.replace("EXECUTES_CODE = False", "EXECUTES_CODE = True")
    (folder,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (folder / "planted_coder.py").write_text(executing)
    given = {"environment": "planted-coder", "python": python}
    with pytest.raises(ValueError, match=r"the harness planted.coder executes what the model writes"):
        list(raw_rows(Source.model_validate({"verifiers": given}), None))
    own = {"agent": {"runtime": {"type": "subprocess"}}}
    assert list(raw_rows(Source.model_validate({"verifiers": {**given, "options": own}}), None))


def test_what_is_missing_is_a_sentence(python: str) -> None:
    with pytest.raises(ValueError, match=r"has no environment 'nowhere' \(module nowhere\): install its"):
        verifiers_release("nowhere", python)
    with pytest.raises(ValueError, match=r"cannot load it: .*wrong"):
        rows_of(python, wrong=1)
    assert sys.executable != python
