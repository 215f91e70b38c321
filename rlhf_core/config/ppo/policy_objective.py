"""Configures what the actor and critic learn: advantages, loss, policy ratio, clips and learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlhf_core.records import Config, Rate, Share, check

AdvantageEstimator = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: dict[str, Aggregation] = {"grpo": "sequence", "dr_grpo": "constant"}  # the others: "token"
# estimators that compare the answers to one prompt
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


class PolicyObjective(Config):
    """Fields of the actor and its objective. Only gae has a critic."""

    actor: str = Field("sft", description="model to train")
    critic: str | None = Field(
        None, description="value model, only for gae; default: it starts from the first reward model"
    )
    advantage_estimator: AdvantageEstimator = Field(
        "gae",
        description=(
            "gae: PPO with a critic; grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline: no critic is"
            " started"
        ),
    )
    loss_aggregation: Aggregation | None = Field(
        None,
        description=(
            "how the loss is averaged. token: over all tokens; sequence: per answer, then over answers;"
            " constant: sum over all tokens, divided by answers times generate_max_len; default: sequence for"
            " grpo, constant for dr_grpo, sequence for ratio sequence, else token"
        ),
    )
    policy_loss: Literal["clip", "cispo"] = Field(
        "clip",
        description=(
            "clip: PPO's clipped surrogate; cispo: the clipped ratio, without a gradient, weights the"
            " log-prob (MiniMax-M1, 2025)"
        ),
    )
    ratio: Literal["token", "sequence"] = Field(
        "token", description="policy ratio per token, or of the whole answer (sequence; GSPO)"
    )
    actor_learning_rate: Rate = Field(1e-6, description="peak learning rate of the actor")
    critic_learning_rate: Rate = Field(9e-6, description="peak learning rate of the critic")
    gamma: Share = Field(1.0, description="discount")
    lambd: Share = Field(0.95, description="GAE lambda")
    eps_clip: Rate = Field(0.2, description="clip range of the policy ratio, below and above 1")
    eps_clip_low: Rate | None = Field(None, description="clip range of the ratio below 1; default: eps_clip")
    eps_clip_high: Rate | None = Field(
        None, description="clip range of the ratio above 1 (clip-higher, DAPO); default: eps_clip"
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="bound of the objective for negative advantages (Ye et al. 2020); default: none",
    )
    entropy_coef: float = Field(0.0, ge=0, description="coefficient of the entropy bonus")
    value_clip: Rate | None = Field(
        0.2,
        description=(
            "how far the critic's values may move in an iteration before the loss clips them, in standard"
            " deviations of the iteration's returns (in units of reward if all returns are equal); null: no"
            " limit, for a critic that lags behind"
        ),
    )
    whiten_advantages: bool = Field(
        True,
        description=(
            "whiten the advantages of gae and reinforce_pp to mean 0 and std 1 over the whole rollout"
            " (reinforce_pp_baseline: always; other group estimators: never)"
        ),
    )
    freezing_actor_steps: int = Field(
        0, ge=0, description="number of iterations at the start that train only the critic"
    )

    @property
    def peak_rate(self) -> float:
        return self.actor_learning_rate

    @property
    def has_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    @property
    def aggregation(self) -> Aggregation:
        """The configured aggregation of the loss, or the default for the ratio and estimator."""
        if self.loss_aggregation:
            return self.loss_aggregation
        if self.ratio == "sequence":
            return "sequence"
        return AGGREGATIONS.get(self.advantage_estimator, "token")

    @property
    def clips(self) -> tuple[float, float]:
        """How far the policy ratio may go below 1 and above 1."""
        return self.eps_clip_low or self.eps_clip, self.eps_clip_high or self.eps_clip

    @check
    def _check_critic(self) -> Iterator[str]:
        if not self.has_critic and (self.critic is not None or self.freezing_actor_steps):
            yield (
                f"{self.advantage_estimator} has no critic: leave out critic and freezing_actor_steps, or set"
                " advantage_estimator to gae"
            )

    @check
    def _check_policy_loss(self) -> Iterator[str]:
        if self.policy_loss == "cispo" and (self.dual_clip is not None or self.ratio == "sequence"):
            yield (
                "cispo weights each token's log-prob: leave out dual_clip and ratio, or set policy_loss to"
                " clip"
            )
