"""Kinds of stages, ours and those of other packages."""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal, get_args

import pytest

from rlhf_core.config import KINDS, Loop, PostProcessor, Trainable, outside_kinds
from rlhf_core.config.gates import Gated
from rlhf_core.config.kinds import Kind, named
from rlhf_core.recipe.load_recipe import load_recipe

WORKING = {name: kind for name, kind in KINDS.items() if kind.module}


def test_a_kind_has_the_name_of_its_config() -> None:
    assert {name: kind.config.model_fields["stage"].default for name, kind in KINDS.items()} == {
        name: name for name in KINDS
    }
    assert {
        name for name, kind in KINDS.items() if issubclass(kind.config, Loop)
    } == KINDS.keys() - WORKING.keys()


@pytest.mark.parametrize("kind", WORKING.values(), ids=WORKING)
def test_the_names_of_an_entry_exist(kind: Kind) -> None:
    spec = importlib.util.find_spec(kind.module)
    assert spec is not None and spec.origin is not None
    assert "run" in {
        part.name
        for part in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(part, ast.FunctionDef)
    }
    assert importlib.util.find_spec(f"{kind.package}.__main__") is not None
    assert {kind.start, *kind.names} <= kind.config.model_fields.keys() and kind.start in kind.names
    assert all(named(name) for wanted in kind.names.values() for name in wanted)
    if issubclass(kind.config, Trainable):
        assert bool(kind.config.rows) == ("data" in kind.config.model_fields)
    assert set(kind.takes) <= set(get_args(PostProcessor))


def test_other_kinds_may_name_the_output_of_a_kind() -> None:
    assert named("policy") == ("sft", "dpo", "kto", "ppo", "select") and named("reward") == ("reward_model",)
    assert named("policy", "evaluation") == ("sft", "dpo", "kto", "ppo", "evaluation", "select")


class Toy(Gated):
    stage: Literal["toy"] = "toy"


with pytest.warns(UserWarning, match="shadows"):

    class Hidden(Gated):
        stage: Literal["zoo"] = "zoo"
        exports: tuple[str, ...] = ("x",)  # type: ignore[assignment]


class NotGated:
    pass


GOOD = Kind(Toy, "acme.toy")
NO_MODULE = Kind(Toy)
NO_CONFIG = Kind(NotGated, "acme.toy")  # type: ignore[arg-type]
HIDDEN = Kind(Hidden, "acme.zoo")
NUMBER = 5


@pytest.fixture(autouse=True)
def _none_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_kinds, "UNUSABLE", {})


def read(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> dict[str, Kind]:
    points = [
        EntryPoint(name, value, outside_kinds.GROUP),
        EntryPoint("toy", f"{__name__}:GOOD", outside_kinds.GROUP),
    ]
    monkeypatch.setattr(
        outside_kinds, "entry_points", lambda group: points if group == outside_kinds.GROUP else []
    )
    return outside_kinds.kinds_of_packages(KINDS)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("sft", "GOOD", "a kind of this name exists; choose another"),
        ("toys", "GOOD", "the field `stage` of Toy must have the default 'toys'"),
        ("atoy", "NO_MODULE", "the field `stage` of Toy must have the default 'atoy'"),
        ("zoo", "NUMBER", "it is a int, not an rlhf_core.config.kinds.Kind"),
        ("zoo", "NO_CONFIG", "its config class must inherit from rlhf_core.config.gates.Gated"),
        ("zoo", "HIDDEN", "the field exports of Hidden has the name of an attribute of every"),
        ("zoo", "ABSENT", "has no attribute 'ABSENT'"),
    ],
)
def test_an_entry_point_that_cannot_be_used(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(monkeypatch, name, f"{__name__}:{value}") == {"toy": GOOD}, "others are there"
    (sentence,) = outside_kinds.UNUSABLE.values()
    assert sentence.startswith(f"the stage kind {name} of a package ({__name__}:{value}) cannot be used: ")
    assert told in sentence


def test_a_kind_without_a_module_and_a_package_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    read(monkeypatch, "absent", "acme_that_is_gone.kind:KIND")
    assert "No module named 'acme_that_is_gone'" in outside_kinds.UNUSABLE["absent"]
    points = [EntryPoint("toy", f"{__name__}:NO_MODULE", outside_kinds.GROUP)]
    monkeypatch.setattr(outside_kinds, "entry_points", lambda group: points)
    assert outside_kinds.kinds_of_packages(KINDS) == {}
    assert outside_kinds.UNUSABLE["toy"].endswith("it does not name a module with `run(request, run)`")


def test_a_recipe_that_names_it_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rlhf_core.recipe.sentences.UNUSABLE",
        {"toy": "the stage kind toy of the package acme cannot be used: x"},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{name: r, base_model: b, stages: {a: {stage: toy}}}")
    with pytest.raises(ValueError, match=r"stages\.a: the .* kind toy of the package acme cannot be used: x"):
        load_recipe(recipe)


def test_kinds_of_other_packages_run_by_our_command() -> None:
    assert GOOD.package == "rlhf_core"
    assert KINDS["evaluation"].package == "evaluation"
    assert KINDS["iterative_dpo"].package == ""
