"""`alignflow init` writes a valid recipe for every kind and number of GPUs, and reports mistakes in one
sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.cli import first_commands as start
from flows.cli.app import main
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.preflight.machine_checks import needs
from rlhf_core.recipe.load_recipe import load_recipe, recipe_of
from rlhf_core.recipe.plan import plan
from tests.support.text_rows import rows_of_text

DATA = {"sft": ["--sft-data", "s.jsonl"], "dpo": ["--preference-data", "p.jsonl"]}
DATA |= {kind: [*DATA["dpo"], "--prompts", "prompts.jsonl"] for kind in ("ppo", "loop")}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the list of the user's answers, in order; all of them must be read."""
    answers: list[str] = []

    def answer(question: str) -> str:
        print(question)
        if not answers:
            raise EOFError
        return answers.pop(0)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    yield answers
    assert answers == []


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize(
    "optional", [[], ["--questions", "q.jsonl"], ["--questions", "q.jsonl", "--sft-data", "s.jsonl"]]
)
@pytest.mark.parametrize("kind", DATA)
def test_every_kind_is_a_valid_recipe_that_uses_its_gpus(kind: str, optional: list[str], gpus: int) -> None:
    given = [*DATA[kind], *(optional if kind != "sft" else optional[:2])]
    assert (
        main(["init", "mine", "--kind", kind, "--base-model", "org/base", *given, "--gpus", str(gpus)]) == 0
    )
    assert main(["validate", "mine/recipe.yaml"]) == 0
    planned = plan(load_recipe("mine/recipe.yaml"))
    assert planned.recipe.name == "mine" and planned.recipe.base_model == "org/base"
    assert {"evaluation", "publication"} & planned.recipe.stages.keys() == {
        "publication",
        *(["evaluation"] if optional else []),
    }
    assert ("sft" in planned.recipe.stages) == ("s.jsonl" in given)
    most = max(needs(node.config).gpus for node in planned.nodes)
    assert (0.5 < most <= 1) if gpus == 1 else most == gpus


def test_a_recipe_for_the_demos_material_needs_nothing_more(material: Path) -> None:
    files = {"sft-data": "sft", "preference-data": "preferences", "questions": "questions"}
    given = [word for flag, name in files.items() for word in (f"--{flag}", str(material / f"{name}.jsonl"))]
    assert (
        main(
            [
                "init",
                "--kind",
                "dpo",
                "--base-model",
                str(material / "base"),
                *given,
                "--gpus",
                "0",
                "--name",
                "own",
            ]
        )
        == 0
    )
    planned = plan(load_recipe("recipe.yaml"))
    assert check_inputs(planned, planned.nodes) == []


def test_paths_of_the_command_line_are_found_from_the_recipes_folder(material: Path) -> None:
    Path("data").symlink_to(material)
    given = ["--sft-data", "data/sft.jsonl", "--questions", f"{material}/questions.jsonl"]
    assert (
        main(["init", "mine/new", "--kind", "sft", "--base-model", "data/base", *given, "--gpus", "0"]) == 0
    )
    recipe = load_recipe("mine/new/recipe.yaml")
    assert "../../data/sft.jsonl" in Path("mine/new/recipe.yaml").read_text()
    planned = plan(recipe)
    assert check_inputs(planned, planned.nodes) == []


def test_an_existing_recipe_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text("mine")
    assert main(["init", "--kind", "sft", "--base-model", "org/base", *DATA["sft"]]) == 2
    assert capsys.readouterr().err == "recipe.yaml exists already: give another folder, or remove it\n"
    assert Path("recipe.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "told"),
    rows_of_text("""
    [] | give --kind and --base-model: standard input is not a terminal, so the values cannot be asked for
    [--kind, ppo] | give --base-model, --preference-data and --prompts: standard
    [--kind, sft, --base-model, org/base] | give --sft-data: standard
    [--kind, sft, --base-model, b, --preference-data, p.jsonl, --prompts, prompts.jsonl] | a recipe of kind sft does not read --preference-data and --prompts:
    [--kind, sft, --base-model, b, --sft-data, s.jsonl, --gpus, '-1'] | --gpus -1: give the number of GPUs
    [--kind, sft, --base-model, b, --sft-data, s.jsonl, --name, a b] | name: string should match pattern
    [file/sub, --kind, sft, --base-model, b, --sft-data, s.jsonl] | file/sub cannot be created (Not a directory): give another
    """),
)
def test_missing_or_wrong_values_are_reported_in_one_sentence(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    Path("file").touch()
    assert main(["init", *given]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(told) and shown.count("\n") == 1
    assert not Path("recipe.yaml").exists()


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--kind", "grpo", "--base-model", "b"]) == 2
    assert "sft" in capsys.readouterr().err


def test_a_terminal_asks_for_values_without_a_flag(
    terminal: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal += [
        "grpo",
        "ppo",
        "",
        "org/base",
        "pairs.jsonl",
        "",
        "https://example.org/q.jsonl",
        "two",
        "2",
        "my-ppo",
    ]
    assert main(["init", "--prompts", "prompts.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "Prompts to answer" not in shown and shown.count(start.MEANING["kind"]) == 2
    recipe = load_recipe("recipe.yaml")
    assert recipe.name == "my-ppo"
    assert recipe.base_model == "org/base"
    assert list(recipe.stages) == ["reward_model", "ppo", "evaluation", "publication"]
    assert recipe.stages["ppo"].model_dump()["actor"] == "base" and needs(recipe.stages["ppo"]).gpus == 2


def test_the_end_of_the_input_is_reported_in_one_sentence(
    terminal: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal += ["sft"]
    assert main(["init"]) == 2
    assert capsys.readouterr().err == "no answer was given: give --base-model\n"


@pytest.mark.parametrize(
    "value",
    ["1e5", "true", "null", 'a "b" \\ c: d', "a,b", "#x", "ä.jsonl", "{x}", ".5", "~", "plain/x-1.jsonl"],
)
def test_any_text_is_read_back_unchanged(value: str) -> None:
    """But for the home folder, which ~ is."""
    assert (
        main(
            [
                "init",
                "--kind",
                "sft",
                "--base-model",
                value,
                "--sft-data",
                value,
                "--name",
                "x",
                "--gpus",
                "0",
            ]
        )
        == 0
    )
    recipe = recipe_of(yaml.safe_load(Path("recipe.yaml").read_text()))
    stage = recipe.stages["sft"].model_dump()
    place = os.path.expanduser(value)
    assert (recipe.base_model, stage["data"]["sources"][0]["path"]) == (place, place)
