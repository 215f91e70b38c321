"""The environment, what becomes of a reward before it is trained on, and answers that a limit cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.loop_kinds import Rewarded
from rlhf_core.config.ppo.policy_objective import PolicyObjective
from rlhf_core.config.rewarding.environment_config import Environment, ShortEnvironment
from rlhf_core.config.rewards import EnvironmentReward, NoReward
from rlhf_core.records import InDigestIfSet, Rate, check


class RewardShaping(PolicyObjective, Rewarded):
    """The environment, bounds and penalties of rewards, and the treatment of cut answers."""

    environment: ShortEnvironment | None = Field(
        None,
        description=(
            "what the actor talks to in several turns and with tools: path.py:Class, or guess or tools; it"
            " gives the reward, unless `reward` names other sources"
        ),
    )
    environments: Annotated[
        dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], ShortEnvironment], InDigestIfSet
    ] = Field(
        {},
        description=(
            "several environments by name, in place of environment: the column `environment` of a row names"
            " the one that it uses"
        ),
    )
    reward_clip: Rate = Field(10.0, description="rewards are clipped to +- this, before KL and penalties")
    reward_at: Literal["last_token", "every_token"] = Field(
        "last_token",
        description=(
            "the reward is given on the answer's last token (end of sequence), or in equal parts on all of"
            " its tokens"
        ),
    )
    normalize_reward: bool = Field(
        False, description="standardise each reward model's scores with the mean and std stored with it"
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="last tokens below generate_max_len with a growing penalty (DAPO, eq. 13); 0: none",
    )
    overlong_penalty: Rate = Field(
        1.0,
        description=(
            "penalty for an answer of generate_max_len tokens; in an episode, what tools and users say after"
            " the prompt counts as well"
        ),
    )
    truncated_penalty: float = Field(
        0.0,
        ge=0,
        description=(
            "is subtracted from the reward of an answer or episode cut off by a limit of tokens, turns or"
            " time (missing_eos_penalty in TRL); use it if cut answers score too well, or never learn to end"
        ),
    )
    mask_truncated: bool = Field(
        False,
        description=(
            "answers and episodes cut off by a limit are not trained on, though their rewards count in the"
            " baselines of the others (overlong filtering, DAPO, section 3.4); use it where a cut answer may"
            " be right so far, as long reasoning is"
        ),
    )
    bootstrap_truncated: bool = Field(
        False,
        description=(
            "gae: an answer cut off at generate_max_len gets gamma times the critic's value of the whole text"
            " in place of its reward (Pardo et al. 2018, time limits); use it if the limit is a matter of"
            " cost and not part of the task"
        ),
    )

    @property
    def has_reward(self) -> bool:
        """Whether a source gives rewards; with none the policy learns from the KL alone."""
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
                f"bootstrap_truncated needs a critic, and {estimator} has none: leave it out, or set"
                " mask_truncated"
            )
        if self.mask_truncated:
            yield (
                "bootstrap_truncated and mask_truncated are two ways to treat answers that a limit cut: set"
                " one of them"
            )
        if self.talks_to:
            yield (
                "bootstrap_truncated needs the value of what comes next, which an episode that is cut between"
                " two answers does not have: leave it out, or set mask_truncated"
            )

    @check
    def _check_environment(self) -> Iterator[str]:
        if self.environment is not None and self.environments:
            yield "environment and environments exclude each other: leave one of them out"
        if not self.talks_to:
            if any(isinstance(source, EnvironmentReward) for source in self.reward):
                yield (
                    "reward names the environment, and there is none: set environment, or name another reward"
                )
            return
        if self.stop:
            yield (
                "stop ends answers that an environment goes on from, which need the template's end of turn:"
                " leave it out"
            )
        for place, environment in self.talks_to.items():
            if (environment.answer_max_len or 0) > self.generate_max_len:
                yield (
                    f"{place}.answer_max_len={environment.answer_max_len} must be at most"
                    f" generate_max_len={self.generate_max_len}: all tokens after the prompt share it"
                )
