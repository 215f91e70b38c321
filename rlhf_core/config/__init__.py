"""Defines one frozen config per stage, and the recipe that combines them. Torch-free.

`Field(description=...)` is the text of docs/reference/config.md. A value that names a model (`model`,
`policy`, `actor`, `reward` ...) is `base`, the name of another stage of the recipe, or a model's local folder
or Hub id (`owner/name@REVISION` pins a commit, tag or branch).
"""

from __future__ import annotations

import difflib
import os
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from fsspec.registry import known_implementations
from pydantic import Field, field_validator

from rlhf_core.config.data import Data, Source
from rlhf_core.config.engines import EngineConfig
from rlhf_core.config.gates import Gate, Gated
from rlhf_core.config.judging.calibration import Calibration, FallibleJudge
from rlhf_core.config.judging.drift import Anchors, Drift
from rlhf_core.config.judging.evaluation import AlignmentTax, Evaluation, Regression, RewardEvaluation
from rlhf_core.config.judging.judges import (
    ChatJudge,
    Endpoint,
    Judge,
    OpenAIJudge,
    RewardJudge,
    RuleJudge,
    VllmJudge,
)
from rlhf_core.config.judging.publication import Publication
from rlhf_core.config.kinds import KINDS
from rlhf_core.config.outside_kinds import kinds_of_packages
from rlhf_core.config.ppo.policy_objective import (
    AGGREGATIONS,
    GROUP_ESTIMATORS,
    AdvantageEstimator,
    Aggregation,
)
from rlhf_core.config.ppo.ppo_config import PPO
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.config.sampled.loop_kinds import (
    POST_PROCESSOR_FIELDS,
    Iterative,
    IterativeDPO,
    IterativeFeedback,
    Loop,
    SampledLoop,
)
from rlhf_core.config.sampled.rewarded_sampling import Rewarded, SamplingFields
from rlhf_core.config.sampled.sampled_rounds import PostProcessor, Preferences, Rounds
from rlhf_core.config.sweep import Select
from rlhf_core.config.training.lora_fields import Lora
from rlhf_core.config.training.optimised import Optimised
from rlhf_core.config.training.preference import DPO, KTO, REFERENCE_FREE, PreferenceLoss, UnpairedLoss
from rlhf_core.config.training.supervised import SFT, RewardModel
from rlhf_core.config.training.trainable import Trainable
from rlhf_core.records import RECIPE_ONLY, Config, Frozen, Positive, Ranks, Rate

KINDS.update(kinds_of_packages(KINDS))

if TYPE_CHECKING:
    StageConfig = Gated  # the config of any kind; narrowed with isinstance
else:
    StageConfig = Annotated[
        reduce(or_, (kind.config for kind in KINDS.values())), Field(discriminator="stage")
    ]

Event = Literal[
    "scheduled",
    "running",
    "completed",
    "failed",
    "crashed",
    "cancelled",
    "stage",
    "gate",
    "approval",
    "champion",
]
EVENTS: tuple[Event, ...] = get_args(Event)


class Notify(Config):
    """A webhook. For each event it receives one POST with a small JSON object, sent in the background
    (docs/how-to/monitoring.md)."""

    url_env: str = Field(
        description=(
            "environment variable that holds the webhook's URL, which stays out of recipes, logs and"
            " artifacts"
        ),
        pattern=r"^[A-Za-z_]\w*$",
    )
    events: tuple[Event, ...] = Field(
        EVENTS,
        description=(
            "states of the run; `stage`, `gate`, `approval`, `champion`: a stage ended, a gate was checked, a"
            " person was asked to approve, the champion changed"
        ),
        min_length=1,
    )
    timeout: Rate = Field(10.0, description="time limit in seconds for the receiver to accept one message")

    @property
    def url(self) -> str | None:
        """The webhook's URL; None if the variable does not hold an http(s) URL."""
        url = os.environ.get(self.url_env, "")
        try:
            place = urlsplit(url)
        except ValueError:
            return None
        return url if place.scheme in ("http", "https") and place.netloc else None


