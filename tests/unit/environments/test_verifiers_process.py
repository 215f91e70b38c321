"""The process that runs an environment of verifiers, with a package of that name which fails in every way: what
hangs, blocks, ends or writes too much costs one attempt, and nothing outlives the episodes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.config.data import Source
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.rows.row_files import raw_rows
from rlhf_core.data.rows.verifiers_rows import verifiers_problem, verifiers_release
from rlhf_core.environments.agents import driver_process
from rlhf_core.environments.episode_contract import Episode
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from tests.support.micro import wait_until
from tests.unit.environments.test_episodes import AtOnce, renderer, run

__all__ = ["renderer"]
LIMITS = Limits(turns=3, prompt_tokens=100, tokens=200, answer_tokens=50)
PACKAGE = """
import importlib

class ClientConfig:
    def __init__(self, **fields):
        self.__dict__.update(fields)

def load_environment(name, **options):
    return importlib.import_module(name.split("/")[-1].replace("-", "_")).load_environment(**options)
"""
CLIENTS = """
import json, os, urllib.request

def resolve_client(config):
    key = os.environ[config.api_key_var]

    def ask(model, text):
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        request = urllib.request.Request(config.api_base_url + "/chat/completions", body, headers)
        return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"]

    return ask
"""
WORLD = """
import asyncio, os, subprocess, sys, time

def fails():
    return {}["planted"]

class World:
    def __init__(self, rows):
        self.rows = rows

    def get_dataset(self):
        return self.rows

    async def run_rollout(self, row, client, model, sampling_args):
        text = await asyncio.to_thread(client, model, row["prompt"])
        fault = row["info"]
        print("a line on stdout that is no message")
        if fault == "raise": fails()
        if fault == "network": raise ConnectionError("gone")
        if fault == "wait": await asyncio.sleep(1000)
        if fault == "block": time.sleep(1000)
        if fault == "exit":
            print("the planted end", file=sys.stderr, flush=True)
            os._exit(3)
        if fault == "leaves":
            left = subprocess.Popen(["sleep", "97531"], start_new_session=True)
            return {"reward": float(left.pid)}
        if fault == "text": return {"reward": "much"}
        if fault == "nan": return {"reward": float("nan")}
        if fault in ("limit", "judge"):
            try:
                for _ in range(3): await asyncio.to_thread(client, model, row["prompt"])
            except OSError as error:
                if fault == "limit": raise RuntimeError(error.read().decode()) from None
                raise ConnectionError("the judge is gone") from None
        if fault == "other": await asyncio.to_thread(client, "policy-999", "whose?")
        return {"reward": float(text.startswith("ok"))}

def load_environment(size=3, fault=""):
    if fault == "load": raise RuntimeError("no data\\n here")
    if fault == "dies": os._exit(7)
    return World([{"prompt": f"task {i}", "answer": i, "info": fault} for i in range(size)])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("interpreter")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "verifiers").mkdir()
    (site / "verifiers" / "__init__.py").write_text(PACKAGE)
    (site / "verifiers" / "clients.py").write_text(CLIENTS)
    (site / "verifiers-0.1.99.dist-info").mkdir()
    (site / "verifiers-0.1.99.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.1.99\n")
    (site / "planted_world.py").write_text(WORLD)
    return str(folder / "bin" / "python")


Play = Callable[..., list[Episode]]


@pytest.fixture
def play(renderer: Renderer, python: str) -> Iterator[Play]:
    background = Background()
    made = list[Episodes]()

    def played(*faults: str, **fields: Any) -> list[Episode]:
        given = {"timeout": 60.0, "max_attempts": 1, **fields}
        config = Environment(verifiers="planted-world", python=python, **given)
        if not made:
            made.append(Episodes(config, renderer, LIMITS, background, AtOnce(renderer)))  # type: ignore[arg-type]
        rows = [{**rows_of(python, fault=fault)[0]} for fault in faults]
        return run(made[0], renderer, rows, [row["prompt"][0]["content"] for row in rows])

    yield played
    for episodes in made:
        episodes.close()
    background.close()


def rows_of(python: str, size: int | None = None, **options: Any) -> list[dict[str, Any]]:
    given = {"environment": "planted-world", "python": python, "options": options, "size": size}
    return list(raw_rows(Source.model_validate({"verifiers": given}), None))


