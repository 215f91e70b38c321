"""Runs episodes: conversations between a user's environment and the engines, many at once.

An attempt that fails (the environment raises, hangs, returns no number, or ends its process) is restarted
with other random numbers. An episode that has used up its attempts has no reward (never 0) and is counted. If
all episodes fail with the same error in the environment's code, the work ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from rlhf_core.config.rewards import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows.columns import Located, tools_of
from rlhf_core.environments.admission import Admission
from rlhf_core.environments.calls import call_format
from rlhf_core.environments.process import LOOK_SECONDS, Failed, Process
from rlhf_core.environments.trajectory import Full, Limits, Trajectory
from rlhf_core.rewards.reward_contract import bounded
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling

R = TypeVar("R")
Mail = dict[str, Any] | Failed  # a line from the environment's process, or its end
ENOUGH = 4  # number of failing episodes, all with the same error, after which it is taken to affect all
# process deaths that an episode not known to be guilty survives before they count as failed attempts
DEATHS = 10


@dataclass(frozen=True)
class Episode:
    """Holds a finished conversation. `rewards`: one per answer, empty if all attempts failed; `failure` then
    has the reason for the last failure. `attempts`: their number. `seconds`: the environment's own time in
    the last attempt."""

    trajectory: Trajectory
    rewards: list[float]
    failure: str
    attempts: int
    seconds: float


class EpisodeRequest(NamedTuple):
    """Describes an episode to run: the prompt, the seed of its answers, and the seed shared by all answers to
    this prompt."""

    prompt: Prompt
    seed: int
    shared: int


class EnginePool(Protocol):
    """Defines the interface of engines that answer single requests (`rlhf_core.rollout.dispatch.Engines`)."""

    def reserve(self) -> int: ...

    def release(self, engine: int) -> None: ...

    async def ask(self, engine: int, tokens: list[int], seed: int, sampling: Sampling) -> SampledAnswer: ...


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
        self._finished = False  # an attempt has finished
        self._failing = set[int]()  # episodes with a failed attempt
        self._raised = set[str]()  # the places of the errors that made attempts fail
        self._admissions = [Admission(config.concurrency) for _ in self._processes]
        try:
            self._tools = background.run(self._process(0)).tools
            self._calls = call_format(renderer) if self._tools else None
        except BaseException:
            self.close()
            raise

    async def run(self, asked: Sequence[EpisodeRequest], sampling: Sampling) -> list[Episode]:
        """Runs episodes and returns them in the order of `asked`. Raises RoleFailed when an engine fails or
        makes no progress; a dead engine is restarted and asked again. Raises ValueError like `_check`."""
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
            trajectory = self._trajectory(asked.prompt)
            clock = Clock(self._config.timeout)
            number = next(self._numbers)
            try:
                async with self._admissions[number % len(self._processes)]:
                    rewards = await self._attempt(
                        number, asked, seed, trajectory, sampling, clock, self._engines
                    )
                self._finished = True
                return Episode(trajectory, rewards, "", attempt + 1, clock.spent)
            except Failed as failed:
                self._check(episode, failed)
                deaths += not failed.guilty
                attempt += failed.guilty or deaths > DEATHS
                if attempt >= self._config.max_attempts:
                    if failed.late:
                        trajectory.cut()
                    return Episode(trajectory, [], str(failed), attempt, clock.spent)

    def _trajectory(self, prompt: Prompt) -> Trajectory:
        tools = [*tools_of(Located("the prompts", prompt.row)), *self._tools]
        self._calls = self._calls or (call_format(self._renderer) if tools else None)
        return Trajectory(prompt, self._renderer, self._limits, tools, self._calls)

    async def try_once(self, prompt: Prompt, sampling: Sampling, engines: EnginePool, seconds: float) -> None:
        """Runs one episode with the answers of `engines`. Raises Failed when the environment fails,
        TimeoutError after `seconds`."""
        clock = Clock(self._config.timeout)
        attempt = self._attempt(
            next(self._numbers),
            EpisodeRequest(prompt, 0, 0),
            0,
            self._trajectory(prompt),
            sampling,
            clock,
            engines,
        )
        await asyncio.wait_for(attempt, seconds)

    def _check(self, episode: int, failed: Failed) -> None:
        """Records a failed attempt. Raises ValueError when all episodes so far have failed with the same
        error in the environment's code."""
        self._failing.add(episode)
        self._raised.add(failed.place)
        same = len(self._raised) == 1 and "" not in self._raised
        if same and not self._finished and len(self._failing) == self._asked >= ENOUGH:
            raise ValueError(
                f"the environment {self._config.class_name}: each episode raised {failed}; correct it, then"
                " run again"
            )

    async def _attempt(
        self,
        number: int,
        asked: EpisodeRequest,
        seed: int,
        trajectory: Trajectory,
        sampling: Sampling,
        clock: Clock,
        engines: EnginePool,
    ) -> list[float]:
        """Runs one attempt and returns the reward of each answer. Raises Failed. The engine stops answering
        if the environment stops waiting for it."""
        which = number % len(self._processes)
        process = await self._process(which)
        engine = engines.reserve()
        turn = 0
        done = False
        early: Mail | None = None  # a line that came while the engine answered
        mailbox = process.episodes[number] = asyncio.Queue()
        task = {**asked.prompt.row, "messages": list(asked.prompt.messages)}
        process.send(start=number, task=task, messages=list(asked.prompt.messages), seed=asked.shared)
        try:
            while True:
                try:
                    told = await clock.wait(mailbox.get()) if early is None else early
                    early = None
                except TimeoutError:
                    if process.held() or process.ended:  # the mailbox will report whose fault it is
                        clock.extend(2 * LOOK_SECONDS)
                        continue
                    raise Failed(f"took more than {self._config.timeout:g} s (timeout)", late=True) from None
                if isinstance(told, Failed):
                    done = True
                    raise told
                if "error" in told:
                    done = True
                    raise Failed(told["error"], place=told["place"], certain=told["certain"])
                if "rewards" in told:
                    done = True
                    if len(told["rewards"]) != trajectory.turns:  # a wait for an answer was cancelled
                        raise Failed(
                            "an answer came that nobody waited for: the environment cancelled model.answer()"
                        )
                    self._admissions[which].finished()
                    return [float(reward) for reward in bounded(told["rewards"])]
                try:
                    tokens, room = trajectory.ask(told["ask"])
                except Full as full:
                    process.send(answer=number, limit=str(full))
                    continue
                except (ValueError, TypeError) as error:  # the environment's messages do not fit the template
                    raise Failed(str(error)) from error
                seed_of_turn = seed if not turn else random.Random(f"{seed}-turn-{turn}").getrandbits(48)
                how = sampling._replace(n=1, max_new_tokens=room)
                answer, early = await first_of(engines.ask(engine, tokens, seed_of_turn, how), mailbox)
                if answer is None and isinstance(early, dict) and "rewards" in early:
                    raise Failed(
                        "the episode ended while the model answered: the environment cancelled model.answer()"
                    )
                if answer is None:
                    continue
                seen, message = trajectory.take(answer)
                turn += 1
                process.send(answer=number, **asdict(seen), message=message)
        finally:
            engines.release(engine)
            process.episodes.pop(number, None)
            if not done:
                process.send(cancel=number)

    async def _process(self, which: int) -> Process:
        """Returns a process, after starting it if it is not running."""
        async with self._starting[which]:
            process = self._processes[which]
            if process is None or process.ended:
                if process is not None:
                    self._admissions[which].died(process.episodes_at_end)
                own = self._config
                process = await Process.start(
                    str(own.file), own.class_name, own.options, own.timeout, own.sandbox
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


async def first_of(
    work: Coroutine[Any, Any, R], mailbox: asyncio.Queue[Mail]
) -> tuple[R | None, Mail | None]:
    """Waits for work or a line in the mailbox. Returns the result of the work and the line, None for either
    that has not come. If the line comes first, the work is cancelled."""
    working = asyncio.create_task(work)
    hearing = asyncio.create_task(mailbox.get())
    try:
        await asyncio.wait((working, hearing), return_when=asyncio.FIRST_COMPLETED)
        result = working.result() if working.done() else None
        return result, hearing.result() if hearing.done() else None
    finally:
        working.cancel()
        hearing.cancel()


class Clock:
    """Limits the total time of several waits to `limit` seconds."""

    def __init__(self, limit: float):
        self._limit = limit
        self.spent = 0.0

    def extend(self, seconds: float) -> None:
        self._limit += seconds

    async def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Waits for work. Raises TimeoutError when the limit is reached."""
        start = time.monotonic()
        try:
            return await asyncio.wait_for(work, max(0.01, self._limit - self.spent))
        finally:
            self.spent += time.monotonic() - start
