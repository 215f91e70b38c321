"""Configures where rewards come from: reward models, Python functions, HTTP servers, verifiers, judges.
Torch-free. Also parses a recipe's shorthands:

reward: reward_model                          one reward model: a stage, a folder or a Hub id
reward: [reward_model, checks.py:short, "http://localhost:8000"]
reward: [{model: reward_model, weight: 0.5}, {function: "checks.py:short", normalize: running}]
reward: {judge: {model: NAME}, rubric: TEXT}  a chat model that rates each answer
reward: math                                  a verifier (config/rewarding/verifiers.py)
reward: environment                           the environment that ppo names
reward: none                                  ppo learns from the KL to a teacher alone
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import CodeReward, MathReward, ReasoningGymReward
from rlhf_core.config.rewarding.weighed_reward import StandardisedReward, WeighedReward
from rlhf_core.records import NotInDigest, Positive, Ranks, Rate, Variable


class RequestedReward(StandardisedReward):
    """Fields that functions and servers share. Requests are retried with increasing pauses, up to a limit."""

    batch_size: Positive = Field(64, description="answers per request")
    concurrency: Annotated[Positive, NotInDigest] = Field(
        1, description="requests at once (for a function: number of processes)"
    )
    timeout: Annotated[Rate, NotInDigest] = Field(60.0, description="time limit in seconds for one request")
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        6,
        description=(
            "maximum number of requests for one answer; after that it gets no reward. The rest of a batch is"
            " given up after this many failed requests in a row, plus those needed to isolate one answer"
        ),
    )


class ModelReward(WeighedReward):
    """A reward model on its own Ray group."""

    kind: Literal["model"] = "model"
    model: str = Field("reward_model", description="reward model")
    normalize: Literal["none", "stored", "running", "group"] | None = Field(
        None,
        description=(
            "how to standardise the scores. stored: with the mean and std stored with the model; running:"
            " with those of all scores so far (in a loop: of the round's scores); group: with those of the"
            " answers to the same prompt (GDPO); default: stored if ppo sets normalize_reward, else none"
        ),
    )
    ranks: Annotated[Ranks | None, NotInDigest] = Field(
        None, description="processes of the model in ppo; default: reward_ranks of the stage"
    )

    @property
    def title(self) -> str:
        return self.name or re.sub(r"[^\w.:-]", "_", self.model.rstrip("/").rpartition("/")[2])


class FunctionReward(RequestedReward):
    """A Python function that runs in its own processes. It may take any of these parameters: `prompts`,
    `responses`, `rows`, `finished`, `query`."""

    kind: Literal["function"] = "function"
    function: str = Field(description="path.py:function", pattern=r"\.py:[A-Za-z_]\w*$")

    @property
    def file(self) -> Path:
        return Path(self.function.rpartition(":")[0]).absolute()

    @property
    def function_name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def title(self) -> str:
        return self.name or self.function_name


class HttpReward(RequestedReward):
    """A reward server: receives the same lists as JSON by POST and returns `{"rewards": [...]}`. `alignflow
    serve-reward` starts one."""

    kind: Literal["http"] = "http"
    url: str = Field(description="address", pattern=r"^https?://[^/]")
    api_key_env: Annotated[Variable | None, NotInDigest] = Field(
        None, description="environment variable whose value is sent as a bearer token"
    )

    @property
    def title(self) -> str:
        return self.name or re.sub(r"[^\w.:-]", "_", urlsplit(self.url).netloc)

    @field_validator("url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if "@" in urlsplit(value).netloc:
            raise ValueError(
                "the address contains a password, which would end up in files: put the key into the variable"
                " that api_key_env names"
            )
        return value


class EnvironmentReward(WeighedReward):
    """The reward from ppo's environment, summed over all answers of an episode."""

    kind: Literal["environment"] = "environment"
    normalize: Literal["none", "running", "group"] = Field(
        "none",
        description=(
            "running: standardise with the mean and std of all rewards so far; group: with those of the"
            " answers to the same prompt (GDPO)"
        ),
    )

    @property
    def title(self) -> str:
        return self.name or "environment"


class NoReward(WeighedReward):
    """No reward: the policy learns only from the KL to a teacher, which is ppo's reference."""

    kind: Literal["none"] = "none"
    normalize: Literal["none"] = "none"

    @property
    def title(self) -> str:
        return self.name or "none"


# for each kind, the field that identifies it
REWARD_KINDS = {"model": "model", "function": "function", "http": "url", "judge": "judge"}
VERIFIERS = ("math", "code", "reasoning_gym")


def _reward_sources(value: Any) -> Any:
    """Expands `reward_model`, `path.py:function` and `http://...` into sources, and one source into a
    tuple."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_reward_source(v) for v in values)


def _reward_source(value: Any) -> Any:
    if isinstance(value, str):
        if value in ("environment", "none", *VERIFIERS):
            return {"kind": value}
        kind = "model"
        if value.startswith(("http://", "https://")):
            kind = "http"
        elif re.search(r"\.py:\w+$", value):
            kind = "function"
        return {"kind": kind, REWARD_KINDS[kind]: value}
    if isinstance(value, dict) and isinstance(value.get("verifier"), str):
        return {"kind": value["verifier"], **value}
    if isinstance(value, dict) and "kind" not in value:
        return {
            "kind": next((kind for kind, field in REWARD_KINDS.items() if field in value), "model"),
            **value,
        }
    return value


RewardSource = Annotated[
    ModelReward
    | FunctionReward
    | HttpReward
    | MathReward
    | CodeReward
    | ReasoningGymReward
    | JudgeReward
    | EnvironmentReward
    | NoReward,
    Field(discriminator="kind"),
]


def normalized_in_groups(sources: tuple[RewardSource, ...]) -> bool:
    """Returns whether any source is standardised within the answers to one prompt."""
    return any(source.normalize == "group" for source in sources)


def _named_apart(sources: tuple[RewardSource, ...]) -> tuple[RewardSource, ...]:
    """Returns the sources. Raises ValueError if two have the same name in the metrics."""
    repeated = [title for title, count in Counter(source.title for source in sources).items() if count > 1]
    if repeated:
        raise ValueError(f"two reward sources are called {repeated[0]!r}: give one of them another `name`")
    return sources


RewardSources = Annotated[
    tuple[RewardSource, ...],
    BeforeValidator(_reward_sources),
    Field(min_length=1),
    AfterValidator(_named_apart),
]
