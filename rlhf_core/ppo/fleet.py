"""The five roles where they live: Ray groups with verbs. The PPO loop talks to this and knows no placement.

Verbs that concern several roles start all of them and wait once. Every wait has the recipe's `timeout` and names who was silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.cluster.group import Group, Pending, cpu_threads, share
from rlhf_core.cluster.placement import Room
from rlhf_core.config import PPO, Ranks, Vllm
from rlhf_core.data.documents import Document
from rlhf_core.engine.base import AdamW
from rlhf_core.ppo.roles import Actor, Critic, Model, Reference, Reward, Training, Update
from rlhf_core.ppo.types import Experience, Rollout, Scores
from rlhf_core.rollout.engine import Answer
from rlhf_core.rollout.role import SamplerRole

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # largest |log-prob difference| of vLLM and trainer on the same weights


class WeightsDiffer(RuntimeError):
    """After a weight sync the sampler's log-probs are not the trainer's."""


@dataclass(frozen=True)
class Fleet:
    """Handles of the running roles."""

    actor: Group
    critic: Group
    reference: Group
    reward: Group
    sampler: Group
    timeout: float
    dtype: str

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        n: int,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> list[list[Answer]]:
        """`n` answers to each prompt, in order."""
        pending = self.sampler.call(
            "generate", "generate", share(list(prompts)), list(seeds), temperature, max_new_tokens, list(stop_token_ids), n
        )
        return _in_order(pending.wait(self.timeout))

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """Four models read the same documents side by side; one wait."""
        documents = share([rollout.document for rollout in rollouts])
        pending = {
            "logprobs": self.actor.call("score", "logprobs", documents),
            "ref_logprobs": self.reference.call("score", "logprobs", documents),
            "values": self.critic.call("score", "values", documents),
            "rewards": self.reward.call("score", "scores", documents),
        }
        scored = {name: _in_order(work.wait(self.timeout)) for name, work in pending.items()}
        rewards = np.concatenate(scored.pop("rewards"))
        if not np.isfinite(rewards).all():
            raise ValueError(f"the reward model gave {int((~np.isfinite(rewards)).sum())} scores that are not finite: check its training")
        return Scores(**scored, rewards=rewards)

    def train(self, experience: Sequence[Experience], critic: Sequence[Update], actor: Sequence[Update]) -> list[dict[str, float]]:
        """Actor and critic train side by side; one dict of metrics per optimiser step. No actor updates: only the critic trains."""
        shared = share(list(experience))
        pending = [self.critic.call("train", "train", shared, list(critic))]
        if actor:
            pending.append(self.actor.call("train", "train", shared, list(actor)))
        by_role = [work.wait(self.timeout)[0] for work in pending]
        return [dict(pair for metrics in step for pair in metrics.items()) for step in zip(*by_role, strict=True)]

    def publish_weights(self) -> None:
        """Sends the actor's weights to every engine."""
        gathered = self.actor.call("gather weights", "weights")
        gathered.wait_ready(self.timeout)
        self.sampler.call("receive weights", "update", gathered.refs[0]).wait(self.timeout)

    def probe(self, documents: Sequence[Document]) -> float:
        """Largest |difference| of log-probs between engines and trainer on fixed documents. Raises WeightsDiffer beyond the tolerance."""
        trainer = self.actor.call("probe", "logprobs", list(documents), 1.0)
        engines = self.sampler.call("probe", "prompt_logprobs", [document.tokens for document in documents]).wait(self.timeout)
        expected = _in_order(trainer.wait(self.timeout))
        gap = max(float(np.abs(np.asarray(got) - want).max()) for engine in engines for got, want in zip(engine, expected, strict=True))
        check_gap(gap, PROBE_TOLERANCE[self.dtype])
        return gap

    def save_state(self, folder: Path) -> None:
        for group in (self.actor, self.critic):
            (folder / group.name).mkdir()
        pending = [group.call("save", "save_state", str(folder / group.name)) for group in (self.actor, self.critic)]
        for work in pending:
            work.wait(self.timeout)

    def load_state(self, folder: Path) -> None:
        pending = [group.call("resume", "load_state", str(folder / group.name)) for group in (self.actor, self.critic)]
        for work in pending:
            work.wait(self.timeout)

    def export_actor(self, folder: Path) -> None:
        self.actor.call("export", "export", str(folder)).wait(self.timeout)


def groups_of(config: PPO) -> dict[str, Ranks | Vllm]:
    """What each role asks of the cluster."""
    return {
        "actor": config.actor_ranks,
        "critic": config.critic_ranks,
        "reference": config.reference_ranks,
        "reward": config.reward_ranks,
        "sampler": config.vllm,
    }


def start_fleet(config: PPO, paths: Mapping[str, str], pad_token_id: int, seed: int, room: Room, trust_remote_code: bool) -> Fleet:
    """Starts all roles side by side and waits until each has loaded its model. `paths` gives each role's model."""
    # Sampling has the machine to itself; the others work two and two.
    groups = {name: Group(name, wanted, room, cpu_threads(1 if name == "sampler" else 2)) for name, wanted in groups_of(config).items()}
    adamw = AdamW(config.betas, config.weight_decay, config.max_norm)
    training = Training(adamw, config.zero_stage, config.micro_train_batch_size, config.gradient_checkpointing, config.timeout)

    def model(role: str) -> Model:
        return Model(paths[role], config.dtype, pad_token_id, config.micro_rollout_batch_size, trust_remote_code)

    loading: list[Pending] = [
        groups["sampler"].build(
            SamplerRole,
            config.timeout,
            model=paths["actor"],
            seed=seed,
            max_model_len=config.prompt_max_len + config.generate_max_len,
            dtype=config.dtype,
            kv_cache_gib=config.vllm.kv_cache_gib,
            gpu_memory_utilization=config.vllm.gpu_memory_utilization,
            trust_remote_code=trust_remote_code,
        ),
        groups["actor"].build(
            Actor, config.timeout, model=model("actor"), training=training, eps_clip=config.eps_clip, temperature=config.temperature
        ),
        groups["critic"].build(Critic, config.timeout, model=model("critic"), training=training, value_clip=config.value_clip),
        groups["reference"].build(Reference, config.timeout, model=model("reference"), temperature=config.temperature),
        groups["reward"].build(Reward, config.timeout, model=model("reward")),
    ]
    for pending in loading:
        print(f"waiting for {pending.role} to load {paths.get(pending.role, paths['actor'])}", flush=True)
        pending.wait(config.timeout)
    return Fleet(**groups, timeout=config.timeout, dtype=config.dtype)


def check_gap(gap: float, tolerance: float) -> None:
    """Raises WeightsDiffer when log-probs of engine and trainer differ by more than `tolerance` (or are nan)."""
    if not gap <= tolerance:
        raise WeightsDiffer(
            f"after a weight sync vLLM's log-probs differ from the trainer's by up to {gap:.3g} (allowed {tolerance:g}): "
            f"the engine does not hold the actor's weights"
        )


def _in_order(by_rank: list[list[tuple[int, Any]]]) -> list[Any]:
    """Joins the ranks' (index, value) shares into one list."""
    found = {index: value for share_of_rank in by_rank for index, value in share_of_rank}
    return [found[index] for index in range(len(found))]
