"""Configures the processes of each model, which models share GPUs, and what stays in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhf_core.config.ppo.debugging_fields import DebuggingFields
from rlhf_core.config.ppo.kl_penalty import KLPenalty
from rlhf_core.config.ppo.policy_objective import PolicyObjective
from rlhf_core.config.process_groups import Groups, Wanted, check_together
from rlhf_core.config.sampled.rewarded_sampling import Rewarded
from rlhf_core.config.training.optimised import Optimised
from rlhf_core.records import NotInDigest, Positive, Ranks, check


def gives_logprobs(role: str) -> bool:
    """Returns whether a group's model gives log-probs over the vocabulary, as actor, reference and teachers
    do. The other models give one value per token or answer."""
    return role in ("actor", "reference") or role.startswith("teacher:")


class ModelPlacement(DebuggingFields, KLPenalty, PolicyObjective, Optimised, Rewarded):
    """Fields for the ranks of each model, and the GPUs and memory that they share. None of them affects the
    result."""

    timeout: Annotated[Positive, NotInDigest] = Field(
        600,
        description=(
            "time in seconds that a rank may make no progress (passes, tokens, weights, bytes of files)"
            " before the run stops and names the rank"
        ),
    )
    actor_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    critic_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    reference_ranks: Annotated[Ranks, NotInDigest] = Field(
        Ranks(),
        description=(
            "unused with `lora` if the reference is the actor's starting model, because the actor without its"
            " adapters then serves as reference"
        ),
    )
    reward_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    colocate_actor_ref: Annotated[bool, NotInDigest] = Field(
        False, description="actor, reference and teachers share GPUs, rank by rank"
    )
    colocate_critic_reward: Annotated[bool, NotInDigest] = Field(
        False, description="critic and reward models share GPUs, rank by rank"
    )
    colocate_all: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "all models and the engines share the same GPUs, rank by rank; usually set with engine.sleep. A"
            " judge on engines shares them only if its own engine sleeps"
        ),
    )
    ref_reward_offload: Annotated[bool, NotInDigest] = Field(
        False,
        description="keep reference, teachers and reward models in host memory while they are not scoring",
    )
    ref_reward_shard: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "shard reference, teachers and reward models over their ranks (ZeRO-3), which fetch one layer at"
            " a time while they score"
        ),
    )
    adam_offload: Annotated[tuple[Literal["actor", "critic"], ...], NotInDigest] = Field(
        (),
        description=(
            "roles whose optimiser states are kept in host memory and whose optimiser steps run on the CPU;"
            " true: actor and critic"
        ),
    )
    param_offload: Annotated[tuple[Literal["actor", "critic"], ...], NotInDigest] = Field(
        (),
        description=(
            "roles whose weight shards, under ZeRO-3, are kept in host memory and moved to the GPU one layer"
            " at a time"
        ),
    )

    @field_validator("adam_offload", "param_offload", mode="before")
    @classmethod
    def _both(cls, value: object) -> object:
        if isinstance(value, bool):
            return ("actor", "critic") if value else ()
        return value

    @property
    def trained_ranks(self) -> dict[str, Ranks]:
        if self.has_critic:
            return {"actor_ranks": self.actor_ranks, "critic_ranks": self.critic_ranks}
        return {"actor_ranks": self.actor_ranks}

    def offloaded(self, what: Literal["adam", "param"]) -> tuple[str, ...]:
        return self.adam_offload if what == "adam" else self.param_offload

    @property
    def reference_in_actor(self) -> bool:
        """Whether the actor without its adapters serves as reference, because both start from the same model,
        whose weights are frozen."""
        return self.has_reference and self.lora is not None and self.reference in (None, self.actor)

    @property
    def groups(self) -> dict[str, Ranks]:
        """The processes of each model. Reward models are named `reward:<title>`, teachers
        `teacher:<name>`."""
        groups = {"actor": self.actor_ranks}
        if self.has_critic:
            groups["critic"] = self.critic_ranks
        if self.has_reference and not self.reference_in_actor:
            groups["reference"] = self.reference_ranks
        for name, teacher in self.teachers.items():
            groups[f"teacher:{name}"] = teacher.ranks or self.reference_ranks
        for source in self.reward_models if self.has_engines else ():
            groups[f"reward:{source.title}"] = source.ranks or self.reward_ranks
        return groups

    def sharing_of(self, role: str) -> int:
        """Returns how many ranks of a group compute each pass together: 1 for a read-only model whose number
        of ranks `sequence_parallel_size` does not divide."""
        if self.groups[role].world_size % self.sequence_parallel_size:
            return 1
        return self.sequence_parallel_size

    @property
    def read_names(self) -> dict[str, str]:
        """The model names of reference, teachers and reward models, by group."""
        names = {"reference": self.reference or self.actor} if "reference" in self.groups else {}
        names |= {f"teacher:{name}": teacher.model for name, teacher in self.teachers.items()}
        return names | {f"reward:{source.title}": source.model for source in self.reward_models}

    @property
    def placed(self) -> dict[str, Wanted]:
        """All groups, including the engines as `sampler` (if there are any) and the engines of each judge."""
        if not self.has_engines:
            return {**self.groups}
        judges = {judge.group: judge.model.engine for judge in self.own_judges}
        return {**self.groups, "sampler": self.engine, **judges}

    @property
    def turns(self) -> Sequence[Groups]:
        return [self.placed]

    @property
    def read_only(self) -> list[str]:
        """The groups whose models are not trained."""
        return [name for name in self.groups if name not in ("actor", "critic")]

    @property
    def together(self) -> list[list[str]]:
        if self.colocate_all:
            apart = {judge.group for judge in self.own_judges if not judge.model.engine.sleep}
            return [[name for name in self.placed if name not in apart]]
        sharing = []
        beside_actor = [name for name in self.groups if gives_logprobs(name)]
        if self.colocate_actor_ref and len(beside_actor) > 1:
            sharing.append(beside_actor)
        if self.colocate_critic_reward:
            sharing.append([name for name in self.groups if name == "critic" or name.startswith("reward:")])
        return sharing

    @check
    def _check_reset(self) -> Iterator[str]:
        if self.reset_reference_every is None:
            return
        if not self.has_reference:
            yield (
                "reset_reference_every needs a reference, but without a KL none is loaded: set init_kl_coef"
                " above 0, or leave it out"
            )
        elif self.reference not in (None, self.actor):
            yield (
                "reset_reference_every resets the reference to the actor's weights, but reference names"
                f" {self.reference}: leave one of them out"
            )
        elif self.reference_in_actor:
            yield (
                "reset_reference_every resets the reference to the actor's weights, but with lora the"
                " reference is the actor without its adapters: leave one of them out"
            )
        if self.ref_reward_shard:
            yield (
                "reset_reference_every needs a reference that is whole on each rank, but ref_reward_shard"
                " shards it: leave one of them out"
            )

    @check
    def _check_placement(self) -> Iterator[str]:
        if self.colocate_critic_reward and not (self.has_critic and self.reward_models):
            yield "colocate_critic_reward needs a critic and a reward model: leave it out"
        offloads: dict[str, Sequence[str]] = {
            "adam_offload": self.adam_offload,
            "param_offload": self.param_offload,
            "ref_reward_offload": [
                name for name in self.read_only if self.ref_reward_offload and gives_logprobs(name)
            ],
        }
        for field, roles in offloads.items():
            without = [role for role in roles if role in self.groups and not self.groups[role].gpus]
            if without:
                yield (
                    f"{field} frees a GPU's memory, but these groups have no GPU: {', '.join(without)}: set"
                    " gpus of their ranks"
                )
        if self.ref_reward_shard and self.ref_reward_offload:
            yield (
                "ref_reward_shard and ref_reward_offload are two ways to free the same memory: set one of"
                " them"
            )
        alone = [name for name in self.read_only if self.groups[name].world_size == 1]
        if self.ref_reward_shard and alone:
            yield (
                "ref_reward_shard shards a model over its ranks, but these groups have one rank:"
                f" {', '.join(alone)}: leave it out"
            )
        for names in self.together:
            check_together({name: self.placed[name] for name in names})
