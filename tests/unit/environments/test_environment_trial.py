"""The episode of an environment with made-up answers, before engines start: what it refuses, and what it
warns of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Prompt
from rlhf_core.environments import environment_trial as trial
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from tests.support.templates import save_tokenizer

CODE = """
import asyncio, os

class World:
    def __init__(self, fault=""):
        self.fault = fault

    async def rollout(self, task, model):
        first = await model.answer()
        if self.fault == "misspelt": return scor(first.text)
        if self.fault == "column": return task["misspelt"]
        if self.fault == "exit": os._exit(3)
        if self.fault == "wait": await asyncio.sleep(1000)
        assert first.text == task["answer"] and first.finished
        await model.answer("and now?")
        return 1.0
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(load_tokenizer(str(save_tokenizer("hermes", tmp_path_factory.mktemp("hermes")))), "chat")


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.close()


def run(renderer: Renderer, background: Background, folder: Path, fault: str) -> None:
    (folder / "world.py").write_text(CODE)
    config = Environment(path=f"{folder}/world.py:World", options={"fault": fault})
    messages = ({"role": "user", "content": "Go"},)
    prompt = Prompt(messages, renderer.prompt(messages), {"prompt": "Go", "answer": "ok"}, False)
    engines = trial.MadeUpAnswers(renderer, "")  # another double would do: no episode of the stage runs here
    episodes = Episodes(config, renderer, Limits(3, 100, 200, 50), background, engines)
    try:
        trial.try_environment(config, episodes, background, prompt, renderer)
    finally:
        episodes.close()


def test_code_that_is_wrong_for_every_answer_is_refused_with_its_line(
    renderer: Renderer, background: Background, tmp_path: Path
) -> None:
    told = (
        r"environment World: an episode with made-up answers raised NameError: name 'scor' is not defined"
        r" \(.*world\.py, line 10\)"
    )
    with pytest.raises(ValueError, match=told):
        run(renderer, background, tmp_path, "misspelt")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("column", "failed: KeyError: 'misspelt' (%s/world.py, line 11)"),
        ("exit", "failed: ended its process, which exited with status 3"),
        ("wait", "is not done after 1 s"),
    ],
)
def test_what_the_made_up_answer_may_have_caused_is_a_warning(
    renderer: Renderer,
    background: Background,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    told: str,
) -> None:
    if fault == "wait":
        monkeypatch.setattr(trial, "SECONDS", 1.0)
    run(renderer, background, tmp_path, fault)
    expected = told.replace("%s", str(tmp_path))
    assert (
        f"warning: the environment World: an episode with made-up answers {expected}"
        in capsys.readouterr().out
    )


def test_a_good_environment_gets_the_answer_of_the_row(
    renderer: Renderer, background: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(renderer, background, tmp_path, "")
    assert capsys.readouterr().out == ""
