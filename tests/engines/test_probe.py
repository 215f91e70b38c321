"""The probe of PPO tells an engine that computes the model otherwise from a weight sync that failed. Faults
planted in the roles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo import ppo_stage as start
from rlhf_core.stages.ppo import start_fleet as roles_start
from rlhf_core.stages.ppo.measured.probe import EngineDiffers, WeightsDiffer
from rlhf_core.stages.ppo.roles.actor import Actor
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class OtherRotary(SamplerRole):
    """An engine that takes another base of the rotary embeddings than the checkpoint names."""

    def __init__(self, model: str, **options: Any):
        other = Path(model).with_name("other-rotary")
        shutil.copytree(model, other, dirs_exist_ok=True)
        config = json.loads((other / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10.0}
        (other / "config.json").write_text(json.dumps(config))
        super().__init__(str(other), **options)


class WrongNorm(Actor):
    """A trainer that sends one weight as it is not."""

    def send_weights(self) -> None:
        assert self._channel is not None
        send = self._channel.send
        self._channel.send = lambda weights: send(
            (name, 2 * w if name == "model.norm.weight" else w) for name, w in weights
        )  # type: ignore[method-assign]
        super().send_weights()


@pytest.fixture(autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["OtherRotary"]))
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("role", "planted", "error", "message"),
    [
        (
            "SamplerRole",
            OtherRotary,
            EngineDiffers,
            "before any weight sync the engine's log-probs differ .* no weight sync is at fault",
        ),
        (
            "Actor",
            WrongNorm,
            WeightsDiffer,
            "after a weight sync the engine's log-probs differ .* does not hold the actor's weights",
        ),
    ],
)
def test_the_probe_names_what_is_at_fault(
    role: str,
    planted: type,
    error: type[Exception],
    message: str,
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles_start, role, planted)
    shutil.copytree(material / "base", tmp_path / "base")
    (tmp_path / "checks.py").write_text(
        "def brief(responses): return [-len(response) for response in responses]\n"
    )
    share = Ranks(cpus=0.25)
    config = PPO(
        actor="base",
        reward=f"{tmp_path / 'checks.py'}:brief",
        advantage_estimator="rloo",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=8,
        max_steps=1,
        prompt_max_len=64,
        generate_max_len=8,
        timeout=200,
        actor_ranks=share,
        reference_ranks=share,
        engine=EngineConfig(cpus=0.25, kv_cache_gib=0.5),
    )
    request = stage_request(config, tmp_path / "base", seed=7)
    run = RunDir(tmp_path / "run")
    run.prepare(request)
    with pytest.raises(error, match=message):
        start.run(request, run)
