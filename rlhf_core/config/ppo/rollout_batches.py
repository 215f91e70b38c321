"""Configures the numbers of prompts, answers and iterations, and which answers are used in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rlhf_core.config.ppo.curriculum_fields import Curriculum
from rlhf_core.config.ppo.policy_objective import GROUP_ESTIMATORS, PolicyObjective
from rlhf_core.records import InDigestIfSet, NotInDigest, Positive, check


class RolloutBatches(PolicyObjective):
    """Fields for the size of an iteration, the choice of its prompts, and the filter for groups without a
    signal."""

    rollout_batch_size: Positive = Field(512, description="prompts per iteration")
    n_samples_per_prompt: Positive = Field(1, description="answers per prompt")
    micro_rollout_tokens: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "tokens per scoring pass on one rank, instead of micro_rollout_batch_size; works, with the same"
            " default, like micro_train_tokens"
        ),
    )
    num_episodes: Positive = Field(1, description="number of passes over the prompts")
    max_steps: Positive | None = Field(None, description="maximum number of iterations")
    export_at: tuple[Positive, ...] = Field(
        (),
        description=(
            "iterations after which the actor is also exported as a model; other stages refer to it as"
            " STAGE.iterationN"
        ),
    )
    curriculum: Annotated[Curriculum | None, InDigestIfSet] = Field(
        None,
        description=(
            "draw prompts by their pass rate ({}: by learnability), as many as in num_episodes passes;"
            " default: each pass uses every prompt once"
        ),
    )
    dynamic_filtering: bool = Field(
        False, description="replace groups whose answers all have the same reward with other groups (DAPO)"
    )
    max_filter_rounds: Positive = Field(
        10,
        description=(
            "maximum number of sampling rounds to fill an iteration; training then uses the groups found so"
            " far"
        ),
    )
    filter_min_spread: float = Field(
        1e-6,
        ge=0,
        description=(
            "a group has no signal if its rewards, after standardising, clipping and penalties, differ by no"
            " more than this"
        ),
    )

    @check
    def _check_groups(self) -> Iterator[str]:
        is_of_groups = self.advantage_estimator in GROUP_ESTIMATORS
        if self.n_samples_per_prompt < 2 and (is_of_groups or self.dynamic_filtering):
            what = self.advantage_estimator if is_of_groups else "dynamic_filtering"
            yield f"{what} compares the answers to one prompt: set n_samples_per_prompt to 2 or more"

    def iterations(self, num_prompts: int) -> int:
        """Returns the number of iterations over `num_prompts` prompts. Raises ValueError if the prompts do
        not fill one iteration, or if `export_at` exceeds the number."""
        if num_prompts < self.rollout_batch_size:
            raise ValueError(
                f"ppo needs rollout_batch_size={self.rollout_batch_size} prompts, but the data has"
                f" {num_prompts}: lower it, or add prompts"
            )
        total = num_prompts // self.rollout_batch_size * self.num_episodes
        if self.max_steps:
            total = min(total, self.max_steps)
        if self.export_at and max(self.export_at) > total:
            raise ValueError(
                f"export_at names iteration {max(self.export_at)}, but the last iteration of this run is"
                f" {total}: lower it, or add prompts"
            )
        return total
