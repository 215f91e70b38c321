"""One frozen config per stage, and the recipe that joins them. Torch-free: an orchestrating machine can check a recipe.

Every field's comment (`Field(description=...)`) ends up in `docs`; defaults are those of `numerics`: the names users of
the flat flag dialect already know (`actor_learning_rate`, `init_kl_coef`, `micro_train_batch_size`, ...).
A value that names a model (`model`, `policy`, `actor`, `reward` ...) is `base`, the name of another stage of the recipe,
or a local folder / Hub id of a model (`owner/name@REVISION`: at a commit, tag or branch).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from rlhf_core.config.data import Data, Source
from rlhf_core.config.evaluation import (
    ChatJudge,
    Endpoint,
    Evaluation,
    Judge,
    OpenAIJudge,
    Publication,
    Remote,
    RewardEvaluation,
    RewardJudge,
    RuleJudge,
    VllmJudge,
)
from rlhf_core.config.gates import Gate
from rlhf_core.config.notify import EVENTS, Notify
from rlhf_core.config.ppo import AGGREGATIONS, GROUP_ESTIMATORS, PPO, AdvantageEstimator, Aggregation
from rlhf_core.config.preference import DPO, KTO, REFERENCE_FREE, PreferenceLoss, UnpairedLoss
from rlhf_core.config.rounds import POST_PROCESSOR_FIELDS, Iterative, IterativeDPO, Loop, PostProcessor, Preferences, Rounds, Sampling, Vllm
from rlhf_core.config.supervised import SFT, RewardModel
from rlhf_core.config.tax import AlignmentTax
from rlhf_core.config.training import Lora, Trainable
from rlhf_core.types import Frozen, Ranks

__all__ = [
    "AGGREGATIONS",
    "DPO",
    "EVENTS",
    "GROUP_ESTIMATORS",
    "KTO",
    "POST_PROCESSOR_FIELDS",
    "PPO",
    "REFERENCE_FREE",
    "SFT",
    "STAGE_KINDS",
    "AdvantageEstimator",
    "Aggregation",
    "AlignmentTax",
    "ChatJudge",
    "Data",
    "Endpoint",
    "Evaluation",
    "Gate",
    "Iterative",
    "IterativeDPO",
    "Judge",
    "Loop",
    "Lora",
    "Notify",
    "OpenAIJudge",
    "PostProcessor",
    "PreferenceLoss",
    "Preferences",
    "Publication",
    "Ranks",
    "Recipe",
    "Remote",
    "RewardEvaluation",
    "RewardJudge",
    "RewardModel",
    "Rounds",
    "RuleJudge",
    "Sampling",
    "Source",
    "StageConfig",
    "Trainable",
    "UnpairedLoss",
    "Vllm",
    "VllmJudge",
]

StageConfig = Annotated[
    SFT | RewardModel | DPO | KTO | Preferences | IterativeDPO | Iterative | PPO | Evaluation | AlignmentTax | Publication,
    Field(discriminator="stage"),
]
STAGE_KINDS = (
    "sft",
    "reward_model",
    "dpo",
    "kto",
    "preferences",
    "iterative_dpo",
    "iterative",
    "ppo",
    "evaluation",
    "alignment_tax",
    "publication",
)


class Recipe(Frozen):
    """A base model, stages, and where their artifacts live."""

    name: str = Field(description="name of the recipe; artifacts are filed under it", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    base_model: str = Field(description="local folder or Hub id of the model every chain starts from")
    artifacts: str = Field("artifacts", description="folder of all run directories")
    seed: int = Field(0, ge=0, description="seed of every stage")
    trust_remote_code: bool = Field(False, description="allow model code from the Hub")
    notify: Notify | None = Field(None, description="webhook that is told how the run goes")
    stages: dict[str, StageConfig] = Field(description="stages by name; a stage named like its kind needs no `stage:`", min_length=1)

    @field_validator("stages", mode="before")
    @classmethod
    def _name_is_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: {"stage": name, **body} if isinstance(body, dict) and "stage" not in body and name in STAGE_KINDS else body
            for name, body in value.items()
        }