class Wandb(Config):
    """Copies the lines of `metrics.jsonl` to Weights & Biases, with one W&B run per stage that writes metrics
    (docs/how-to/monitoring.md). The API key comes from the environment variable WANDB_API_KEY."""

    project: str = Field(description="project that the runs belong to", pattern=r"^[^/\\#?%:]{1,128}$")
    entity: str | None = Field(
        None,
        description="user or team that owns the project; default: the one that the API key belongs to",
        min_length=1,
    )
    group: str | None = Field(
        None,
        description="group that the runs belong to; default: the recipe's name",
        min_length=1,
        max_length=128,
    )


class Cost(Config):
    """The price of a GPU, for the dashboard (docs/how-to/dashboard.md)."""

    gpu_hour: Rate = Field(description="price of one GPU for one hour")
    currency: str = Field(
        "USD",
        description="currency of the price; prices of judges and endpoints are in USD",
        pattern=r"^[A-Z]{3}$",
    )


class Recipe(Config):
    """A base model, its stages, and the folders of their artifacts."""

    name: str = Field(
        description="name of the recipe; its artifacts are stored under this name",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
    )
    base_model: str = Field(
        description="local folder or Hub id of the model that stages refer to as `base`", min_length=1
    )
    artifacts: str = Field(
        "artifacts",
        description="folder that holds all run directories, relative to the working directory",
        min_length=1,
        pattern=r"^[^\x00-\x1f]*$",
    )
    store: str | None = Field(
        None,
        description=(
            "bucket or folder that finished stages are copied to and fetched from, such as s3://bucket/prefix"
        ),
    )
    store_checkpoints: bool = Field(
        False, description="also copy the newest resume state of a running stage to the store"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of every stage")
    side_by_side: bool | Positive | None = Field(
        None,
        description=(
            "how many stages that do not depend on each other run at once: a number; true: as many as the"
            " CPUs and GPUs allow; false: one; default: true on a machine with GPUs"
        ),
    )
    trust_remote_code: bool = Field(
        False, description="allow model code from the Hub", json_schema_extra=RECIPE_ONLY
    )
    notify: Notify | None = Field(None, description="webhook that receives the events of a run")
    wandb: Wandb | None = Field(None, description="Weights & Biases project for the metrics of every stage")
    cost: Cost | None = Field(
        None, description="price of a GPU, from which the dashboard computes the cost of runs"
    )
    stages: dict[str, StageConfig] = Field(
        description="stages by name; a stage named after its kind needs no `stage:`", min_length=1
    )

    @field_validator("name")
    @classmethod
    def _is_free(cls, value: str) -> str:
        if value in ("stages", "index.html"):
            raise ValueError(
                f"{value!r} is a name that the artifacts folder uses for all recipes: choose another name"
            )
        return value

    @field_validator("side_by_side", mode="before")
    @classmethod
    def _is_some(cls, value: Any) -> Any:
        if value == 0 and value is not False:  # pydantic would read it as false
            raise ValueError("must be true, false or a number of stages, at least 1")
        return value

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: str | None) -> str | None:
        if value is None:
            return None
        protocol, _, place = value.rpartition("://")
        if not place.strip("/"):
            raise ValueError(f"{value!r} does not name a location: give one such as s3://bucket/prefix")
        if protocol and protocol not in known_implementations and protocol not in ("file", "local"):
            near = difflib.get_close_matches(protocol, list(known_implementations), n=1)
            raise ValueError(
                "unknown protocol"
                f" {protocol!r}{f'; did you mean {near[0]}?' if near else '; fsspec does not know it'}"
            )
        if "@" in place.partition("/")[0] or "?" in place:
            raise ValueError(
                "leave keys and options out of the URL: set them in the environment (such as"
                " AWS_ACCESS_KEY_ID)"
            )
        return value

    @field_validator("stages", mode="before")
    @classmethod
    def _name_is_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: (
                {"stage": name, **body}
                if isinstance(body, dict) and "stage" not in body and name in KINDS
                else body
            )
            for name, body in value.items()
        }