def test_rows_and_their_number(python: str) -> None:
    rows = rows_of(python)
    assert [row["prompt"][0]["content"] for row in rows] == ["task 0", "task 1", "task 2"]
    assert "answer" not in rows[0], "which is no text here"
    assert len(rows_of(python, size=2)) == 2
    assert (
        len(
            list(
                raw_rows(
                    Source.model_validate({"verifiers": {"environment": "planted-world", "python": python}}),
                    1,
                )
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "RaisedByEnvironment: KeyError: 'planted' ("),
        ("network", "FailedEnvironment: ConnectionError: gone ("),
        ("exit", "exited with status 3: "),
        ("text", "'much', no number"),
        ("nan", "not finite"),
        ("other", "HTTPError: HTTP Error 404"),
    ],
)
def test_a_fault_is_a_failed_attempt_and_the_next_episode_runs(play: Play, fault: str, told: str) -> None:
    (failed,) = play(fault)
    assert failed.rewards == [] and told in failed.failure, failed.failure
    if fault in ("raise", "network"):
        assert "planted_world.py, line " in failed.failure
    if fault == "exit":
        assert "the planted end" in failed.failure
    (fine,) = play("")
    assert fine.rewards == [1.0], fine.failure


def test_only_the_error_of_a_refused_request_is_the_end_by_a_limit(play: Play) -> None:
    (limited,) = play("limit")
    assert limited.rewards == [0.0] * 3 and not limited.failure, limited.failure
    (failed,) = play("judge")
    assert failed.rewards == [] and "the judge is gone" in failed.failure


def test_what_hangs_runs_out_of_time_and_stops_no_others(play: Play) -> None:
    hanging, fine = play("wait", "", timeout=5.0)
    assert hanging.rewards == [] and "took more than 5 s" in hanging.failure and fine.rewards == [1.0]


def test_a_process_that_is_blocked_is_killed(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_process.STOP_SECONDS < 60
    (blocked,) = play("block", timeout=3.0)
    assert blocked.rewards == [] and "took more than 3 s" in blocked.failure
    start = time.monotonic()
    found: list[float] = []
    while not found and time.monotonic() - start < 120:  # until the process has counted as blocked
        (after,) = play("", timeout=3.0)
        found = after.rewards
    assert found == [1.0]


def test_nothing_that_an_episode_started_outlives_the_episodes(renderer: Renderer, python: str) -> None:
    background = Background()
    config = Environment(verifiers="planted-world", python=python, timeout=60.0)
    episodes = Episodes(config, renderer, LIMITS, background, AtOnce(renderer))  # type: ignore[arg-type]
    try:
        (row,) = rows_of(python, size=1, fault="leaves")
        (episode,) = run(episodes, renderer, [row])
        left = psutil.Process(int(episode.rewards[0]))
        above = left.parents()
        assert left.is_running() and left.cmdline() == ["sleep", "97531"]
    finally:
        episodes.close()
        background.close()
    wait_until(lambda: not left.is_running(), "the end of what an episode started")
    ours = psutil.Process().pid
    below = [process for process in above if ours in [each.pid for each in _parents(process)]]
    wait_until(lambda: not any(process.is_running() for process in below), "the end of the process")


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.NoSuchProcess:
        return []


def test_what_cannot_be_loaded_is_a_sentence(python: str, renderer: Renderer, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cannot load it: RuntimeError: no data here \(.*planted_world.py, line"
    ):
        rows_of(python, fault="load")
    with pytest.raises(ValueError, match="exited with status 7"):
        rows_of(python, fault="dies")
    background = Background()
    for fault, told in (("load", "environment: verifiers: verifiers cannot load it"), ("dies", "status 7")):
        config = Environment(verifiers="planted-world", python=python, options={"fault": fault})
        with pytest.raises(ValueError, match=told):
            Episodes(config, renderer, LIMITS, background, AtOnce(renderer))  # type: ignore[arg-type]
    background.close()
    assert "cannot be started" in verifiers_problem("planted-world", str(tmp_path / "none"))
    assert "has no package verifiers" in verifiers_problem("planted-world", None)
    assert "has no environment 'nowhere'" in verifiers_problem("nowhere", python)
    assert verifiers_problem("owner/planted-world@0.1", python) == ""


def test_the_release_changes_with_the_code(python: str) -> None:
    before = verifiers_release("planted-world", python)
    (file,) = Path(python).parents[1].glob("lib/python*/site-packages/planted_world.py")
    code = file.read_text()
    file.write_text(code + "# changed\n")
    after = verifiers_release("planted-world", python)
    file.write_text(code)
    assert before["verifiers"] == after["verifiers"] == "0.1.99" and before["code"] != after["code"]
    assert verifiers_release("planted-world", python) == before


def test_a_row_without_its_task_is_a_sentence(python: str, renderer: Renderer) -> None:
    background = Background()
    config = Environment(verifiers="planted-world", python=python, max_attempts=1)
    episodes = Episodes(config, renderer, LIMITS, background, AtOnce(renderer))  # type: ignore[arg-type]
    (episode,) = run(episodes, renderer, [{}])
    assert (
        "the row has no column 'verifiers': take the prompts from sources: {verifiers: ...}"
        in episode.failure
    )
    episodes.close()
    background.close()
