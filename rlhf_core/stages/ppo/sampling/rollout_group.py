"""Calls the rollout engines of a run, which turn prompts into rollouts, with or without the episodes of an
environment.

The engines have the actor's weights (see `weight_sync.py`). Engines that answer single requests are restarted
if they die.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlhf_core.cluster.pending import RankDied
from rlhf_core.cluster.worker_group import WorkerGroup, in_order, put_on_nodes
from rlhf_core.config import PPO
from rlhf_core.config.metrics.shared_metrics import SURVIVES
from rlhf_core.data.documents import Document, Prompt, compact
from rlhf_core.environments.episode_contract import Episode, EpisodeRequest
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.episodes_by_row import EpisodesByRow
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.stages.ppo import weight_sync
from rlhf_core.stages.ppo.rollout_records import Own, Rollout

R = TypeVar("R")
LOOK_SECONDS = 1.0  # interval between checks for dead engines
SeededPrompt = tuple[Prompt, int]  # a prompt and the seed of its first answer


@dataclass(frozen=True)
class RolloutGroup:
    """Holds the processes of the engines (`sampler`) and of the actor, which sends its weights to the
    engines.

    `dispatch` accepts requests for single answers in the loop of `background`. It exists if asynchronous
    training or the `episodes` of environments need such requests.
    """

    config: PPO
    sampler: WorkerGroup
    actor: WorkerGroup
    background: Background | None = None
    dispatch: Engines | None = None
    episodes: Episodes | EpisodesByRow | None = None
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the last sync

    @property
    def adapters_alone(self) -> bool:
        """Returns whether engines receive only adapters."""
        return self.config.engine.adapters == "alone"

    @property
    def engine_groups(self) -> tuple[WorkerGroup, ...]:
        """Returns the groups of engine processes."""
        return (self.sampler,)

    def close(self) -> None:
        """Ends open requests and the environment's processes; otherwise this process would wait for them."""
        if self.background is not None:
            self.background.end_work()
            if self.episodes is not None:
                self.episodes.close()
            self.background.close()

    def start_rollouts(
        self, seeded: Sequence[SeededPrompt], sampling: Sampling
    ) -> Callable[[], list[Rollout]]:
        """Starts `sampling.n` answers or episodes for each prompt. Returns a function that waits for them and
        returns them in prompt order."""
        if self.episodes is not None:
            assert self.background is not None
            requests = [
                request for prompt, seed in seeded for request in episode_requests(prompt, seed, sampling.n)
            ]
            running = self.background.start(self.episodes.run(requests, sampling))
            return lambda: [of_episode(episode) for episode in self._waited(running)]
        tokens, seeds, pictures = sent_to_engines(seeded)
        pending = self.sampler.call("generate", SamplerRole.generate_share, tokens, seeds, sampling, pictures)

        def wait() -> list[Rollout]:
            groups = in_order(pending.wait(self.config.timeout))
            return [
                rollout(prompt, answer)
                for (prompt, _), answers in zip(seeded, groups, strict=True)
                for answer in answers
            ]

        return wait

    def stream_rollouts(
        self, seeded: Sequence[SeededPrompt], sampling: Sampling
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields each prompt's index and answers in the order of completion."""
        tokens, seeds, pictures = sent_to_engines(seeded)
        arriving = self.sampler.stream(
            "generate", self.config.timeout, SamplerRole.stream_share, tokens, seeds, sampling, pictures
        )
        for index, answers in arriving:
            yield index, [rollout(seeded[index][0], answer) for answer in answers]

    async def answer(self, prompt: Prompt, seed: int, sampling: Sampling) -> list[Rollout]:
        """Returns answers to one prompt, sampled in the loop of `background`, with episodes or with the
        least-loaded engine."""
        assert self.dispatch is not None
        n = sampling.n
        if self.episodes is not None:
            episodes = await self.episodes.run(episode_requests(prompt, seed, n), sampling)
            return [of_episode(episode) for episode in episodes]
        engine = self.dispatch.reserve(n)  # for all answers, which share keys and values of the prompt
        try:
            asked = partial(self.dispatch.ask, engine, prompt.tokens)
            requests = [asked(seed + j, sampling, prompt.pictures) for j in range(n)]
            return [rollout(prompt, answer) for answer in await asyncio.gather(*requests)]
        finally:
            self.dispatch.release(engine, n)

    def _waited(self, work: Future[R]) -> R:
        """Waits for work that sends requests to engines, and restarts engines that die in the meantime."""
        while True:
            try:
                return work.result(timeout=LOOK_SECONDS)
            except TimeoutError:
                if work.done():  # the work itself timed out
                    raise
                self.revive()

    def revive(self) -> None:
        """Restarts engines that have died, sends the weights to all engines, and allows them to accept
        requests again."""
        assert self.dispatch is not None and self.background is not None
        dead = sorted(self.dispatch.dead)
        if not dead:
            return
        print(f"starting the engines {dead} anew", flush=True)
        self.sampler.build_again(dead).wait(self.config.timeout)
        self.open_channel()
        self._send_weights(self.dispatch.version)
        self.background.run(self.dispatch.revived())

    @property
    def revivals(self) -> int:
        """Returns how many times dead engines were restarted with the actor's weights."""
        return 0 if self.dispatch is None else self.dispatch.revivals

    def open_channel(self) -> None:
        """Opens the route for weights (see `weight_sync.open_channel`) and prints it."""
        route = weight_sync.open_channel(self.actor, self.sampler, self.config.timeout)
        what = "adapters" if self.adapters_alone else "weights"
        print(f"{what} go to {route.receivers} engine processes by {route.kind}", flush=True)

    def sync_weights(self, version: int = 0) -> None:
        """Sends the actor's weights to every engine. Answers record `version` for the tokens sampled with
        these weights."""
        if self.dispatch is not None and self.background is not None:
            self.dispatch.version = version
            for rank in range(self.sampler.world_size):  # before a collective that would wait for a dead rank
                try:
                    self.sampler.call_rank(rank, "look", SamplerRole.gpu_uuids).wait(self.config.timeout)
                except RankDied:
                    self.background.run(self.dispatch.lost(rank))
            if self.dispatch.dead:
                self.revive()
                return
        self._send_weights(version)

    def _send_weights(self, version: int) -> None:
        survives = weight_sync.send_weights(self.actor, self.sampler, version, self.config.timeout)
        if survives is not None:
            self.synced[SURVIVES] = survives

    def load(self, checkpoint: Path) -> None:
        """Loads a checkpoint of the actor into all engines, replacing their weights."""
        if self.dispatch is not None:
            self.revive()
        self.sampler.call("load weights", SamplerRole.load, str(checkpoint)).wait(self.config.timeout)

    def sleep(self, keep_weights: bool) -> None:
        """Makes the engines free their GPUs for the models. `keep_weights` must be true unless `sync_weights`
        follows `wake`."""
        keep = keep_weights or self.adapters_alone
        self.sampler.call("sleep", SamplerRole.sleep, keep).wait(self.config.timeout)

    def wake(self) -> None:
        """Makes the engines use their GPUs again. The models must have freed unused memory on these GPUs."""
        self.sampler.call("wake", SamplerRole.wake).wait(self.config.timeout)

    def prompt_logprobs(self, documents: Sequence[Document]) -> list[list[list[float]]]:
        """Returns, from each engine, the log-probs of all tokens of the documents."""
        tokens = [document.tokens for document in documents]
        pictures = [document.pictures for document in documents]
        call = self.sampler.call("probe", SamplerRole.prompt_logprobs, tokens, pictures)
        return call.wait(self.config.timeout)

    def draft_metrics(self) -> dict[str, float]:
        """Returns the mean number of tokens per step since the last call, for engines with speculative
        decoding."""
        if self.config.engine.drafts is None:
            return {}
        counts = self.sampler.call("look", SamplerRole.sampled).wait(self.config.timeout)
        tokens, steps = np.sum(counts, 0)
        return {"rollout/tokens_per_step": float(tokens / steps)} if steps else {}


def sent_to_engines(
    seeded: Sequence[SeededPrompt],
) -> tuple[Sequence[Sequence[int]], list[int], Sequence[Pictures]]:
    """Returns the prompts' tokens, their seeds, and their images. Tokens and images are put on the nodes;
    images are () if there are none."""
    pictures = [prompt.pictures for prompt, _ in seeded]
    seeds = [seed for _, seed in seeded]
    return (
        put_on_nodes([prompt.tokens for prompt, _ in seeded]),
        seeds,
        put_on_nodes(pictures) if any(pictures) else (),
    )


def episode_requests(prompt: Prompt, seed: int, n: int) -> list[EpisodeRequest]:
    """Returns the requests for `n` episodes that start from a prompt."""
    return [EpisodeRequest(prompt, seed + j, seed) for j in range(n)]


def rollout(prompt: Prompt, answer: SampledAnswer) -> Rollout:
    """Returns a prompt and its answer as a rollout with one document. The mask marks the answer, including
    its end-of-sequence token. Log-probs are 0 if they were not requested."""
    document = compact(prompt.tokens, answer.tokens, answer.experts, prompt.pictures)
    logprobs = np.empty(len(document), np.float32)
    logprobs[: len(prompt.tokens)] = 0
    logprobs[len(prompt.tokens) :] = answer.logprobs or 0
    versions = [(len(prompt.tokens) + first, version) for first, version in answer.versions]
    return Rollout(prompt, document, logprobs, answer.finished, versions=versions)


def of_episode(episode: Episode) -> Rollout:
    """Converts an episode to a rollout. The reward is nan if all attempts failed."""
    path = episode.trajectory
    rewards = episode.rewards
    own = Own(
        sum(rewards) if rewards else math.nan,
        None,
        episode.failure,
        path.turns,
        episode.attempts,
        episode.seconds,
        path.ended,
        path.conversations,
        path.ended_by,
    )
    own = own._replace(early=path.early(rewards)) if rewards else own
    return Rollout(
        path.prompt, path.document, path.logprobs, path.finished, tuple(path.messages), own, path.versions
    )
