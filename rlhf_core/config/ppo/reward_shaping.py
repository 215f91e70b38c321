"""Configures the environment, how rewards are processed before training, and the treatment of truncated
answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.ppo.policy_objective import PolicyObjective
from rlhf_core.config.rewarding.environment_config import Environment, ShortEnvironment
from rlhf_core.config.rewards import EnvironmentReward, NoReward
from rlhf_core.config.sampled.rewarded_sampling import Rewarded
from rlhf_core.records import InDigestIfSet, Rate, check


class RewardShaping(PolicyObjective, Rewarded):
    """Fields for the environment, bounds and penalties of rewards, and the treatment of truncated answers."""

    environment: ShortEnvironment | None = Field(
        None,
        description=(
            "environment that the actor interacts with over several turns and with tools: path.py:Class,"
            " guess or tools; it gives the reward unless `reward` names other sources"
        ),
    )
    environments: Annotated[
        dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], ShortEnvironment], InDigestIfSet
    ] = Field(
        {},
        description=(
            "several environments by name, instead of environment; the column `environment` of each row names"
            " the one to use"
        ),
    )
    reward_clip: Rate = Field(10.0, description="clip rewards to +- this value, before KL and penalties")
    reward_at: Literal["last_token", "every_token"] = Field(
        "last_token",
        description=(
            "assign the reward to the answer's last token (end of sequence), or in equal parts to all of its"
            " tokens"
        ),
    )
    normalize_reward: bool = Field(
        False,
        description="standardise each reward model's scores with the mean and std stored with the model",
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description=(
            "number of tokens before generate_max_len over which a length penalty grows (DAPO, eq. 13); 0: no"
            " penalty"
        ),
    )
    overlong_penalty: Rate = Field(
        1.0,
        description=(
            "penalty for an answer of generate_max_len tokens; in an episode, tokens from tools and users"
            " after the prompt count as well"
        ),
    )
    truncated_penalty: float = Field(
        0.0,
        ge=0,
        description=(
            "amount subtracted from the reward of an answer or episode that was cut by a limit on tokens,"
            " turns or time (missing_eos_penalty in TRL); use it if cut answers score too well, or the policy"
            " never learns to end its answers"
        ),
    )
    mask_truncated: bool = Field(
        False,
        description=(
            "exclude answers and episodes that were cut by a limit from training; their rewards still count"
            " in the baselines of other answers (overlong filtering, DAPO, section 3.4); use it if a cut"
            " answer may be right as far as it goes, as in long reasoning"
        ),
    )
    bootstrap_truncated: bool = Field(
        False,
        description=(
            "gae: replace the reward of an answer cut at generate_max_len with gamma times the critic's value"
            " of the whole text (Pardo et al. 2018, time limits); use it if the limit only saves cost and is"
            " not part of the task"
        ),
    )

    @property
    def has_reward(self) -> bool:
        """Whether any source gives rewards. If none does, the policy learns only from the KL."""
        return any(not isinstance(source, NoReward) for source in self.reward)

    @property
    def talks_to(self) -> Mapping[str, Environment]:
        if self.environment is not None:
            return {"environment": self.environment}
        return {f"environments.{name}": each for name, each in self.environments.items()}

    @model_validator(mode="before")
    @classmethod
    def _rewarded_by_the_environment(cls, given: Any) -> Any:
        if isinstance(given, dict) and (given.get("environment") or given.get("environments")):
            return {"reward": "environment", **given}
        return given

    @check
    def _check_overlong(self) -> Iterator[str]:
        if self.overlong_buffer >= self.generate_max_len:
            yield (
                f"overlong_buffer={self.overlong_buffer} must be below"
                f" generate_max_len={self.generate_max_len}"
            )

    @check
    def _check_bootstrap(self) -> Iterator[str]:
        if not self.bootstrap_truncated:
            return
        if not self.has_critic:
            estimator = self.advantage_estimator
            yield (
                f"bootstrap_truncated needs a critic, but {estimator} has none: leave it out, or set"
                " mask_truncated"
            )
        if self.mask_truncated:
            yield (
                "bootstrap_truncated and mask_truncated are alternative treatments of cut answers: set only"
                " one of them"
            )
        if self.talks_to:
            yield (
                "bootstrap_truncated needs the critic's value at the cut, which an episode cut between two"
                " answers does not have: leave it out, or set mask_truncated"
            )

    @check
    def _check_environment(self) -> Iterator[str]:
        if self.environment is not None and self.environments:
            yield "environment and environments exclude each other: leave one of them out"
        if not self.talks_to:
            if any(isinstance(source, EnvironmentReward) for source in self.reward):
                yield (
                    "reward names the environment, but none is set: set environment, or name another reward"
                )
            return
        if self.stop:
            yield (
                "stop would end answers without the template's end of turn, which an environment needs to"
                " continue: leave it out"
            )
        for place, environment in self.talks_to.items():
            if (environment.answer_max_len or 0) > self.generate_max_len:
                yield (
                    f"{place}.answer_max_len={environment.answer_max_len} must be at most"
                    f" generate_max_len={self.generate_max_len}: all tokens after the prompt share it"
                )
