"""Runs many episodes at once. An episode is a conversation between a user's environment and the engines.

An attempt fails if the environment raises an error, hangs, returns no number, or ends its process. A failed
attempt is repeated with different random numbers. An episode that has used up its attempts has no reward
(which is not a reward of 0) and is counted as failed. If all episodes fail with the same error in the
environment's code, the stage ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows.columns import Located, tools_of
from rlhf_core.environments.admission import Admission
from rlhf_core.environments.attempt import Clock, EpisodeAttempt
from rlhf_core.environments.episode_contract import EnginePool, Episode, EpisodeRequest
from rlhf_core.environments.process import Failed, Process
from rlhf_core.environments.trajectories.calls import CallFormat, call_format
from rlhf_core.environments.trajectories.joined_trajectories import JoinedTrajectories
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import Sampling

ENOUGH = 4  # number of episodes that must fail with the same error before it is assumed to affect all of them
# process deaths not known to be an episode's fault that it survives before they count as failed attempts
DEATHS = 10


class Episodes:
    """Runs an environment's episodes in separate processes.

    Raises ValueError when the environment cannot be created, or when it has tools that the model's chat
    template does not support.
    """

    def __init__(
        self,
        config: Environment,
        renderer: Renderer,
        limits: Limits,
        background: Background,
        engines: EnginePool,
    ):
        self._config = config
        self._renderer = renderer
        self._limits = limits
        self._background = background
        self._engines = engines
        self._numbers = itertools.count()
        self._processes = list[Process | None]([None] * config.processes)
        self._starting = [asyncio.Lock() for _ in self._processes]
        self._asked = 0
        self._started = itertools.count()
        self._finished = False  # whether any attempt has finished
        self._failing = set[int]()  # episodes with a failed attempt
        self._raised = set[str]()  # where the errors that made attempts fail were raised
        self._admissions = [Admission(config.concurrency) for _ in self._processes]
        try:
            self._tools = background.run(self._process(0)).tools
            self._calls: CallFormat | None = call_format(renderer) if self._tools else None
        except BaseException:
            self.close()
            raise

    async def run(self, asked: Sequence[EpisodeRequest], sampling: Sampling) -> list[Episode]:
        """Runs episodes and returns them in the order of `asked`. Raises RoleFailed when an engine fails or
        makes no progress; an engine that has died is restarted and its requests are repeated. Raises
        ValueError for the same reasons as `_check`."""
        self._asked += len(asked)
        tasks = [asyncio.create_task(self._episode(one, sampling)) for one in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _episode(self, asked: EpisodeRequest, sampling: Sampling) -> Episode:
        episode = next(self._started)
        attempt = 0
        deaths = 0
        while True:
            seed = (
                random.Random(f"{asked.seed}-{attempt}-{deaths}").getrandbits(48)
                if attempt or deaths
                else asked.seed
            )
            trajectories = self._trajectories(asked.prompt)
            clock = Clock(self._config.timeout)
            number = next(self._numbers)
            try:
                async with self._admissions[number % len(self._processes)]:
                    rewards = await self._attempt(
                        number, asked, seed, trajectories, sampling, clock, self._engines
                    )
                self._finished = True
                return Episode(trajectories, rewards, "", attempt + 1, clock.spent)
            except Failed as failed:
                self._check(episode, failed)
                deaths += not failed.guilty
                attempt += failed.guilty or deaths > DEATHS
                if attempt >= self._config.max_attempts:
                    if failed.late:
                        trajectories.cut("time")
                    return Episode(trajectories, [], str(failed), attempt, clock.spent)

    def _trajectories(self, prompt: Prompt) -> JoinedTrajectories:
        tools = [*tools_of(Located("the prompts", prompt.row)), *self._tools]
        return JoinedTrajectories(prompt, self._renderer, self._limits, tools, self._format_of_calls)

    def _format_of_calls(self) -> CallFormat:
        self._calls = self._calls or call_format(self._renderer)
        return self._calls

    async def try_once(self, prompt: Prompt, sampling: Sampling, engines: EnginePool, seconds: float) -> None:
        """Runs one episode with answers from `engines`. Raises Failed when the environment fails, and
        TimeoutError after `seconds`."""
        clock = Clock(self._config.timeout)
        attempt = self._attempt(
            next(self._numbers),
            EpisodeRequest(prompt, 0, 0),
            0,
            self._trajectories(prompt),
            sampling,
            clock,
            engines,
        )
        await asyncio.wait_for(attempt, seconds)

    def _check(self, episode: int, failed: Failed) -> None:
        """Records a failed attempt. Raises ValueError when every episode so far has failed with the same
        error in the environment's code."""
        self._failing.add(episode)
        self._raised.add(failed.place)
        same = len(self._raised) == 1 and "" not in self._raised
        if same and not self._finished and len(self._failing) == self._asked >= ENOUGH:
            raise ValueError(
                f"the environment {self._config.title}: each episode raised {failed}; correct it, then"
                " run again"
            )

    async def _attempt(
        self,
        number: int,
        asked: EpisodeRequest,
        seed: int,
        trajectories: JoinedTrajectories,
        sampling: Sampling,
        clock: Clock,
        engines: EnginePool,
    ) -> list[float]:
        """Runs one attempt and returns the reward of each answer. Raises Failed if the episode fails."""
        which = number % len(self._processes)
        process = await self._process(which)
        attempt = EpisodeAttempt(
            process,
            number,
            asked,
            seed,
            trajectories,
            sampling,
            clock,
            self._config.timeout,
            engines,
            images=self._config.images or bool(asked.prompt.pictures),
        )
        rewards = await attempt.run()
        self._admissions[which].finished()
        return rewards

    async def _process(self, which: int) -> Process:
        """Returns a process, starting it if it is not running."""
        async with self._starting[which]:
            process = self._processes[which]
            if process is None or process.ended:
                if process is not None:
                    self._admissions[which].died(process.episodes_at_end)
                own = self._config
                process = await Process.start(
                    str(own.file), own.class_name, own.arguments, own.timeout, own.sandbox
                )
                self._processes[which] = process
            return process

    def close(self) -> None:
        """Ends all processes."""

        async def end() -> None:
            for process in self._processes:
                if process is not None:
                    await process.close()

        if not self._background.closed:
            self._background.run(end())
