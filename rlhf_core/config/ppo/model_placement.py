"""The processes of each model, which of them share GPUs, and what waits in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhf_core.config.loop_kinds import Rewarded
from rlhf_core.config.ppo.debugging_fields import DebuggingFields
from rlhf_core.config.ppo.kl_penalty import KLPenalty
from rlhf_core.config.ppo.policy_objective import PolicyObjective
from rlhf_core.config.process_groups import Groups, Wanted, check_together
from rlhf_core.config.training.optimised import Optimised
from rlhf_core.records import NotInDigest, Positive, Ranks, check


def gives_logprobs(role: str) -> bool:
    """Returns whether a group's model gives log-probs over the vocabulary: actor, reference and teachers. The
    others give one value per token or answer."""
    return role in ("actor", "reference") or role.startswith("teacher:")


class ModelPlacement(DebuggingFields, KLPenalty, PolicyObjective, Optimised, Rewarded):
    """The ranks of each model, and the GPUs and memory that they share. None of it affects the result."""

    timeout: Annotated[Positive, NotInDigest] = Field(
        600,
        description=(
            "seconds that any rank may go without progress (passes, tokens, weights, bytes of files) before"
            " the run stops and names it"
        ),
    )
    actor_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    critic_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    reference_ranks: Annotated[Ranks, NotInDigest] = Field(
        Ranks(),
        description=(
            "unused with `lora` where the reference is the actor's starting model: it is the actor without"
            " adapters then"
        ),
    )
    reward_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    colocate_actor_ref: Annotated[bool, NotInDigest] = Field(
        False, description="actor, reference and teachers share their GPUs, rank by rank"
    )
    colocate_critic_reward: Annotated[bool, NotInDigest] = Field(
        False, description="critic and reward models share their GPUs, rank by rank"
    )
    colocate_all: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "all models and the engines share the same GPUs, rank by rank; usually with engine.sleep. A judge"
            " on engines does so only if its own engine sleeps"
        ),
    )
    ref_reward_offload: Annotated[bool, NotInDigest] = Field(
        False, description="reference, teachers and reward models are in host memory while they do not score"
    )
    ref_reward_shard: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "reference, teachers and reward models are cut over their ranks (ZeRO-3), which fetch a layer at"
            " a time while they score"
        ),
    )
    adam_offload: Annotated[tuple[Literal["actor", "critic"], ...], NotInDigest] = Field(
        (),
        description=(
            "these roles' optimiser states are in host memory, where their steps run; true: actor and critic"
        ),
    )
    param_offload: Annotated[tuple[Literal["actor", "critic"], ...], NotInDigest] = Field(
        (),
        description=(
            "these roles' shards of the weights, under ZeRO-3, are in host memory; a layer at a time goes to"
            " the GPU"
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
        """Whether the reference is the actor without its adapters: both start from the same model, whose
        weights are frozen."""
        return self.has_reference and self.lora is not None and self.reference in (None, self.actor)

    @property
    def groups(self) -> dict[str, Ranks]:
        """The processes of each model; reward models are called `reward:<title>`, teachers
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
        """The names of reference, teachers and reward models by their groups."""
        names = {"reference": self.reference or self.actor} if "reference" in self.groups else {}
        names |= {f"teacher:{name}": teacher.model for name, teacher in self.teachers.items()}
        return names | {f"reward:{source.title}": source.model for source in self.reward_models}

    @property
    def placed(self) -> dict[str, Wanted]:
        """All groups, including the engines as `sampler` if there are any, and those of each judge."""
        if not self.has_engines:
            return {**self.groups}
        judges = {judge.group: judge.model.engine for judge in self.own_judges}
        return {**self.groups, "sampler": self.engine, **judges}

    @property
    def turns(self) -> Sequence[Groups]:
        return [self.placed]

    @property
    def read_only(self) -> list[str]:
        """The groups of models that are not trained."""
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
                "reset_reference_every gives the reference new weights, and without a KL there is none: set"
                " init_kl_coef above 0, or leave it out"
            )
        elif self.reference not in (None, self.actor):
            yield (
                "reset_reference_every gives the reference the actor's weights, and reference names"
                f" {self.reference}: leave one of them out"
            )
        elif self.reference_in_actor:
            yield (
                "reset_reference_every gives the reference the actor's weights, and with lora it is the actor"
                " without its adapters: leave one of them out"
            )
        if self.ref_reward_shard:
            yield (
                "reset_reference_every gives new weights to a reference that is whole on each rank: leave it"
                " or ref_reward_shard out"
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
                    f"{field} frees a GPU's memory, and these have none: {', '.join(without)}: set gpus of"
                    " their ranks"
                )
        if self.ref_reward_shard and self.ref_reward_offload:
            yield (
                "ref_reward_shard and ref_reward_offload are two ways to free the same memory: set one of"
                " them"
            )
        alone = [name for name in self.read_only if self.groups[name].world_size == 1]
        if self.ref_reward_shard and alone:
            yield (
                f"ref_reward_shard cuts a model over its ranks, and these have one: {', '.join(alone)}: leave"
                " it out"
            )
        for names in self.together:
            check_together({name: self.placed[name] for name in names})
