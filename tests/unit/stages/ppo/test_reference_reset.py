"""`reset_reference_every`: when the reference gets the actor's weights, which ones, and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import PPO, Data
from rlhf_core.rewards.clients import Rewards
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.timeline import Timeline
from rlhf_core.stages.ppo.iteration import Carried, Iteration
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, Scored
from tests.support.states import wait_until_complete
from tests.support.tiny_roles import documents, ppo
from tests.unit.stages.ppo.test_ppo_export import Roles
from tests.unit.stages.ppo.test_ppo_export import ppo as run_ppo


def references(
    material: Path, run: RunDir, patch: pytest.MonkeyPatch, killed_at: int | None = None, **config: Any
) -> dict[int, int]:
    """Runs the stage, of five iterations. Returns for each the iteration whose actor its reference was; 0: the
    start. `killed_at`: the iteration that ends in a kill."""
    roles = Roles()
    found: dict[int, int] = {}

    def iteration(_: object, setup: object, carried: Carried, *rest: object) -> Iteration:
        if roles.weights + 1 == killed_at:
            wait_until_complete()
            raise KeyboardInterrupt
        roles.weights += 1
        found[roles.weights] = roles.reference
        return Iteration({"reward/mean": 0.1}, 0.0, carried, [], Rewards({}, {}), Timeline(0.0, []), {})

    doubles = {"start_fleet": lambda *_: roles, "ppo_iteration": iteration}
    if killed_at is None:
        run_ppo(material, run, patch, doubles=doubles, **config)
    else:
        with pytest.raises(KeyboardInterrupt):
            run_ppo(material, run, patch, doubles=doubles, **config)
    return found


@pytest.mark.parametrize(
    ("every", "expected"),
    [(None, [0, 0, 0, 0, 0]), (1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4]), (5, [0, 0, 0, 0, 0])],
)
def test_the_reference_is_reset_after_every_nth_iteration(
    every: int | None, expected: list[int], material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = references(material, RunDir(tmp_path / "run"), monkeypatch, reset_reference_every=every)
    assert list(found.values()) == expected


@pytest.mark.parametrize("save_steps", [1, 2, 3])
@pytest.mark.parametrize("killed_at", [2, 3, 4, 5])
def test_a_killed_run_goes_on_with_the_reference_of_its_state(
    save_steps: int, killed_at: int, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With save_steps 3, killed in iteration 5: the state of iteration 3 has the reference of 2, and the
    newest export is of 4."""
    fields = {"save_steps": save_steps, "reset_reference_every": 2}
    whole = references(material, RunDir(tmp_path / "whole"), monkeypatch, **fields)
    run = RunDir(tmp_path / "killed")
    references(material, run, monkeypatch, killed_at, **fields)
    rest = references(material, run, monkeypatch, **fields)
    first = 1 + (killed_at - 1) // save_steps * save_steps
    assert rest == {number: whole[number] for number in range(first, 6)}


def test_a_run_that_is_killed_twice_has_the_reference_of_its_state(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reset lies between the kills: the second state links to what the first one had."""
    run = RunDir(tmp_path / "run")
    fields = {"save_steps": 1, "reset_reference_every": 2}
    references(material, run, monkeypatch, 3, **fields)
    assert references(material, run, monkeypatch, 4, **fields) == {3: 2}
    assert references(material, run, monkeypatch, **fields) == {4: 2, 5: 4}


def values(scored: Scored) -> np.ndarray:
    return np.concatenate([array for _, array in sorted(scored, key=lambda pair: pair[0])])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_reset_reference_scores_as_the_actor(
    dtype: str, offload: bool, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    spec = ModelSpec(str(material / "base"), dtype, 0, 8, False)
    actor = Actor(spec, ppo(dtype=dtype), 0)
    reference = ReferenceModel(spec, 1.0, offload)
    docs = documents(8)
    before = values(actor.logprobs(docs))
    assert np.array_equal(values(reference.logprobs(docs)), before)
    generator = torch.Generator().manual_seed(0)
    for weight in actor.engine.module.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.grad = noise.to(weight.dtype)
    actor.engine.step(1e-2)
    after = values(actor.logprobs(docs))
    assert not np.array_equal(after, before)
    assert np.array_equal(values(reference.logprobs(docs)), before)
    actor.export(str(tmp_path / "export"))
    reference.take_weights(str(tmp_path / "export"))
    assert np.array_equal(values(reference.logprobs(docs)), after)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"init_kl_coef": 0}, "without a KL none is loaded:"),
        ({"reference": "org/other"}, "reference names org/other"),
        ({"lora": {}}, "with lora the reference is the actor without its adapters"),
        (
            {"ref_reward_shard": True, "reference_ranks": {"num_ranks_per_node": 2}, "reward": "no.py:f"},
            "whole on each rank",
        ),
    ],
)
def test_a_reference_that_cannot_be_reset_is_refused(fields: dict[str, Any], told: str) -> None:
    given = {"prompts": Data(sources="p.jsonl"), "critic": "org/c", **fields}
    PPO.model_validate(given)
    with pytest.raises(ValueError, match=told):
        PPO.model_validate(given | {"reset_reference_every": 2})
