"""The roles where they live: Ray groups with verbs, and the reward sources outside. The PPO loop talks to this and knows no placement.

Verbs that concern several roles start all of them and wait once. Every wait has the recipe's `timeout` and names the silent ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.cluster.worker_group import Group, Pending, Up, share, wait_all
from rlhf_core.config import PPO
from rlhf_core.config.rewards import ModelReward
from rlhf_core.data.documents import Document
from rlhf_core.objectives.actor_loss import Objective
from rlhf_core.rewards.asking import Outside, Rewards, asker, collect
from rlhf_core.rewards.contract import Sample
from rlhf_core.rollout.engine import Answer
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.rollout.weight_transfer import Rendezvous, choose_route
from rlhf_core.stages.ppo.probe import PROBE_TOLERANCE, check_gap
from rlhf_core.stages.ppo.records import Experience, Rollout, Scores
from rlhf_core.stages.ppo.roles import Actor, Critic, Model, Reference, Reward, Training, Update
from rlhf_core.stages.ppo.roofline import Machine, floors
from rlhf_core.stages.ppo.zero_choice import zero_stage_of
from rlhf_core.training.engine import AdamW

COLLECTIVE_SECONDS = 24 * 3600  # ranks may wait in a barrier while one writes: the wait for the group knows which of them is silent


@dataclass(frozen=True)
class Fleet:
    """Handles of the running roles. `rewards` holds a group for each reward model by its title; `outside` functions and servers.

    `in_turn`: actor and critic share their GPUs, and train one after the other: each has the memory for larger passes, and no
    collective of one waits on a GPU that computes for the other.
    """

    actor: Group
    critic: Group | None
    reference: Group
    rewards: Mapping[str, Group]
    sampler: Group
    outside: Outside
    decode: Callable[[Sequence[int], bool], str]
    timeout: float
    dtype: str
    sleeps: bool = False
    in_turn: bool = False
    zero_stage: int = 3
    machine: Machine | None = None  # once it has looked around

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
        return self.ask(prompts, seeds, n, temperature, max_new_tokens, stop_token_ids)()

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        n: int,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Callable[[], list[list[Answer]]]:
        """Lets the engines begin; what is returned waits for the answers, as `sample` gives them."""
        pending = self.sampler.call(
            "generate", "generate", share(list(prompts)), list(seeds), temperature, max_new_tokens, list(stop_token_ids), n
        )
        return lambda: _in_order(pending.wait(self.timeout))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        n: int,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Iterator[tuple[int, list[Answer]]]:
        """The answers of `sample`, prompt by prompt in the order in which engines finish them, each with the prompt's index."""
        how = (share(list(prompts)), list(seeds), temperature, max_new_tokens, list(stop_token_ids), n)
        return self.sampler.stream("generate", "stream", self.timeout, *how)

    def score(self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int) -> Scores:
        """All models read the same documents side by side, and the sources outside are called; one wait. Rewards already known stay."""
        return self.start_score(rollouts, rewards, allowed_failures)()

    def start_score(self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int) -> Callable[[], Scores]:
        """Lets all begin; what is returned waits for the scores."""
        documents = share([rollout.document for rollout in rollouts])
        pending = {"logprobs": self.actor.call("score", "logprobs", documents)}
        pending["ref_logprobs"] = self.reference.call("score", "logprobs", documents)
        if self.critic is not None:
            pending["values"] = self.critic.call("score", "values", documents)
        pending_rewards = None if rewards is not None else self._start_reward(rollouts, documents, allowed_failures)

        def wait() -> Scores:
            known = pending_rewards() if pending_rewards is not None else rewards
            assert known is not None
            scored = {name: _in_order(work.wait(self.timeout)) for name, work in pending.items()}
            values = scored.pop("values", None) or [np.zeros(len(rollout.document), np.float32) for rollout in rollouts]
            return Scores(**scored, values=values, rewards=known)

        return wait

    def reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards:
        """Rewards of all sources. Raises RewardsFailed when one leaves more than `allowed_failures` answers without."""
        return self._start_reward(rollouts, share([rollout.document for rollout in rollouts]), allowed_failures)()

    def _start_reward(self, rollouts: Sequence[Rollout], documents: Any, allowed: int) -> Callable[[], Rewards]:
        models = {title: group.call("score", "scores", documents) for title, group in self.rewards.items()}  # all start, then one wait
        pending_rewards = self.outside.start([self._sample(rollout) for rollout in rollouts], allowed) if self.outside else {}

        def wait() -> Rewards:
            scored = ((title, np.concatenate(_in_order(pending.wait(self.timeout)))) for title, pending in models.items())
            return collect(scored, pending_rewards, allowed)

        return wait

    def _sample(self, rollout: Rollout) -> Sample:
        tokens, mask = rollout.document.tokens, rollout.document.mask
        answer = self.decode([token for token, is_answer in zip(tokens, mask, strict=True) if is_answer], True)
        return Sample(rollout.prompt.messages, answer, rollout.prompt.row, rollout.finished, self.decode(tokens, False))

    def train(self, experience: Sequence[Experience], updates: Mapping[str, Sequence[Update]]) -> list[dict[str, float]]:
        """The roles named in `updates` train, side by side or in turn; one dict of metrics per optimiser step."""
        shared = share(list(experience))
        groups = [group for group in self.trained if group.name in updates]

        def start(group: Group) -> Pending:
            if self.in_turn:
                self._release_memory()
            return group.call("train", "train", shared, list(updates[group.name]))

        if self.in_turn:
            by_role = [start(group).wait(self.timeout)[0] for group in groups]
        else:
            by_role = [work.wait(self.timeout)[0] for work in [start(group) for group in groups]]
        return [dict(pair for metrics in step for pair in metrics.items()) for step in zip(*by_role, strict=True)]

    @property
    def trained(self) -> list[Group]:
        """The groups that have an optimiser."""
        return [self.actor] if self.critic is None else [self.critic, self.actor]

    def trained_parameters(self) -> int:
        """Of all groups that have an optimiser."""
        assert self.machine is not None, "it has looked around"
        width = 2 if self.dtype == "bfloat16" else 4
        return sum(self.machine.shapes[group.name].weight_bytes // width for group in self.trained)

    def sleep(self, keep_weights: bool) -> None:
        """The engines leave their GPUs to the models, with their weights unless `publish_weights` follows on `wake`."""
        self.sampler.call("sleep", "sleep", keep_weights).wait(self.timeout)

    def wake(self) -> None:
        """The models leave what they do not use to the engines, which come back."""
        self._release_memory()
        self.sampler.call("wake", "wake").wait(self.timeout)

    def _release_memory(self) -> None:
        """What only the allocators of the models' processes hold is free for others on their GPUs."""
        wait_all([group.call("release memory", "release") for group in self.groups if group is not self.sampler], self.timeout)

    def open_channel(self) -> None:
        """Opens the route that weights take, once. By handles where engines share the actor's GPUs, else by NCCL or host memory."""
        by_engine: list[list[str | None]] = self.sampler.call("start", "cards").wait(self.timeout)
        engines, trainer = [card for cards in by_engine for card in cards], self.actor.call("start", "card").wait(self.timeout)
        route = choose_route(trainer, engines)
        key = secrets.token_bytes(16)
        sockets = self.actor.call("start", "open_listener", key).wait(self.timeout) if route.kind == "cards" else []
        rendezvous = Rendezvous(
            self.actor.address(route.source, self.timeout), dict(zip(trainer, sockets, strict=False)), key, self.timeout
        )
        opening = [
            self.actor.call("open the weight channel", "open_channel", route, rendezvous, [engines.count(card) for card in trainer]),
            self.sampler.call("open the weight channel", "open_channel", route, rendezvous),
        ]
        wait_all(opening, self.timeout)
        print(f"weights go to {len(engines)} engine processes by {route.kind}", flush=True)

    def publish_weights(self) -> None:
        """The actor's weights to every engine."""
        wait_all([self.actor.call("send weights", "send_weights"), self.sampler.call("receive weights", "receive_weights")], self.timeout)

    def probe(self, documents: Sequence[Document], synced: bool = True) -> float:
        """Largest |difference| of log-probs between engines and trainer on fixed documents.

        Raises WeightsDiffer beyond the tolerance; EngineDiffers where they still have the weights that each has loaded (not `synced`).

        Experts are chosen by products that engine and trainer round in bf16 in different orders: a token now and then meets another one,
        and its log-prob may be a nat away. There a model with experts is held to the tolerance at nine of ten tokens.
        """
        trainer = self.actor.call("probe", "logprobs", list(documents), 1.0)
        engines = self.sampler.call("probe", "prompt_logprobs", [document.tokens for document in documents]).wait(self.timeout)
        expected = _in_order(trainer.wait(self.timeout))
        pairs = [pair for engine in engines for pair in zip(engine, expected, strict=True)]
        gaps = np.concatenate([np.abs(np.asarray(got) - want)[1:] for got, want in pairs])  # a first token has no log-prob
        if not len(gaps):  # prompts of one token have nothing to compare
            return 0.0
        experts = self.dtype == "bfloat16" and self.machine is not None and self.machine.shapes["actor"].experts
        check_gap(float(np.quantile(gaps, 0.9) if experts else gaps.max()), PROBE_TOLERANCE[self.dtype], bool(experts), synced)
        return float(gaps.max())

    @property
    def groups(self) -> list[Group]:
        return [self.actor, self.reference, *self.rewards.values(), *([self.critic] if self.critic is not None else []), self.sampler]

    def look_around(self) -> Machine:
        """Sizes and GPUs of all roles, and what the actor's GPU can do; when nothing else runs."""
        models = [group for group in self.groups if group is not self.sampler]
        shapes = {group.name: group.call("start", "shape").wait(self.timeout)[0] for group in models}
        cards = {group.name: group.call("start", "card").wait(self.timeout) for group in models}
        engines: list[list[str | None]] = self.sampler.call("start", "cards").wait(self.timeout)
        cards["sampler"] = [card for engine in engines for card in engine]
        ceilings = self.actor.call("start", "ceilings").wait(self.timeout)[0]
        named = {role: [card or "host" for card in held] for role, held in cards.items()}
        return Machine(shapes | {"sampler": shapes["actor"]}, named, len(engines[0]), ceilings)

    def accounts(self, rollouts: Sequence[Rollout], trained: Sequence[str], passes: int, seconds: float) -> dict[str, float]:
        """Of an iteration of `seconds`: floors of its phases, GiB that each model's tensors filled and its allocator held at most, and
        holds now, each role's seconds of work by phase, and the share in which it waited."""
        metrics = floors(rollouts, trained, passes, self.machine) if self.machine is not None else {}
        models = [group for group in self.groups if group is not self.sampler]
        memory = wait_all([group.call("look", "memory") for group in models], self.timeout)
        for group, by_rank in zip(models, memory, strict=True):
            gib = [max(ranks) / 2**30 for ranks in zip(*by_rank, strict=True)]
            names = (f"memory/{group.name}{what}" for what in ("", "/held", "/kept"))
            metrics |= dict(zip(names, gib, strict=True)) if any(gib) else {}
        for group in self.groups:
            spent = group.spent()
            metrics |= {f"work/{group.name}/{phase.replace(' ', '_')}": taken for phase, taken in spent.items()}
            metrics[f"wait/{group.name}"] = max(0.0, 1 - sum(spent.values()) / seconds)
        return metrics

    def save_state(self, folder: Path) -> None:
        for group in self.trained:
            (folder / group.name).mkdir()
        pending = [group.call("save", "save_state", str(folder / group.name)) for group in self.trained]
        for work in pending:
            work.wait(self.timeout)

    def load_state(self, folder: Path) -> None:
        pending = [group.call("resume", "load_state", str(folder / group.name)) for group in self.trained]
        for work in pending:
            work.wait(self.timeout)

    def export_actor(self, folder: Path) -> None:
        self.actor.call("export", "export", str(folder)).wait(self.timeout)


def objective_of(config: PPO) -> Objective:
    """The constants of the actor's loss."""
    return Objective(
        clip_low=config.eps_clip_low or config.eps_clip,
        clip_high=config.eps_clip_high or config.eps_clip,
        dual_clip=config.dual_clip,
        ratio=config.ratio,
        aggregation=config.aggregation,
        constant_length=config.generate_max_len,
        kl_loss=None if config.kl_in == "reward" or config.kl_estimator == "k1" else config.kl_estimator,
        entropy_coef=config.entropy_coef,
        router_aux_coef=config.router_aux_coef,
    )


def start_fleet(
    config: PPO,
    paths: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    groups: Mapping[str, Group],
    trust_remote_code: bool,
    kept_stage: int | None = None,
) -> Fleet:
    """Starts all roles in their processes side by side and waits until each has loaded its model. `paths` gives each role's model;
    `kept_stage`: the ZeRO stage of a resume state, which counts where the recipe leaves it open."""
    rewards = {source.title: groups[f"reward:{source.title}"] for source in config.reward_models}

    def model(role: str) -> Model:
        return Model(
            paths[role],
            config.dtype,
            tokenizer.pad_token_id,
            config.micro_rollout_batch_size,
            trust_remote_code,
            config.micro_rollout_tokens,
        )

    chosen = zero_stage_of(config, paths, groups, kept_stage)  # before anything is loaded, which it may refuse
    offload = config.ref_reward_offload
    as_the_actor = config.routing_replay and paths["reference"] == paths["actor"]  # a KL that begins at 0
    loading: list[Pending] = [
        groups["sampler"].build(
            SamplerRole,
            model=paths["actor"],
            seed=seed,
            max_model_len=config.prompt_max_len + config.generate_max_len,
            dtype=config.dtype,
            kv_cache_gib=config.vllm.kv_cache_gib,
            gpu_memory_utilization=config.vllm.gpu_memory_utilization,
            trust_remote_code=trust_remote_code,
            can_sleep=config.vllm.sleep,
            tensor_parallel_size=config.vllm.tensor_parallel_size,
            seed_answers=config.vllm.seed_answers,
            routing_replay=config.routing_replay,
        ),
        groups["reference"].build(
            Reference, model=model("reference"), temperature=config.temperature, offload=offload, routing_replay=as_the_actor
        ),
        *(group.build(Reward, model=model(group.name), offload=offload) for group in rewards.values()),
    ]
    adamw = AdamW(config.betas, config.weight_decay, config.max_norm)
    training = Training(
        adamw=adamw,
        zero_stage=chosen.stage,
        micro_batch_size=config.micro_train_batch_size,
        gradient_checkpointing=config.gradient_checkpointing,
        timeout=COLLECTIVE_SECONDS,
        lora=config.lora,
        seed=seed,
        micro_tokens=config.micro_train_tokens,
        adam_offload=config.adam_offload,
    )
    loading.append(
        groups["actor"].build(
            Actor,
            model=model("actor"),
            training=training,
            objective=objective_of(config),
            temperature=config.temperature,
            routing_replay=config.routing_replay,
        )
    )
    if "critic" in groups:
        loading.append(groups["critic"].build(Critic, model=model("critic"), training=training, value_clip=config.value_clip))
    for pending in loading:
        print(f"waiting for {pending.role} to load {paths.get(pending.role, paths['actor'])}", flush=True)
        ranks: list[Up] = pending.wait(config.timeout)
        imports = max(up.imports for up in ranks)  # 0 where they are part of the loading
        took = (f"imports {imports:.0f} s, " if imports else "") + f"loading {max(up.loading for up in ranks):.0f} s"
        print(f"{pending.role} is up, process {', '.join(str(up.process) for up in ranks)}: {took}", flush=True)

    def decode(tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    fleet = Fleet(
        actor=groups["actor"],
        critic=groups.get("critic"),
        reference=groups["reference"],
        rewards=rewards,
        sampler=groups["sampler"],
        outside=Outside([asker(source) for source in config.reward if not isinstance(source, ModelReward)]),
        decode=decode,
        timeout=config.timeout,
        dtype=config.dtype,
        sleeps=config.vllm.sleep,
        in_turn=config.colocate_all,
        zero_stage=chosen.stage,
    )
    fleet.open_channel()
    return replace(fleet, machine=fleet.look_around())


def _in_order(by_rank: list[list[tuple[int, Any]]]) -> list[Any]:
    """Joins the ranks' (index, value) shares into one list."""
    found = {index: value for share_of_rank in by_rank for index, value in share_of_rank}
    return [found[index] for index in range(len(found))]
