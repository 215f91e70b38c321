"""Configures rounds of sampled answers, and the stage that makes a data set of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from rlhf_core.config.engines import only_in_ppo
from rlhf_core.config.rewards import EnvironmentReward, NoReward, normalized_in_groups
from rlhf_core.config.sampled.rewarded_sampling import Rewarded
from rlhf_core.records import Positive, check

ACROSS_PROMPTS = ("rejection_sampling", "conditional_sft")  # these need rewards on one scale for all prompts
PostProcessor = Literal["dpo", "kto", "conditional_sft", "rejection_sampling"]


class Rounds(Rewarded):
    """Fields that preferences stages and loops share."""

    policy: str = Field(
        "sft",
        description="model that samples the answers; in a loop: the model that the first round starts from",
    )
    n_samples_per_prompt: Positive = Field(4, description="answers per prompt")
    min_reward: float | None = Field(
        None,
        description=(
            "rejection_sampling: drop prompts whose best answer scores lower than this (weighted sum; with a"
            " single reward model, in its own units)"
        ),
    )
    post_processor: PostProcessor = Field(
        "dpo",
        description=(
            "training data made from a prompt's answers. dpo: a pair of the best and the worst; kto: each"
            " answer, desirable when it scores above their mean; rejection_sampling: the best;"
            " conditional_sft: every answer with its reward"
        ),
    )

    @property
    def answering(self) -> Sequence[tuple[str, str]]:
        return [("policy", self.policy)]

    @check
    def _check_engines(self) -> Iterator[str]:
        yield from only_in_ppo(self.engine)

    @check
    def _check_reward(self) -> Iterator[str]:
        if any(isinstance(source, EnvironmentReward | NoReward) for source in self.reward):
            yield (
                "reward: environment and none work only in ppo: name a reward model, a function, a server or"
                " a judge"
            )
        yield from self.group_mistakes(self.n_samples_per_prompt)
        for source in self.reward_models:
            if source.ranks is not None:
                yield (
                    f"the reward model {source.title} runs in the stage's own process: leave out its ranks"
                )
        for judge in self.own_judges:
            if judge.model.engine.sleep:
                yield (
                    f"the judge {judge.title} has the GPUs to itself while it judges a round: leave out"
                    " engine.sleep"
                )

    @check
    def _check_post_processor(self) -> Iterator[str]:
        if self.n_samples_per_prompt < 2 and self.post_processor != "conditional_sft":
            yield (
                f"post_processor {self.post_processor!r} compares the answers to one prompt: set"
                " n_samples_per_prompt to 2 or more"
            )
        if self.min_reward is not None and self.post_processor != "rejection_sampling":
            yield (
                "min_reward applies only to post_processor 'rejection_sampling': leave it out for"
                f" {self.post_processor!r}"
            )
        if normalized_in_groups(self.reward) and self.post_processor in ACROSS_PROMPTS:
            yield (
                f"post_processor {self.post_processor!r} needs rewards on one scale for all prompts, but"
                " normalize group shifts each prompt's rewards to mean 0: set normalize to none or running"
            )


class Preferences(Rounds):
    """Samples n answers per prompt, scores them, and writes a data set: pairs, labelled answers, the best
    answers, or all answers with their rewards."""

    stage: Literal["preferences"] = "preferences"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description=(
            "dtype of the policy and the reward models; auto: the dtype of each checkpoint; in a loop: the"
            " loop's dtype"
        ),
    )
    first_prompt: int = Field(
        0, ge=0, description="number of prompts to skip (each round sets its own slice)"
    )
    num_prompts: Positive | None = Field(None, description="number of prompts to use; default: all")

    @property
    def made_for(self) -> PostProcessor:
        return self.post_processor

    def rows_made(self, prompts: int) -> int:
        used = min(self.num_prompts or prompts, prompts)
        is_one_each = self.post_processor in ("dpo", "rejection_sampling")
        return used if is_one_each else used * self.n_samples_per_prompt
