"""PPO with all its engines and two actor ranks that compute each pass together; the reference is whole on one
rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import PPO, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import ODD, SHARE, common, finish, write_request

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]


def test_the_actor_begins_at_its_reference_and_agrees_with_its_sampler(
    material: Path, tmp_path: Path
) -> None:
    (tmp_path / "checks.py").write_text(ODD)
    fields = common(material) | dict(
        advantage_estimator="grpo",
        n_samples_per_prompt=4,
        train_batch_size=16,
        max_steps=2,
        export_at=(),
        reward=f"{tmp_path / 'checks.py'}:odd",
        actor_ranks=Ranks(num_ranks_per_node=2, cpus=SHARE),
        sequence_parallel_size=2,
    )
    write_request(tmp_path / "run", PPO(**fields), {"base": str(material / "base")})
    finish(tmp_path / "run")
    first, second = read_metrics(tmp_path / "run")
    assert abs(first["kl/mean"]) < 1e-4 < abs(second["kl/mean"]), "the reference is the actor before training"
    for line in (first, second):
        assert line["sampler/gap_p99"] < 1e-3
        assert abs(line["policy/first_ratio"] - 1) < 1e-5
        assert line["policy/grad_norm"] > 0
