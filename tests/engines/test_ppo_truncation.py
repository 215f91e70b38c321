"""PPO whose answers are nearly all cut, with all its engines: two ranks of the critic value what comes after
them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_core.config import PPO, EngineConfig, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import SHARE, common, finish, write_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ONES = "def ones(responses): return [1.0 for _ in responses]\n"


def save_critic(base: Path, folder: Path) -> Path:
    """Writes a model with a head that gives other values than the reward."""
    shutil.copytree(base, folder)
    torch.manual_seed(0)
    critic = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, torch_dtype=torch.float32)
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(folder)
    return folder


def test_cut_answers_get_the_critics_value(material: Path, tmp_path: Path) -> None:
    """Each reward is 1, and so is each return of a finished answer; those of cut ones are the critic's
    values."""
    (tmp_path / "checks.py").write_text(ONES)
    sizes = {"generate_max_len": 4, "max_steps": 2, "save_steps": 10, "export_at": (), "max_epochs": 1}
    how = dict(init_kl_coef=0.0, lambd=1.0, bootstrap_truncated=True, truncated_penalty=0.5, value_clip=None)
    ranks = {"actor_ranks": Ranks(cpus=SHARE), "critic_ranks": Ranks(num_ranks_per_node=2, cpus=SHARE)}
    fields = {
        **common(material),
        **sizes,
        **how,
        **ranks,
        "reward": f"{tmp_path / 'checks.py'}:ones",
        "critic": "critic",
    }
    inputs = {
        "base": str(material / "base"),
        "critic": str(save_critic(material / "base", tmp_path / "critic")),
    }
    write_request(
        tmp_path / "run", PPO(**fields | {"engine": EngineConfig(cpus=SHARE, kv_cache_gib=0.5)}), inputs
    )
    finish(tmp_path / "run")
    for line in read_metrics(tmp_path / "run"):
        cut = line["response/truncated"]
        assert (
            cut > 0.5 and line["reward/mean"] == 1.0 and line["reward/truncated"] == pytest.approx(-0.5 * cut)
        )
        assert abs(line["return/mean"] - (1 - 0.5 * cut)) > 0.01
        assert line["value/clip_share"] == 0 < line["value/loss"]
