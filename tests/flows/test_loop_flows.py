"""Runs the flows of loops and of parts of a recipe in their own processes, with one Prefect server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.loops import loop
from rlhf_core.config import Recipe
from rlhf_core.recipe.load_recipe import given_recipe, load_recipe
from rlhf_core.runs.run_records import records
from tests.support import micro
from tests.support.programs import captured
from tests.support.writing_stages import attempts

CALL = """
import json, sys
from prefect import flow
from flows.alignment import alignment
from flows.loops import loop
from flows.parts import evaluate, publish
name, parameters = sys.argv[1], json.loads(sys.argv[2])
state = globals()[name](**parameters, return_state=True)
print("STATE", state.type.value, state.message)
"""


class Called:
    """A flow in its own process."""

    def __init__(self, folder: Path, environment: dict[str, str], name: str, **parameters: object):
        command = [sys.executable, "-c", CALL, name, json.dumps(parameters)]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> str:
        out = self._process.communicate(timeout=200)[0]
        assert "STATE " in out, out[-3000:]
        return out.partition("STATE ")[2].splitlines()[0]


@pytest.fixture
def here(prefect: str, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    environment = micro.build(tmp_path / "here") | {"PREFECT_API_URL": prefect}
    return tmp_path / "here", environment


def made(folder: Path, number: int) -> str:
    (file,) = (folder / "artifacts/stages").glob(f"loop.round{number}.dpo-*/made/checkpoint")
    return file.read_text()


@pytest.mark.long
def test_three_concurrent_runs_train_one_round(here: tuple[Path, dict[str, str]]) -> None:
    folder, environment = here
    # no stage works before the other two have ended, however slowly they begin
    (folder / "slow.json").write_text('{"until": "go"}')
    called = [Called(folder, environment, "loop", recipe="recipe.yaml") for _ in range(3)]
    micro.wait_until(lambda: sum(one.running() for one in called) == 1, "two of three loops to end")
    (folder / "go").touch()
    ends = [one.ended() for one in called]
    assert sum("loop of micro: round 1 is done, win rate 0.500" in end for end in ends) == 1
    assert sum("another run is already training loop of micro" in end for end in ends) == 2
    assert all(end.startswith("COMPLETED ") for end in ends)
    assert micro.begun(folder) == ["sft", "loop.round1.preferences", "loop.round1.dpo", "evaluation"]


def test_rounds_stop_when_the_win_rate_does_and_parts_run(here: tuple[Path, dict[str, str]]) -> None:
    folder, environment = here
    end = Called(folder, environment, "evaluate", recipe="recipe.yaml").ended()
    assert "FAILED" in end
    assert "stage evaluation needs loop.round1.dpo, sft, which are not done: run `alignflow stage" in end
    assert records(folder / "artifacts") == [], "a recipe without a folder gets none"
    (folder / "artifacts" / "micro").mkdir(parents=True)
    Called(folder, environment, "evaluate", recipe="recipe.yaml").ended()
    (failed,) = records(folder / "artifacts")
    assert (failed.state, failed.recipe, failed.stages) == ("failed", "micro", ()) and failed.ended
    assert failed.why.startswith(
        "ValueError: stage evaluation needs loop.round1.dpo, sft, which are not done"
    )
    end = Called(folder, environment, "publish", recipe="recipe.yaml").ended()
    assert "recipe micro has no stage of kind publication: add one" in end
    uri = f"file://{folder}/recipe.yaml"
    for number, rate in ((1, 0.5), (2, 0.6), (3, 0.6)):
        end = Called(folder, environment, "loop", recipe=uri, max_rounds=9, min_gain=0.0).ended()
        assert end == f"COMPLETED loop of micro: round {number} is done, win rate {rate:.3f}"
    end = Called(folder, environment, "loop", recipe=uri, max_rounds=9, min_gain=0.0).ended()
    assert (
        end
        == "COMPLETED loop of micro: the win rate went from 0.600 to 0.600 in round 3: it does not rise by"
        " more than 0"
    )
    rounds = [name for name in micro.begun(folder) if name.endswith(".dpo")]
    assert rounds == [f"loop.round{k}.dpo" for k in (1, 2, 3)]
    assert len({made(folder, k) for k in (1, 2, 3)}) == 3
    end = Called(
        folder,
        environment,
        "evaluate",
        recipe="recipe.yaml",
        overrides=["loop.rounds=3", "evaluation.temperature=0.3"],
    ).ended()
    assert end.startswith("COMPLETED") and micro.begun(folder)[-1] == "evaluation"
    status = captured(
        [sys.executable, "-m", "flows.cli", "loop", "status", "recipe.yaml"], cwd=folder, env=environment
    )
    assert "3 rounds are done. Round 4 is next" in status.stdout, status.stdout + status.stderr
    assert "0.600" in status.stdout, status.stdout + status.stderr


def test_wrong_parameters_are_one_sentence(here: tuple[Path, dict[str, str]]) -> None:
    folder, environment = here
    for name, parameters, sentence in (
        (
            "alignment",
            {"recipe": 5},
            "parameter recipe: give the path or URI of a YAML file, or a recipe as a mapping, not 5",
        ),
        (
            "loop",
            {"recipe": "recipe.yaml", "max_rounds": "two"},
            "parameter max_rounds: give int or nothing, not 'two'",
        ),
    ):
        end = Called(folder, environment, name, **parameters).ended()
        assert end == f"FAILED Flow run encountered an exception: ValueError: {sentence}"


def test_min_gain_without_an_evaluation_of_the_loop_is_refused_before_training(
    prefect: str, recipe: Callable[..., Recipe]
) -> None:
    text = Path("recipe.yaml").read_text()
    Path("recipe.yaml").write_text(text.replace("models: [loop]", "models: [sft], baseline: base"))
    with pytest.raises(ValueError, match=r"--min-gain .* needs an evaluation that judges .* or leave it out"):
        loop("recipe.yaml", max_rounds=1, min_gain=0.0)
    assert not attempts()


def test_parameters_accept_every_form_of_a_recipe(tmp_path: Path) -> None:
    micro.build(tmp_path / "here")
    path = tmp_path / "here" / "recipe.yaml"
    plain = load_recipe(path)
    assert given_recipe(plain) is plain and given_recipe(plain.model_dump(mode="json")) == plain
    assert load_recipe(f"file://{path}") == plain
    assert given_recipe(plain, ["loop.beta=0.5"]) == given_recipe(str(path), ["loop.beta=0.5"]) != plain
    for given, sentence in (
        (f"file://{path}x", "recipe file://.*: No such file or directory; give the path of a YAML file"),
        ("nothing://x/y", "recipe nothing://x/y cannot be read: ValueError: Protocol not known: nothing"),
        ({"name": "x"}, "base_model: missing"),
    ):
        with pytest.raises(ValueError, match=sentence):
            given_recipe(given)
    with pytest.raises(ValueError, match="parameter overrides: give a list of texts"):
        given_recipe(plain, "loop.beta=0.5")
