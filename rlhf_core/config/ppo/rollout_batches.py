"""How many prompts and answers an iteration has, which of them are trained on, and the number of
iterations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rlhf_core.config.ppo.curriculum_fields import Curriculum
from rlhf_core.config.ppo.policy_objective import GROUP_ESTIMATORS, PolicyObjective
from rlhf_core.records import InDigestIfSet, NotInDigest, Positive, check


class RolloutBatches(PolicyObjective):
    """Sizes of an iteration, the choice of its prompts, and the filter of groups without a signal."""

    rollout_batch_size: Positive = Field(512, description="prompts of one iteration")
    n_samples_per_prompt: Positive = Field(1, description="answers per prompt")
    micro_rollout_tokens: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "tokens of one scoring pass on one rank, in place of micro_rollout_batch_size; as"
            " micro_train_tokens"
        ),
    )
    num_episodes: Positive = Field(1, description="passes over the prompts")
    max_steps: Positive | None = Field(None, description="stop after this many iterations")
    export_at: tuple[Positive, ...] = Field(
        (),
        description=(
            "iterations after which the actor is also exported as a model, which other stages name"
            " STAGE.iterationN"
        ),
    )
    curriculum: Annotated[Curriculum | None, InDigestIfSet] = Field(
        None,
        description=(
            "draws prompts by their pass rate ({}: by learnability), as often as num_episodes passes would;"
            " default: each pass has every prompt once"
        ),
    )
    dynamic_filtering: bool = Field(
        False, description="groups whose answers all have the same reward are replaced by others (DAPO)"
    )
    max_filter_rounds: Positive = Field(
        10, description="rounds of sampling to fill an iteration; what is there then is trained on"
    )
    filter_min_spread: float = Field(
        1e-6,
        ge=0,
        description=(
            "a group has no signal when its rewards, standardised, clipped and with penalties, differ by no"
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
        """Returns the number of iterations over `num_prompts` prompts. Raises ValueError if there is none, or
        if `export_at` is past the last."""
        if num_prompts < self.rollout_batch_size:
            raise ValueError(
                f"ppo needs rollout_batch_size={self.rollout_batch_size} prompts, the data has {num_prompts}:"
                " lower it or add prompts"
            )
        total = num_prompts // self.rollout_batch_size * self.num_episodes
        if self.max_steps:
            total = min(total, self.max_steps)
        if self.export_at and max(self.export_at) > total:
            raise ValueError(
                f"export_at names iteration {max(self.export_at)}, and this run has {total}: lower it, or"
                " give more prompts"
            )
        return total
