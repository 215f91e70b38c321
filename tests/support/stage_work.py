"""What training stages run in this process, by kind; and a small reward model by its own stage."""

from __future__ import annotations

from pathlib import Path

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
import rlhf_core.stages.reward_model
import rlhf_core.stages.sft
from rlhf_core.config import Data, RewardModel
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

WORK = {
    "sft": rlhf_core.stages.sft.run,
    "reward_model": rlhf_core.stages.reward_model.run,
    "dpo": rlhf_core.stages.dpo.run,
    "kto": rlhf_core.stages.kto.run,
}


def reward_config(material: Path, samples: int | None = None) -> RewardModel:
    pairs = Data(sources=str(material / "preferences.jsonl"), max_samples=samples)
    sizes = dict(train_batch_size=16, micro_train_batch_size=16, max_len=96)
    return RewardModel(model="base", data=pairs, learning_rate=1e-3, **sizes)


def train_reward_model(material: Path, folder: Path, samples: int | None = None) -> Path:
    """Trains the demo's base model in `folder`. Returns the checkpoint."""
    config = reward_config(material, samples)
    folder.mkdir(exist_ok=True)
    request = stage_request(config, material / "base", seed=7)
    rlhf_core.stages.reward_model.run(request, RunDir(folder))
    return folder / "checkpoint"
