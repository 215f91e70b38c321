"""What a stage's digest covers: whatever decides its result. Torch-free, offline.

That is its configuration, the digests of its parents, of its local data and model folders, the seed, and STAGE_VERSIONS. Cadence of
logs and saves, gates, and the limits at which a stage stops are not in it. Hub ids count by name: a repository that moves on is not
noticed; `owner/name@REVISION` counts by its commit (revisions.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_core.config import DPO, KTO, PPO, SFT, AlignmentTax, Preferences, Recipe, RewardModel, StageConfig
from rlhf_core.digests import ABSENT, Digests
from rlhf_core.lineage import is_remote
from rlhf_core.reward_sources import FunctionReward, ModelReward
from rlhf_core.stage import digest
from rlhf_core.tax_tasks import is_path, read_task, task_name

# Raise a stage's number when a change of code changes the numbers it produces: its results are then made anew.
STAGE_VERSIONS = {"sft": 1, "reward_model": 1, "dpo": 1, "kto": 1, "preferences": 1, "ppo": 1}
STAGE_VERSIONS |= {"evaluation": 1, "alignment_tax": 1, "publication": 1}
# Fields younger than results that exist, left out of digests while they hold what was the only way before.
LATER: dict[str, Any] = {
    "branch": "main",
    "round_branch": None,
    "proxy": None,
    "export_at": [],
    "endpoints": {},
    "tensor_parallel_size": 1,
    "seed_answers": False,
    "one_step_off_policy": False,
    "routing_replay": True,  # of mixtures of experts on GPUs, results without it count as results with it
    "stream_batch_size": None,
}
# Counted as their defaults, which digests hold from before: how much failing is borne, how often held-out data is looked at.
PATIENCE = ("max_attempts", "max_failed", "eval_steps")
NO_RESULT = {
    "adam_offload",
    "api_key_env",
    "colocate_actor_ref",
    "colocate_all",
    "colocate_critic_reward",
    "concurrency",
    "gates",
    "gradient_checkpointing",
    "input_price",
    "keep_checkpoints",
    "logging_steps",
    "max_failed_rewards",
    "output_price",
    "ref_reward_offload",
    "requests_per_minute",
    "save_minutes",
    "save_steps",
    "start_timeout",
    "timeout",
    "verdict_cache",
}


def stage_digest(recipe: Recipe, config: StageConfig, stages: Mapping[str, str], models: Mapping[str, str], digests: Digests) -> str:
    """The digest of a stage. `stages` maps the names in its config to its parents' digests, `models` others to a folder or Hub id."""
    return digest(
        {
            "stage": config.stage,
            "version": STAGE_VERSIONS[config.stage],
            "config": deciding(config, digests),
            "stages": stages,
            "models": {named: _content(place, digests) for named, place in models.items()},
            "seed": recipe.seed,
            "trust_remote_code": recipe.trust_remote_code,
        }
    )


def _with_usual_patience(value: Any) -> Any:
    """With the defaults of the fields that say how much failing is borne, which decides whether there is a result, not what it is."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        found = {name: fields[name].get_default() if name in PATIENCE else _with_usual_patience(getattr(value, name)) for name in fields}
        return value.model_copy(update=found)
    if isinstance(value, dict):
        return {key: _with_usual_patience(item) for key, item in value.items()}
    return tuple(map(_with_usual_patience, value)) if isinstance(value, tuple) else value


def deciding(config: StageConfig, digests: Digests) -> Any:
    """The config without what decides no result, and with the content of local data instead of its path."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            path = {"path": _content(value["path"], digests)} if "path" in value and "messages_key" in value else {}
            if value.get("kind") == "function":
                path = {"code": digests.of(FunctionReward.model_validate(value).file)}
            left_out = (("format", "auto"), *LATER.items())  # a format that is told by the rows is told by their digest
            kept = {key: item for key, item in value.items() if key not in NO_RESULT and (key, item) not in left_out}
            return {key: strip(item) for key, item in kept.items()} | path
        return [strip(item) for item in value] if isinstance(value, list) else value

    content = strip(_with_usual_patience(config).model_dump(mode="json"))
    if content.get("zero_stage") == "auto":  # counts as what was there before: plain torch, and ZeRO-3 in PPO
        content["zero_stage"] = 3 if isinstance(config, PPO) else 0
    if isinstance(config, SFT | RewardModel | DPO | KTO) and config.dtype == "bfloat16" and config.ranks.world_size == 1:
        if content["zero_stage"] == 0 and (config.lora is None or isinstance(config, RewardModel)):
            content["optimised"] = "float32"  # what was there before had learned less than its learning rate says
    if isinstance(config, RewardModel) and config.eval_data and config.eval_data.template != config.data.template:
        content["held_out"] = "in its own template"  # it was in that of the training data
    if isinstance(config, SFT) and config.condition == "reward" and config.eval_data:
        content["held_out"] = "with the training data's condition"  # it was with its own
    if isinstance(config, AlignmentTax):
        content["tasks"] = [_task_content(task, digests) if is_path(task) else task for task in config.tasks]
    if isinstance(config, Preferences) and config.dtype != "bfloat16":
        content.pop("dtype")  # float32 was the only way before
    reward = config.reward[0] if isinstance(config, Preferences) and len(config.reward) == 1 else None
    if isinstance(reward, ModelReward) and reward == ModelReward(model=reward.model):
        content["reward"] = reward.model  # one reward model and nothing more said of it
    return content


def _content(place: str, digests: Digests) -> str:
    return f"hub:{place}" if is_remote(place) else digests.of(Path(place))


def _task_content(task: str, digests: Digests) -> list[str]:
    try:
        return [task_name(task), *(digests.of(file) for file in read_task(task).files)]
    except ValueError:
        return [task_name(task), ABSENT]  # `check` and the stage say what is wrong with it
