"""Calls the running models of PPO. Each method calls the ranks of one or more roles, regardless of their
placement. `sampling/rollout_group.py` calls the engines.

Methods for several roles start all of them and wait once. Every wait is limited by the recipe's `timeout`,
and its error names the ranks that make no progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from rlhf_core.cluster.pending import Pending, wait_all
from rlhf_core.cluster.work_log import GroupWork
from rlhf_core.cluster.worker_group import Turns, WorkerGroup, in_order, put_on_nodes
from rlhf_core.config import PPO
from rlhf_core.config.training.optimised import HALF
from rlhf_core.data.documents import Document
from rlhf_core.rewards.clients import Rewards
from rlhf_core.runs.resume_state import rank_file
from rlhf_core.stages.ppo.by_reference import by_reference, read_by
from rlhf_core.stages.ppo.fleet_metrics import memory_metrics, work_metrics
from rlhf_core.stages.ppo.measured.probe import Probe, check_gap, compare
from rlhf_core.stages.ppo.measured.roofline import RooflineInputs, floors
from rlhf_core.stages.ppo.rewards.reward_sources import RewardSources
from rlhf_core.stages.ppo.rewards.texts import Lengths, TokenTexts
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ModelRole, ReferenceModel
from rlhf_core.stages.ppo.roles.teacher_scores import PendingShares, scorings_of, start_teachers
from rlhf_core.stages.ppo.roles.trained import Critic, Steps, Trained, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores, StoredColumn
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup


@dataclass(frozen=True)
class Fleet:
    """Holds the groups of the models, the engines, and the engines of `judges`.

    `config` contains the ZeRO stage that was chosen for actor and critic. With `colocate_all`, all models
    share their GPUs and run one after the other. Actor and critic then each have the memory for larger
    training passes, and no collective waits for a GPU that computes for another model. A scoring GPU also
    does not switch between processes.
    """

    config: PPO
    actor: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    sources: RewardSources
    engines: RolloutGroup
    lengths: Lengths | None = None
    token_texts: Callable[[Sequence[int]], TokenTexts] | None = None
    machine: RooflineInputs | None = None  # set by `survey`
    judges: Sequence[WorkerGroup] = ()
    teachers: Mapping[str, WorkerGroup] = field(default_factory=dict)
    rewarding: Lock = field(default_factory=Lock)

    @property
    def timeout(self) -> float:
        return self.config.timeout

    @property
    def zero_stage(self) -> int:
        """Returns the ZeRO stage that was chosen for actor and critic."""
        assert self.config.sharding is not None, "it was chosen"
        return self.config.sharding.stage

    @property
    def sleeps(self) -> bool:
        """Returns whether the engines sleep while the models work."""
        return self.config.engine.sleep and self.config.has_engines

    def decode(self, tokens: Sequence[int], skip: bool) -> str:
        """Returns the text of tokens, without special tokens if `skip`."""
        return self.sources.decode([tokens], skip)[0]

    def close(self) -> None:
        """Ends open reward requests and the engines' work."""
        self.sources.clients.close()
        self.engines.close()

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int
    ) -> Callable[[], Scores]:
        """Starts scoring the same documents with actor, reference and critic and, if `rewards` is None, with
        all reward sources. Then sends the data that training will read. Returns a function that waits for the
        scores."""
        documents = put_on_nodes([rollout.document for rollout in rollouts])
        turns = Turns(self.config.colocate_all)
        pending = self._start_models(rollouts, documents, turns)
        wait_rewards = (
            (lambda: rewards)
            if rewards is not None
            else self.sources.start(rollouts, documents, allowed_failures, turns)
        )
        stored = [StoredColumn("document", 0, False, documents)]
        sampler = [rollout.sampler_logprobs for rollout in rollouts]
        old = sampler if self.config.sampler_is == "in_ratio" else None
        if old is not None or self.config.weighs_tokens:
            field = "sampler_logprobs" if old is None else "old_logprobs"
            stored.append(StoredColumn(field, 0, False, put_on_nodes(sampler)))

        def wait() -> Scores:
            scored = {name: in_order(work.wait(self.timeout)) for name, work in pending.items()}
            known = wait_rewards()
            teacher = scored.get("teacher")
            if teacher is not None:
                scored["ref_logprobs"] = [found.own for found in teacher]
            for name, work in pending.items():
                if name != "end_values":
                    stored.extend(StoredColumn(name, 0, True, reference) for reference in work.refs)
            return Scores(
                scored.get("old_logprobs", old),
                scored.get("ref_logprobs"),
                scored.get("values"),
                known,
                stored,
                self._end_values(rollouts, scored.get("end_values", [])),
                teacher,
            )

        return wait

    def _start_models(self, rollouts: Sequence[Rollout], documents: Any, turns: Turns) -> dict[str, Any]:
        """Starts scoring documents with actor, reference and critic. Returns the pending results keyed by
        field of Experience, and the `end_values` of the truncated answers if the recipe requires them."""
        pending: dict[str, Any] = {}
        if self.config.scores_actor:
            pending["old_logprobs"] = turns.start(self.actor, "score", Actor.logprobs, documents)
        of_reference = "teacher" if self.config.teacher_top_k else "ref_logprobs"
        if self.teachers:
            pending[of_reference] = self._start_teachers(rollouts, turns)
        elif self.reference is not None or self.config.reference_in_actor:
            pending[of_reference] = self._start_reference(self.reference, documents, turns)
        if self.critic is not None:
            pending["values"] = turns.start(self.critic, "score", Critic.values, documents)
            cut = [rollout.document for rollout in rollouts if not rollout.finished]
            if self.config.bootstrap_truncated and cut:
                ended = put_on_nodes(cut)
                pending["end_values"] = turns.start(self.critic, "score", Critic.end_values, ended)
        return pending

    def _start_reference(self, group: WorkerGroup | None, documents: Any, turns: Turns) -> Pending[Any]:
        """Starts scoring documents with the reference or a teacher. Without a group, uses the actor without
        its adapters."""
        if group is None:
            return turns.start(self.actor, "score", Actor.reference_logprobs, documents)
        if self.config.teacher_top_k:
            return turns.start(
                group, "score", ReferenceModel.top_tokens, documents, self.config.teacher_top_k
            )
        return turns.start(group, "score", ReferenceModel.logprobs, documents)

    def _start_teachers(self, rollouts: Sequence[Rollout], turns: Turns) -> PendingShares:
        """Starts scoring each rollout with its own teacher or the reference."""

        def start(group: WorkerGroup | None, share: Sequence[Rollout]) -> Pending[Any]:
            return self._start_reference(group, put_on_nodes([rollout.document for rollout in share]), turns)

        groups = {"": self.reference, **self.teachers}
        return start_teachers({name: partial(start, group) for name, group in groups.items()}, rollouts)

    def _end_values(self, rollouts: Sequence[Rollout], of_cut: Sequence[np.ndarray]) -> np.ndarray | None:
        """Returns `Scores.end_values`; None without `bootstrap_truncated`. `of_cut`: the truncated answers'
        values."""
        if not self.config.bootstrap_truncated:
            return None
        values = np.zeros(len(rollouts), np.float32)
        if of_cut:
            values[[not rollout.finished for rollout in rollouts]] = np.concatenate(of_cut)
        return values

    def start_reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Callable[[], Rewards]:
        """Starts all reward sources. Returns a function that waits for the rewards, and raises RewardsFailed
        if a source leaves more than `allowed_failures` answers without a reward."""
        documents = put_on_nodes([rollout.document for rollout in rollouts])
        return self.sources.start(rollouts, documents, allowed_failures, Turns(self.config.colocate_all))

    def reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards:
        """Returns the rewards of `start_reward`. Only one thread at a time requests rewards, so that each
        source keeps to its limit of concurrent requests."""
        with self.rewarding:
            return self.start_reward(rollouts, allowed_failures)()

    def reward_while_asleep(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards:
        """Returns the rewards of `reward`. Meanwhile, engines that share GPUs with the models sleep and keep
        their weights."""
        if not self.sleeps:
            return self.reward(rollouts, allowed_failures)
        self.engines.sleep(keep_weights=True)
        rewards = self.reward(rollouts, allowed_failures)
        self.wake_engines()
        return rewards

    def train(
        self,
        experience: Sequence[Experience],
        updates: Mapping[str, Sequence[Update]],
        beside: Callable[[], None] = lambda: None,
        stored: Sequence[StoredColumn] = (),
    ) -> Steps:
        """Trains the roles named in `updates`, concurrently or in turn, and calls `beside` while they work.
        `stored` is data that the nodes already hold and that need not be sent again, as in `Scores`. Returns
        the metrics of all roles and the log-probs of all ranks."""
        groups = [group for group in self.trained if group.name in updates]
        left, held = by_reference(experience, stored, sum(group.world_size for group in groups))
        shared = put_on_nodes(left)

        def start(group: WorkerGroup) -> Pending[Steps]:
            if self.config.colocate_all:
                self.release_memory()
            places, references = read_by(group.name, held)
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
        width = 2 if self.config.dtype in HALF else 4
        return sum(self.machine.shapes[group.name].weight_bytes // width for group in self.trained)

    def wake_engines(self) -> None:
        """Makes the models free unused memory, then wakes the engines so that they use their GPUs again."""
        self.release_memory()
        self.engines.wake()

    def release_memory(self) -> None:
        """Frees memory that only the allocators of the models' processes hold, for other processes on their
        GPUs."""
        wait_all([group.call("release memory", ModelRole.release) for group in self.models], self.timeout)

    def probe(self, documents: Sequence[Document], synced: bool = True) -> Probe:
        """Compares the log-probs of engines and trainer on fixed documents, and returns the gap. Raises
        WeightsDiffer if the difference exceeds the bound, or EngineDiffers if no weights have been synced
        yet.

        Experts are chosen by products that engine and trainer round in bf16 in different orders. A few tokens
        therefore go to another expert, and their log-probs may differ by a nat, so a bf16 model with experts
        must meet the bound for only nine of ten tokens.
        """
        trainer = self.actor.call("probe", Actor.probe, list(documents))
        found = self.engines.prompt_logprobs(documents)
        plain, moved = (in_order(scored) for scored in zip(*trainer.wait(self.timeout), strict=True))
        experts = self.machine is not None and self.machine.shapes["actor"].experts
        most = self.config.dtype in HALF and experts
        probe = compare(found, plain, moved, self.config.dtype, most)
        check_gap(*probe, most, synced)
        return probe

    @property
    def models(self) -> list[WorkerGroup]:
        """Returns the groups of all models, without the sampler."""
        return [
            group
            for group in (
                self.actor,
                self.reference,
                *self.teachers.values(),
                *self.sources.models.values(),
                self.critic,
            )
            if group is not None
        ]

    def take_work(self) -> dict[str, GroupWork]:
        """Returns each role's work since the last call, and resets the record."""
        groups = (*self.models, *self.engines.engine_groups, *self.judges)
        return {group.name: group.take_work() for group in groups}

    @property
    def gpus(self) -> Mapping[str, Sequence[str]]:
        """Returns the GPUs of each role, as `survey` found them."""
        return self.machine.gpus if self.machine is not None else {}

    def iteration_metrics(
        self,
        rollouts: Sequence[Rollout],
        passes: Mapping[str, float],
        seconds: float,
        work: Mapping[str, GroupWork],
    ) -> dict[str, float]:
        """Returns the metrics of an iteration that took `seconds`. They cover the minimum times of its
        phases, the last sync, each role's memory, `work` and waiting time, the judges' usage, and the tokens
        per step with speculative decoding."""
        metrics: dict[str, float] = {}
        if self.machine is not None:
            scorings = scorings_of(self.config, [rollout.prompt.row for rollout in rollouts])
            metrics |= floors(rollouts, passes, self.machine, scorings)
        metrics |= self.engines.synced
        metrics |= memory_metrics(self.models, self.timeout)
        metrics |= work_metrics(work, seconds)
        metrics |= self.sources.clients.spent()
        return metrics | self.engines.draft_metrics()

    def save_state(self, folder: Path) -> None:
        """Makes the roles write their parts of the resume state (`state_files`) during the next
        iterations."""
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

    def reset_reference(self, folder: Path) -> None:
        """Gives the reference the weights of an exported actor."""
        assert self.reference is not None, "the recipe has one"
        self.reference.call("reset", ReferenceModel.take_weights, str(folder)).wait(self.timeout)

    def export_average(self, folder: Path) -> None:
        self.actor.call("export", Actor.export_average, str(folder)).wait(self.timeout)
