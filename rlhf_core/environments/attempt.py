"""Runs one attempt at an episode: sends the environment's requests to an engine, several at once, and reads
its rewards."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict
from typing import Any

from rlhf_core.data.documents import Prompt
from rlhf_core.data.pictures.environment_content import in_base64
from rlhf_core.data.pictures.message_parts import named_pictures, picture_names_in, with_sources
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.environments.episode_contract import EnginePool, EpisodeRequest
from rlhf_core.environments.process import LOOK_SECONDS, Failed, Process
from rlhf_core.environments.trajectories.joined_trajectories import JoinedTrajectories
from rlhf_core.environments.trajectories.trajectory import Full
from rlhf_core.rewards.reward_contract import bounded
from rlhf_core.rollout.engine_contract import Pictures, Sampling

Mail = dict[str, Any] | Failed  # a line from the environment's process, or the reason why it ended


class Clock:
    """Counts the seconds that the environment itself uses against `limit`."""

    def __init__(self, limit: float):
        self.limit = limit
        self.spent = 0.0

    def extend(self, seconds: float) -> None:
        self.limit += seconds

    @property
    def left(self) -> float:
        return max(0.01, self.limit - self.spent)


class EpisodeAttempt:
    """One attempt at an episode. `number`: its ID in the environment's process. `seed`: the seed of its
    answers. `timeout`: the environment's time limit in seconds, for messages. `images`: whether the
    environment may send images."""

    def __init__(
        self,
        process: Process,
        number: int,
        asked: EpisodeRequest,
        seed: int,
        trajectories: JoinedTrajectories,
        sampling: Sampling,
        clock: Clock,
        timeout: float,
        engines: EnginePool,
        images: bool,
    ):
        self._process = process
        self._number = number
        self._asked = asked
        self._seed = seed
        self._trajectories = trajectories
        self._sampling = sampling
        self._clock = clock
        self._timeout = timeout
        self._engines = engines
        self._images = images
        self._requests = 0
        self._answering = dict[int, asyncio.Task[None]]()  # by call
        self._held = list[dict[str, Any]]()  # requests that wait until others release their tokens

    async def run(self) -> list[float]:
        """Returns the reward of each answer. Raises Failed if the episode fails. If the environment stops
        waiting for an answer, the engine stops generating it."""
        self._engine = self._engines.reserve()
        self._mailbox: asyncio.Queue[Mail] = asyncio.Queue()
        self._process.episodes[self._number] = self._mailbox
        done = False
        try:
            self._send_start(self._asked.prompt)
            while True:
                told = await self._next()
                done = isinstance(told, Failed) or "error" in told or "rewards" in told
                if isinstance(told, Failed):
                    raise told
                if "error" in told:
                    raise Failed(told["error"], place=told["place"], certain=told["certain"])
                if "rewards" in told:
                    return self._rewards(told)
                if "drop" in told:
                    self._drop(told["call"])
                else:
                    self._begin(told)
        finally:
            for task in self._answering.values():
                task.cancel()
            self._engines.release(self._engine)
            self._process.episodes.pop(self._number, None)
            if not done:
                self._process.send(cancel=self._number)

    def _send_start(self, prompt: Prompt) -> None:
        """Sends the row and its prompt. Images are the paths of their files, or their content in base64."""
        sources = [_readable(picture.source) for picture in prompt.pictures]
        messages = named_pictures(with_sources(prompt.messages, sources))
        task = {**prompt.row, "messages": messages}
        self._process.send(
            start=self._number,
            task=task,
            messages=messages,
            seed=self._asked.shared,
            images=self._images,
            own=_own_files(prompt),
        )

    async def _next(self) -> Mail:
        """Returns the next line from the environment, whose time counts only while no engine is answering.
        Raises Failed when its time is up, and any error of an engine."""
        hearing = asyncio.create_task(self._mailbox.get())
        try:
            while not hearing.done():
                alone = not self._answering
                start = time.monotonic()
                await asyncio.wait(
                    {hearing, *self._answering.values()},
                    timeout=self._clock.left if alone else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._clock.spent += (time.monotonic() - start) * alone
                self._collect_answered()
                if alone and not _ends(hearing):
                    self._check_time()
            return hearing.result()
        finally:
            hearing.cancel()

    def _check_time(self) -> None:
        if self._process.held() or self._process.ended:  # the mailbox will report which episode is at fault
            self._clock.extend(2 * LOOK_SECONDS)
        elif self._clock.spent >= self._clock.limit:
            raise Failed(f"took more than {self._timeout:g} s (timeout)", late=True)

    def _collect_answered(self) -> None:
        """Forgets requests that have been answered. Raises the error of a request that failed."""
        for call, task in list(self._answering.items()):
            if task.done():
                del self._answering[call]
                task.result()
                self._begin_held()

    def _begin_held(self) -> None:
        held = self._held
        self._held = []
        for told in held:
            self._begin(told)

    def _begin(self, told: dict[str, Any]) -> None:
        """Sends a request to the engine. Delays the request if the token limit leaves no room for it in
        addition to the requests being answered."""
        call = told["call"]
        try:
            tokens, room = self._trajectories.ask(call, told)
        except Full as full:
            if self._answering:
                self._held.append(told)
            else:
                self._trajectories.cut(full.limit)
                self._process.send(answer=self._number, call=call, limit=str(full))
            return
        except Exception as error:  # the environment's messages do not fit the template for some reason
            if told["conversation"] == 0:
                raise Failed(str(error)) from error
            self._process.send(answer=self._number, call=call, wrong=f"{type(error).__name__}: {error}")
            return
        turn = self._requests
        self._requests += 1
        seed = self._seed if not turn else random.Random(f"{self._seed}-turn-{turn}").getrandbits(48)
        how = self._sampling._replace(n=1, max_new_tokens=room)
        pictures = self._trajectories.pictures_of(call)
        answering = self._answer(call, list(tokens), seed, how, pictures)
        self._answering[call] = asyncio.create_task(answering)

    async def _answer(
        self, call: int, tokens: list[int], seed: int, how: Sampling, pictures: Pictures
    ) -> None:
        answer = await self._engines.ask(self._engine, tokens, seed, how, pictures)
        seen, message = self._trajectories.take(call, answer)
        self._process.send(answer=self._number, call=call, **asdict(seen), message=message)

    def _drop(self, call: int) -> None:
        """Aborts a request whose answer is no longer needed. Leaves requests of the `model.answer`
        conversation open, because it cannot continue without its answer and reports that itself."""
        self._held = [told for told in self._held if told["call"] != call]
        task = self._answering.get(call)
        if task is not None and not self._trajectories.of_row(call):
            task.cancel()
            del self._answering[call]
            self._trajectories.give_up(call)
            self._begin_held()

    def _rewards(self, told: dict[str, Any]) -> list[float]:
        for call in self._answering:
            if self._trajectories.of_row(call):
                raise Failed(
                    "the episode ended while the model answered: the environment cancelled model.answer()"
                )
        given = dict(zip(told["calls"], bounded(told["rewards"]), strict=True))
        try:
            return self._trajectories.rewarded({call: float(reward) for call, reward in given.items()})
        except LookupError:  # waiting for an answer was cancelled
            raise Failed(
                "an answer came that nobody waited for: the environment cancelled model.answer()"
            ) from None


def _readable(source: PictureSource) -> PictureSource:
    """Returns the image with a name that can be sent: the path of its file or, if it has no file, its content
    in base64."""
    return source._replace(name=in_base64(bytes(source.data)) if len(source.data) else source.file)


def _own_files(prompt: Prompt) -> dict[str, str]:
    """Returns the files of the prompt's images, by their paths as the row and the prompt's messages name
    them."""
    files = dict[str, str]()
    # sources have absolute folders (`PictureSource.anywhere`), so only the messages have the row's paths
    for name, picture in zip(picture_names_in(prompt.messages), prompt.pictures, strict=True):
        if not len(picture.source.data):
            file = picture.source.file
            files[name] = file
            files[file] = file
    return files


def _ends(hearing: asyncio.Task[Mail]) -> bool:
    """Returns whether the line just received ends the attempt regardless."""
    if not hearing.done():
        return False
    told = hearing.result()
    return isinstance(told, Failed) or "rewards" in told or "error" in told
