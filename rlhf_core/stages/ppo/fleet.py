"""Calls the running roles of PPO: each method calls the ranks of one or several roles, wherever they are
placed.

Methods for several roles start all of them and wait once. Every wait has the recipe's `timeout` and names the
ranks that make no progress.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from rlhf_core.cluster.pending import Pending, RankDied, wait_all
from rlhf_core.cluster.worker_group import Turns, WorkerGroup, in_order, put_on_nodes
from rlhf_core.config import PPO
from rlhf_core.config.metrics.shared_metrics import SURVIVES
from rlhf_core.data.documents import Document
from rlhf_core.environments.episodes import Episodes
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.rollout.weight_transfer import Rendezvous, choose_route
from rlhf_core.runs.resume_state import rank_file
from rlhf_core.stages.ppo.by_reference import by_reference
from rlhf_core.stages.ppo.measured.probe import MARGIN, NOISE_FREE, Probe, check_gap, gaps_of
from rlhf_core.stages.ppo.measured.roofline import RooflineInputs, floors
from rlhf_core.stages.ppo.rewards.reward_sources import RewardSources
from rlhf_core.stages.ppo.rewards.texts import Lengths
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ModelRole, ReferenceModel
from rlhf_core.stages.ppo.roles.trained import Critic, Steps, Trained, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores, StoredRollouts

R = TypeVar("R")
LOOK_SECONDS = 1.0  # between two looks for dead engines


class Asking(NamedTuple):
    """Holds the objects that request single answers: `engines` accept requests in the loop of `background`,
    also from `episodes`."""

    background: Background | None = None
    engines: Engines | None = None
    episodes: Episodes | None = None


@dataclass(frozen=True)
class Fleet:
    """Holds the groups of the running roles.

    `episodes`: the environment's episodes. `engines` accept requests one by one, in the loop of `background`.
    `config`: with the ZeRO stage that was chosen for actor and critic. With `colocate_all` all models share
    their GPUs and work one after the other. Then actor and critic each have the memory for larger training
    passes, no collective waits on a GPU that computes for another model, and a scoring GPU does not switch
    between processes.
    """

    config: PPO
    actor: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    sampler: WorkerGroup
    sources: RewardSources
    lengths: Lengths | None = None
    machine: RooflineInputs | None = None  # set by `survey`
    episodes: Episodes | None = None
    background: Background | None = None
    engines: Engines | None = None
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the last sync

    @property
    def timeout(self) -> float:
        return self.config.timeout

    @property
    def zero_stage(self) -> int:
        """Returns the ZeRO stage that was chosen for actor and critic."""
        assert self.config.zero_stage != "auto", "it was chosen"
        return self.config.zero_stage

    @property
    def sleeps(self) -> bool:
        return self.config.engine.sleep

    @property
    def adapters_alone(self) -> bool:
        """Returns whether engines get only adapters."""
        return self.config.engine.adapters == "alone"

    def decode(self, tokens: Sequence[int], skip: bool) -> str:
        """Returns the text of tokens, without special ones if `skip`."""
        return self.sources.decode([tokens], skip)[0]

    def close(self) -> None:
        """Ends open requests for rewards and the environment's processes, for which this process would
        otherwise wait."""
        self.sources.clients.close()
        if self.background is not None:
            self.background.end_work()
            if self.episodes is not None:
                self.episodes.close()
            self.background.close()

    def start_sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Callable[[], list[list[SampledAnswer]]]:
        """Starts to sample answers to each prompt. Returns a function that waits for them and returns them in
        the order of the prompts."""
        pending = self.sampler.call(
            "generate", SamplerRole.generate_share, put_on_nodes(list(prompts)), list(seeds), sampling
        )
        return lambda: in_order(pending.wait(self.timeout))

    def stream(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        """Yields the answers of `start_sample`, prompt by prompt in the order of completion, with the
        prompt's index."""
        return self.sampler.stream(
            "generate",
            self.timeout,
            SamplerRole.stream_share,
            put_on_nodes(list(prompts)),
            list(seeds),
            sampling,
        )

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int
    ) -> Callable[[], Scores]:
        """Starts scoring the same documents with actor, reference and critic and, without `rewards`, with all
        reward sources, then sends the data that training will read. Returns a function that waits for the
        scores."""
        documents = put_on_nodes([rollout.document for rollout in rollouts])
        scoring = Turns(self.config.colocate_all)
        pending = (
            {}
            if self.config.one_update
            else {"old_logprobs": scoring.start(self.actor, "score", Actor.logprobs, documents)}
        )
        if self.reference is not None:
            pending["ref_logprobs"] = scoring.start(
                self.reference, "score", ReferenceModel.logprobs, documents
            )
        if self.config.reference_in_actor:
            pending["ref_logprobs"] = scoring.start(self.actor, "score", Actor.reference_logprobs, documents)
        if self.critic is not None:
            pending["values"] = scoring.start(self.critic, "score", Critic.values, documents)
        bootstraps = self.config.bootstrap_truncated
        cut = [i for i, rollout in enumerate(rollouts) if bootstraps and not rollout.finished]
        if self.critic is not None and cut:
            ended = put_on_nodes([rollouts[i].document for i in cut])
            pending["end_values"] = scoring.start(self.critic, "score", Critic.end_values, ended)
        wait_rewards = (
            (lambda: rewards)
            if rewards is not None
            else self.sources.start(rollouts, documents, allowed_failures, scoring)
        )
        lists = {"document": documents}
        if self.config.sampler_is != "off":
            lists["sampler_logprobs"] = put_on_nodes([rollout.sampler_logprobs for rollout in rollouts])

        def wait() -> Scores:
            scored = {name: in_order(work.wait(self.timeout)) for name, work in pending.items()}
            known = wait_rewards()
            of_all = {name: work.refs for name, work in pending.items() if name != "end_values"}
            stored = StoredRollouts(len(rollouts), lists, of_all)
            end_values = np.zeros(len(rollouts), np.float32) if bootstraps else None
            if end_values is not None and cut:
                end_values[cut] = np.concatenate(scored["end_values"])
            logprobs, ref_logprobs, values = (
                scored.get(name) for name in ("old_logprobs", "ref_logprobs", "values")
            )
            return Scores(logprobs, ref_logprobs, values, known, [stored], end_values)

        return wait

    def reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards:
        """Returns the rewards of all sources. Raises RewardsFailed when a source leaves more than
        `allowed_failures` answers without a reward."""
        documents = put_on_nodes([rollout.document for rollout in rollouts])
        return self.sources.start(rollouts, documents, allowed_failures, Turns(self.config.colocate_all))()

    def train(
        self,
        experience: Sequence[Experience],
        updates: Mapping[str, Sequence[Update]],
        beside: Callable[[], None] = lambda: None,
        stored: Sequence[StoredRollouts] = (),
    ) -> Steps:
        """Trains the roles named in `updates`, side by side or in turn, and calls `beside` while they work.
        `stored`: as in `Scores`, data that the nodes have and that need not be sent again. Returns the
        metrics of all roles and the log-probs of all ranks."""
        groups = [group for group in self.trained if group.name in updates]
        sent = by_reference(experience, stored, sum(group.world_size for group in groups))
        shared = put_on_nodes(sent.experience)

        def start(group: WorkerGroup) -> Pending[Steps]:
            if self.config.colocate_all:
                self.release_memory()
            places, references = sent.read_by(group.name)
            return group.call("train", Trained.train, shared, list(updates[group.name]), places, *references)

        begun = [start(group) for group in groups[: 1 if self.config.colocate_all else None]]
        beside()
        by_role = [work.wait(self.timeout) for work in begun]
        by_role += [start(group).wait(self.timeout) for group in groups[len(begun) :]]
        steps = zip(*(ranks[0].metrics for ranks in by_role), strict=True)
        logprobs = {i: values for ranks in by_role for rank in ranks for i, values in rank.logprobs}
        return Steps(
            [dict(pair for metrics in step for pair in metrics.items()) for step in steps],
            sorted(logprobs.items()),
        )

    @property
    def trained(self) -> list[WorkerGroup]:
        """Returns the groups that have an optimiser."""
        return [self.actor] if self.critic is None else [self.critic, self.actor]

    def trained_parameters(self) -> int:
        """Counts the parameters of all groups that have an optimiser."""
        assert self.machine is not None, "it was surveyed"
        width = 2 if self.config.dtype == "bfloat16" else 4
        return sum(self.machine.shapes[group.name].weight_bytes // width for group in self.trained)

    def sleep(self, keep_weights: bool) -> None:
        """Makes the engines free their GPUs for the models. `keep_weights` must be true unless `sync_weights`
        follows `wake`."""
        self.sampler.call("sleep", SamplerRole.sleep, keep_weights or self.adapters_alone).wait(self.timeout)

    def wake(self) -> None:
        """Makes the models free unused memory, and the engines take up their GPUs again."""
        self.release_memory()
        self.sampler.call("wake", SamplerRole.wake).wait(self.timeout)

    def release_memory(self) -> None:
        """Frees memory that is held only by the allocators of the models' processes, for other processes on
        their GPUs."""
        wait_all([group.call("release memory", ModelRole.release) for group in self.models], self.timeout)

    def open_channel(self) -> None:
        """Opens the route for weights: CUDA IPC if engines share the actor's GPUs, otherwise NCCL or host
        memory."""
        engines = [
            gpu
            for gpus in self.sampler.call("start", SamplerRole.gpu_uuids).wait(self.timeout)
            for gpu in gpus
        ]
        trainer = self.actor.call("start", ModelRole.gpu_uuid).wait(self.timeout)
        route = choose_route(trainer, engines)
        key = secrets.token_bytes(16)
        sockets = (
            self.actor.call("start", Actor.open_listener, key).wait(self.timeout)
            if route.kind == "gpus"
            else []
        )
        by_gpu = {gpu: socket for gpu, socket in zip(trainer, sockets, strict=False) if gpu is not None}
        rendezvous = Rendezvous(
            self.actor.store_address(route.source, self.timeout), by_gpu, key, self.timeout
        )
        opening = [
            self.actor.call(
                "open the weight channel",
                Actor.open_channel,
                route,
                rendezvous,
                [engines.count(gpu) for gpu in trainer],
            ),
            self.sampler.call("open the weight channel", SamplerRole.open_channel, route, rendezvous),
        ]
        wait_all(opening, self.timeout)
        print(
            f"{'adapters' if self.adapters_alone else 'weights'} go to {len(engines)} engine processes by"
            f" {route.kind}",
            flush=True,
        )

    def sync_weights(self, version: int = 0) -> None:
        """Sends the actor's weights to every engine. `version`: recorded in answers for the tokens sampled
        with these weights."""
        if self.engines is not None and self.background is not None:
            self.engines.version = version
            for rank in range(self.sampler.world_size):  # before a collective that would wait for a dead rank
                try:
                    self.sampler.call_rank(rank, "look", SamplerRole.gpu_uuids).wait(self.timeout)
                except RankDied:
                    self.background.run(self.engines.lost(rank))
            if self.engines.dead:
                self.revive()
                return
        self._send_weights(version)

    def _send_weights(self, version: int) -> None:
        sending = self.actor.call("send weights", Actor.send_weights)
        receiving = self.sampler.call("receive weights", SamplerRole.receive_weights, version)
        survives = wait_all([sending, receiving], self.timeout)[0][0]
        if survives is not None:
            self.synced[SURVIVES] = survives

    def load_engines(self, checkpoint: Path) -> None:
        """Loads a checkpoint of the actor into all engines, replacing their weights."""
        if self.engines is not None:
            self.revive()
        self.sampler.call("load weights", SamplerRole.load, str(checkpoint)).wait(self.timeout)

    @property
    def revivals(self) -> int:
        """Returns how often engines that had died came back, with the actor's weights."""
        return 0 if self.engines is None else self.engines.revivals

    def waited(self, work: Future[R]) -> R:
        """Waits for work that sends requests to engines, and restarts engines that die meanwhile."""
        while True:
            try:
                return work.result(timeout=LOOK_SECONDS)
            except TimeoutError:
                if work.done():  # the work itself timed out
                    raise
                self.revive()

    def revive(self) -> None:
        """Restarts engines that have died, sends all engines the weights, and lets them accept requests
        again."""
        assert self.engines is not None and self.background is not None
        dead = sorted(self.engines.dead)
        if not dead:
            return
        print(f"starting the engines {dead} anew", flush=True)
        self.sampler.build_again(dead).wait(self.timeout)
        self.open_channel()
        self._send_weights(self.engines.version)
        self.background.run(self.engines.revived())

    def probe(self, documents: Sequence[Document], synced: bool = True) -> Probe:
        """Compares the log-probs of engines and trainer on fixed documents.

        Raises WeightsDiffer beyond the bound, or EngineDiffers if both still have the weights that they
        loaded (not `synced`). The bound is `MARGIN` times the change that rounding in the formats of both
        causes in the trainer's own log-probs (`measured/rounding.py`), and at least `NOISE_FREE`.

        Experts are chosen by products that engine and trainer round in bf16 in different orders: a few tokens
        go to another expert, and their log-probs may differ by a nat. So a bf16 model with experts must meet
        the bound at nine of ten tokens.
        """
        trainer = self.actor.call("probe", Actor.probe, list(documents))
        engines = self.sampler.call(
            "probe", SamplerRole.prompt_logprobs, [document.tokens for document in documents]
        ).wait(self.timeout)
        plain, moved = (in_order(scored) for scored in zip(*trainer.wait(self.timeout), strict=True))
        gaps = np.concatenate([gaps_of(engine, plain) for engine in engines])
        if not len(gaps):  # prompts of one token have nothing to compare
            return Probe(0.0, 0.0)
        experts = (
            self.config.dtype == "bfloat16"
            and self.machine is not None
            and self.machine.shapes["actor"].experts
        )
        of_rounding, found = (
            float(np.quantile(each, 0.9) if experts else each.max()) for each in (gaps_of(moved, plain), gaps)
        )
        bound = max(NOISE_FREE[self.config.dtype], MARGIN * of_rounding)
        check_gap(found, bound, bool(experts), synced)
        return Probe(found, bound)

    @property
    def models(self) -> list[WorkerGroup]:
        """Returns the groups of all models, without the sampler's group."""
        return [
            group
            for group in (self.actor, self.reference, *self.sources.models.values(), self.critic)
            if group is not None
        ]

    def survey(self) -> RooflineInputs:
        """Returns sizes and GPUs of all roles, and measures the actor's GPU. Call it when nothing else
        runs."""
        shapes = {
            group.name: group.call("start", ModelRole.shape).wait(self.timeout)[0] for group in self.models
        }
        gpus = {
            group.name: group.call("start", ModelRole.gpu_uuid).wait(self.timeout) for group in self.models
        }
        engines = self.sampler.call("start", SamplerRole.gpu_uuids).wait(self.timeout)
        gpus["sampler"] = [gpu for engine in engines for gpu in engine]
        ceilings = self.actor.call("start", Actor.ceilings).wait(self.timeout)[0]
        assert ceilings is not None, "the first rank measures"
        named = {role: [gpu or "host" for gpu in held] for role, held in gpus.items()}
        return RooflineInputs(
            shapes | {"sampler": shapes["actor"]},
            named,
            len(engines[0]) // self.config.engine.pipeline_parallel_size,
            ceilings,
        )

    def forget_seconds(self) -> None:
        """Excludes the work so far from the next `iteration_metrics`."""
        for group in (*self.models, self.sampler):
            group.take_seconds()

    def iteration_metrics(
        self, rollouts: Sequence[Rollout], trained: Sequence[str], passes: int, seconds: float
    ) -> dict[str, float]:
        """Returns metrics of an iteration of `seconds`: floors of its phases; the metrics of the last sync;
        for each model the peak GiB allocated and reserved, and the GiB still reserved; each role's seconds of
        work by phase, and the share of time it waited."""
        metrics = (
            floors(rollouts, trained, passes, self.machine, self.config.scorings)
            if self.machine is not None
            else {}
        )
        metrics |= self.synced
        memory = wait_all([group.call("look", ModelRole.memory) for group in self.models], self.timeout)
        for group, by_rank in zip(self.models, memory, strict=True):
            gib = [max(ranks) / 2**30 for ranks in zip(*by_rank, strict=True)]
            names = (f"memory/{group.name}{what}" for what in ("", "/held", "/kept"))
            metrics |= dict(zip(names, gib, strict=True)) if any(gib) else {}
        for group in (*self.models, self.sampler):
            spent = group.take_seconds()
            metrics |= {
                f"work/{group.name}/{phase.replace(' ', '_')}": taken for phase, taken in spent.items()
            }
            metrics[f"wait/{group.name}"] = max(0.0, 1 - sum(spent.values()) / seconds)
        if self.config.engine.drafts is not None:
            tokens, steps = np.sum(self.sampler.call("look", SamplerRole.sampled).wait(self.timeout), 0)
            metrics |= {"rollout/tokens_per_step": float(tokens / steps)} if steps else {}
        return metrics

    def save_state(self, folder: Path) -> None:
        """Makes the roles write their parts (`state_files`) during the next iterations."""
        for group in self.trained:
            (folder / group.name).mkdir()
        wait_all(
            [group.call("save", Trained.save_state, str(folder / group.name)) for group in self.trained],
            self.timeout,
        )

    def state_files(self) -> list[str]:
        return [
            f"{group.name}/{rank_file(rank)}" for group in self.trained for rank in range(group.world_size)
        ]

    def finish_saving(self) -> None:
        wait_all([group.call("save", Trained.finish_saving) for group in self.trained], self.timeout)

    def load_state(self, folder: Path) -> None:
        wait_all(
            [group.call("resume", Trained.load_state, str(folder / group.name)) for group in self.trained],
            self.timeout,
        )

    def try_export(self, folder: Path) -> None:
        self.actor.call("try to export", Actor.try_export, str(folder)).wait(self.timeout)

    def export_actor(self, folder: Path) -> None:
        self.actor.call("export", Actor.export, str(folder)).wait(self.timeout)
