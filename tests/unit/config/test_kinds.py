"""The registry of stage kinds agrees with the config classes and modules that it names."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import get_args

import pytest

from rlhf_core.config import KINDS, Loop, PostProcessor, Trainable
from rlhf_core.config.kinds import Kind, named

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
