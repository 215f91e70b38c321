"""With adapters the reference is the actor without them: no second copy of the frozen weights is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import Lora
from rlhf_core.rewards.clients import Rewards
from rlhf_core.stages.ppo import fleet
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.ppo_setup import model_paths
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel
from rlhf_core.stages.ppo.roles.trained import Update
from tests.support.fleet_config import fleet_config, no_sources
from tests.support.tiny_roles import (
    actor,
    documents,
    experience,
    flat,
    model,
    models,
    plain_engine,
    ppo,
)
from tests.unit.stages.ppo.test_fleet import Role

__all__ = ["models", "plain_engine"]  # fixtures
LORA = Lora(rank=4)


def test_without_its_adapters_the_actor_is_the_reference(models: Path, plain_engine: None) -> None:
    trained = actor(models, lora=LORA, actor_learning_rate=1e-2)
    docs = documents(8)
    before = flat(trained)
    expected = dict(ReferenceModel(model(models / "sft"), 1.0).logprobs(docs))
    for step in range(3):
        found = dict(trained.reference_logprobs(docs))
        own = dict(trained.logprobs(docs))
        assert all(np.array_equal(found[i], expected[i]) for i in expected)
        # the adapters begin at zero, and are trained
        assert all(np.array_equal(own[i], expected[i]) for i in expected) == (step == 0)
        assert [
            name
            for name, weight in trained.module.named_parameters()
            if weight.requires_grad and ".lora_" not in name
        ] == []
        # the adapters can be trained afterwards
        assert any(weight.requires_grad for weight in trained.module.parameters())
        trained.train(experience(models), [Update(list(range(8)), 1e-2, 0.0)])
    assert not torch.equal(flat(trained), before)


def test_an_error_in_the_reference_pass_leaves_the_adapters_on(
    models: Path, plain_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = actor(models, lora=LORA)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr("rlhf_core.stages.ppo.roles.actor.masked_logprobs", lambda *_, **__: 1 / 0)
        trained.reference_logprobs(documents(2))
    trained.train(experience(models), [Update(list(range(8)), 1e-2, 0.0)])


@pytest.mark.parametrize(
    ("fields", "inside"),
    [
        ({"lora": LORA}, True),
        ({"lora": LORA, "reference": "sft"}, True),
        ({"lora": LORA, "reference": "teacher"}, False),
        ({}, False),
    ],
)
def test_a_reference_of_its_own_is_loaded_where_it_is_another_model(
    fields: dict[str, object], inside: bool
) -> None:
    config = ppo(**fields, colocate_actor_ref=True)
    assert config.has_reference and ("reference" in config.groups) is not inside
    assert config.scorings["actor"] == 1 + inside
    named = model_paths(config, {"sft": "a", "teacher": "b", "reward_model": "c"})
    assert named.get("reference") == (None if inside else {"teacher": "b"}.get(config.reference or "", "a"))
    assert config.together == ([] if inside else [["actor", "reference"]])
    none = ppo(**{**fields, "reference": None}, init_kl_coef=0.0)
    assert "reference" not in none.groups and none.scorings["actor"] == 1, "there is no KL"


@pytest.mark.parametrize("inside", [True, False])
def test_the_actor_is_asked_for_what_the_reference_would_say(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "put_on_nodes", lambda value: value)
    said: list[str] = []
    rewards = Rewards({"score": np.zeros(0)}, {})
    reference = None if inside else Role(said, "reference")
    made: Any = Fleet(
        fleet_config(reference_in_actor=inside), Role(said, "actor"), None, reference, no_sources(None), None
    )  # type: ignore[arg-type]
    made.start_score([], rewards, 0)
    second = "actor begins to reference_logprobs" if inside else "reference begins to logprobs"
    assert said == ["actor begins to logprobs", second]
