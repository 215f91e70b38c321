"""Combines all groups of fields of PPO and its critic-free relatives, and checks them across groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rlhf_core.config.ppo.kl_penalty import KLPenalty
from rlhf_core.config.ppo.model_placement import ModelPlacement, gives_logprobs
from rlhf_core.config.ppo.policy_objective import PolicyObjective
from rlhf_core.config.ppo.reward_shaping import RewardShaping
from rlhf_core.config.ppo.rollout_batches import RolloutBatches
from rlhf_core.config.ppo.sampler_gap import SamplerGap
from rlhf_core.config.ppo.update_limits import UpdateLimits
from rlhf_core.config.ppo.validation_fields import ValidationFields
from rlhf_core.config.rewarding.verifiers import VerifierReward
from rlhf_core.config.rewards import NoReward
from rlhf_core.config.sampled.rewarded_sampling import Rewarded
from rlhf_core.config.training.lora_fields import adapter_mistakes
from rlhf_core.config.training.optimised import Optimised
from rlhf_core.config.training.pass_size import PassSize, pass_size
from rlhf_core.config.training.trainable import TrainedPolicy
from rlhf_core.records import check


class PPO(
    ModelPlacement,
    ValidationFields,
    SamplerGap,
    RolloutBatches,
    RewardShaping,
    KLPenalty,
    PolicyObjective,
    UpdateLimits,
    Optimised,
    Rewarded,
    TrainedPolicy,
):
    """Proximal policy optimisation (Schulman et al. 2017) and its critic-free relatives. Each model runs on
    its own Ray group; vLLM generates the rollouts."""

    stage: Literal["ppo"] = "ppo"

    @property
    def answering(self) -> Sequence[tuple[str, str]]:
        return [("actor", self.actor)]

    @property
    def exports(self) -> Sequence[str]:
        return [*(f"iteration{number}" for number in self.export_at), *super().exports]

    def loads(self, place: str) -> bool:
        """Returns whether the stage trains or scores with the model at `place`. A judge's model is loaded by
        its engine."""
        return place not in {name for name, _, _ in self.nested_names}

    @property
    def longest(self) -> int:
        return self.prompt_max_len + self.generate_max_len

    @property
    def scoring_pass(self) -> PassSize:
        return pass_size(
            self.micro_rollout_batch_size,
            self.micro_rollout_tokens,
            self.longest,
            self.sequence_parallel_size,
        )

    def dtype_in(self, role: str) -> str:
        """Returns the dtype of a role's model. float16 is used only for models whose log-probs are compared;
        the other models use bfloat16, which needs no loss scale."""
        return self.dtype if gives_logprobs(role) or self.dtype != "float16" else "bfloat16"

    @property
    def scorings(self) -> dict[str, float]:
        """The number of times each group scores an answer of an iteration, if reference and teachers have
        equal shares of the answers."""
        names = ("", *self.teachers)
        return self.scorings_by(dict.fromkeys(names, 1 / len(names)))

    def scorings_by(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Returns the number of times each group scores an answer, for known shares of the answers by teacher
        name ("" for the reference)."""
        found: dict[str, float] = dict.fromkeys(self.groups, 1)
        found["actor"] = self.scores_actor + self.reference_in_actor * shares[""]
        if "reference" in found:
            found["reference"] = shares[""]
        return found | {f"teacher:{name}": shares[name] for name in self.teachers}

    @property
    def scores_actor(self) -> bool:
        """Whether the actor computes log-probs of the answers before it trains on them."""
        return not self.one_update and self.sampler_is != "in_ratio"

    @property
    def continuous(self) -> bool:
        """Whether engines answer without pausing, across weight updates."""
        return self.max_staleness > 1 or (self.max_staleness == 1 and self.dynamic_filtering)

    @property
    def one_ahead(self) -> bool:
        """Whether engines already answer the prompts of the next iteration, but finish before the weights
        change."""
        return self.max_staleness == 1 and not self.continuous

    @property
    def one_update(self) -> bool:
        """Whether an iteration is one on-policy optimiser step that needs no log-probs beforehand, neither
        for rewards nor for masking tokens. If so, the log-probs come from the training pass."""
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        steps = self.max_epochs * (samples // self.train_batch_size)
        needed = (self.kl_in == "reward" and self.has_reference) or self.sampler_is == "mask"
        trains = not self.rollouts_only
        return steps == 1 and trains and not self.freezing_actor_steps and not needed

    @property
    def right_from(self) -> float | None:
        """The minimum reward of a right answer, for a curriculum: the recipe's, or the highest sum that the
        verifiers give. None if neither is known."""
        if self.curriculum is not None and self.curriculum.right is not None:
            return self.curriculum.right
        if all(isinstance(source, VerifierReward) and source.weight > 0 for source in self.reward):
            return sum(source.weight for source in self.reward)
        return None

    @check
    def _check_curriculum(self) -> Iterator[str]:
        """Yields a sentence if a curriculum cannot tell from the reward alone whether an answer is right."""
        if self.curriculum is None:
            return
        if not self.has_reward:
            yield "curriculum counts right answers, but reward is none: leave one of them out"
        elif self.compares_group:
            yield (
                "curriculum counts right answers, but compare: group gives every group of answers a mean of"
                " 0.5: leave curriculum out, or compare with a reference"
            )
        elif self.right_from is None:
            yield (
                "curriculum counts right answers, but only verifiers of positive weight define them: set"
                " curriculum.right to the minimum reward of a right answer"
            )

    @check
    def _check_reward(self) -> Iterator[str]:
        if any(isinstance(source, NoReward) for source in self.reward):
            paid = self.kl_in == "reward" or self.teacher_top_k is not None
            learns_from_kl = self.reference is not None and paid and self.init_kl_coef
            if not learns_from_kl or len(self.reward) > 1:
                yield (
                    "reward none learns only from the KL to a teacher: set reference to the teacher,"
                    " init_kl_coef to 1 and kl_in to reward (with teacher_top_k: to loss), and name no other"
                    " reward"
                )
            if self.eval_prompts is not None or self.dynamic_filtering:
                yield "eval_prompts and dynamic_filtering compare rewards, but reward is none: leave them out"
        if self.bootstrap_truncated and self.dynamic_filtering:
            yield (
                "dynamic_filtering compares rewards before the critic's values are known, but"
                " bootstrap_truncated replaces rewards with these values: leave one of them out"
            )
        if self.has_critic and self.freeze is not None and "*" in self.freeze.names:
            yield (
                "freeze: {names: '*'} leaves the critic no weight to train: use an estimator without"
                " a critic, such as grpo, or freeze fewer weights"
            )
        if self.has_critic and self.critic is None and not self.reward_models:
            yield (
                "gae needs a critic, but there is no reward model to start it from: set critic, or a"
                " critic-free estimator"
            )

    @check
    def _check_teacher(self) -> Iterator[str]:
        """Yields a sentence if the teacher is the actor itself, or if the distributions are not
        comparable."""
        if self.teacher_top_k is None:
            return
        if self.reference_in_actor:
            yield (
                f"teacher_top_k needs a teacher, but with lora the reference {self.reference} is the actor"
                " without its adapters: set reference to another model, or leave teacher_top_k out"
            )
        if self.top_p < 1 or self.top_k:
            yield (
                "teacher_top_k compares whole distributions, but top_p and top_k truncate those that answers"
                " are sampled from: leave out top_p and top_k"
            )

    @check
    def _check_compared(self) -> Iterator[str]:
        """Yields a sentence for judges that compare answers, if the answers have no common prompt or the
        rewards no meaningful mean."""
        yield from self.group_mistakes(self.n_samples_per_prompt)
        if not self.compares_group:
            return
        if self.talks_to:
            yield (
                "compare: group compares the answers to one prompt, but the episodes of an environment"
                " diverge: leave it out"
            )
        if self.eval_prompts is not None:
            yield (
                "compare: group gives every group of answers a mean reward of 0.5, so a validation shows"
                " nothing: leave out eval_prompts, or compare with a reference"
            )

    @check
    def _check_own_judges(self) -> Iterator[str]:
        for judge in self.own_judges:
            if judge.model.engine.sleep and self.dynamic_filtering:
                yield (
                    f"dynamic_filtering uses the judge {judge.title} while the engines hold the GPUs that"
                    " they would share: leave out the judge's engine.sleep, so that it gets its own GPUs"
                )

    @check
    def _check_sampling(self) -> Iterator[str]:
        if self.temperature == 0:
            yield (
                "temperature=0 gives the same answer every time, so there is nothing to compare: set it above"
                " 0, usually to 1"
            )
        if self.ratio == "sequence" and self.sampler_is == "mask" and self.sampler_is_level == "token":
            yield (
                "sampler_is mask leaves out single tokens, but ratio sequence covers whole answers: set"
                " sampler_is_level to geometric or sequence"
            )
        if self.sampler_is == "in_ratio" and self.stop_kl is not None:
            yield (
                "stop_kl limits the KL to the policy at the iteration's start, but with sampler_is in_ratio"
                " the KL is measured to the sampler: leave out stop_kl, or set sampler_is to truncate"
            )
        if self.talks_to and self.stream_batch_size:
            yield (
                "stream_batch_size scores answers one by one as they finish, but an environment's answers"
                " belong to episodes: leave it out"
            )
        held_out = self.eval_prompts
        if self.talks_to and held_out is not None:
            if held_out.template_args != self.prompts.template_args:
                yield (
                    "an environment writes later turns with the template_args of prompts, but eval_prompts"
                    " has different ones: make them equal"
                )
        if self.stop_when is not None and self.export_at:
            yield (
                f"stop_when may end the stage before iteration {max(self.export_at)}, which export_at names:"
                " leave one of them out"
            )

    @check
    def _check_overlap(self) -> Iterator[str]:
        for field, what in (("max_staleness", "trains"), ("stream_batch_size", "scores")):
            if not getattr(self, field):
                continue
            if self.colocate_all or self.engine.sleep:
                yield (
                    f"{field} {what} while engines generate, so they need GPUs of their own: leave out"
                    f" colocate_all and engine.sleep, or {field}"
                )
        if self.continuous and not self.engine.abilities.interrupts:
            yield (
                f"max_staleness {'with dynamic_filtering' if self.dynamic_filtering else 'above 1'} changes"
                f" weights between two tokens of an answer, and engine.kind is {self.engine.kind}, which"
                f" finishes its answers first: set max_staleness to {0 if self.dynamic_filtering else 1}"
            )
        if self.max_staleness and self.dynamic_filtering and self.colocate_critic_reward:
            yield (
                "dynamic_filtering with max_staleness scores answers while the critic trains, so the reward"
                " model needs GPUs of its own: leave out colocate_critic_reward"
            )

    @check
    def _check_batches(self) -> Iterator[str]:
        yield from adapter_mistakes(self.engine, self.lora, self.dtype)
        yield from self.batch_mistakes()
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        if samples % self.train_batch_size:
            yield (
                f"rollout_batch_size x n_samples_per_prompt = {samples} must be a multiple of"
                f" train_batch_size={self.train_batch_size}: a rollout is split into whole optimiser steps"
            )
