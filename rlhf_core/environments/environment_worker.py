"""Runs a user's environment, many episodes at once: `python -m rlhf_core.environments.environment_worker FILE
CLASS OPTIONS MARK`.

The worker and its parent exchange lines of JSON. The worker's first line reports either that the class is
loaded, with its tools, or why it could not be loaded. Then, for each episode:

    in   {"start": ID, "task": {...}, "messages": [...], "seed": N, "images": ...,
          "own": {...}}
         {"answer": ID, "call": N, ...}
         {"cancel": ID}
    out  {"id": ID, "call": N, "ask": [messages], ...}, like `Conversation`'s requests
         {"id": ID, "call": N, "drop": true}, if nobody is waiting for the answer any longer
         {"id": ID, "rewards": [...], "calls": [N, ...]}
         {"id": ID, "error": "...", "place": "...", "certain": ...}, like `UsersError`

MARK is the descriptor of a shared page. Before each step of an episode the worker writes the episode's ID and
a counter there, so that the parent knows which episode ended the process or blocks all others. The
environment's output goes to stderr. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import json
import math
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from threading import Thread
from typing import Any

from rlhf_core.environments.conversation import Conversation, LimitReached
from rlhf_core.system.processes import UsersError, users_error, users_module

PAGE = struct.Struct("<QQ")  # the ID of the episode being stepped, plus 1 (0: none), and a step counter
WORKER = os.getpid()
SHIPPED = Path(__file__).parent / "shipped"
episode_now: contextvars.ContextVar[int] = contextvars.ContextVar("episode_now", default=-1)


def end_if_forked() -> None:
    """Ends a process forked by the environment's code, because only the worker may continue episodes and
    write to the parent."""
    if os.getpid() != WORKER:
        os._exit(0)


class Marked(Coroutine[Any, Any, Any]):
    """Runs a coroutine, and records the episode of each of its steps on the shared page."""

    steps = 0

    def __init__(self, inner: Coroutine[Any, Any, Any], page: mmap.mmap, episode: int):
        self._inner = inner
        self._page = page
        self._episode = episode

    def _step(self, function: Callable[..., Any], *args: Any) -> Any:
        Marked.steps += 1
        PAGE.pack_into(self._page, 0, self._episode + 1, Marked.steps)
        try:
            return function(*args)
        finally:
            end_if_forked()
            PAGE.pack_into(self._page, 0, 0, Marked.steps)

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:  # such as cr_running, which anyio reads
        return getattr(self._inner, name)


def load(file: Path, name: str, options: dict[str, Any]) -> Any:
    """Returns a new environment, which may import modules from its file's folder. Raises ValueError when this
    fails."""
    kind = getattr(users_module(file, "environment"), name, None)
    if not inspect.isclass(kind) or not inspect.iscoroutinefunction(getattr(kind, "rollout", None)):
        raise ValueError(
            f"{file} has no class {name!r} with `async def rollout(self, task, model)`; correct the"
            " environment"
        )
    try:
        return kind(**options)
    except Exception as error:
        if file.parent == SHIPPED and isinstance(error, TypeError | ValueError):  # explains how to fix it
            raise ValueError(f"environment: {error}") from error
        told = users_error(error, file, kind.__init__).text
        raise ValueError(
            f"{file}: {name}(**{options}) cannot be made: {told}; correct its options"
        ) from error


class EpisodeRunner:
    """Runs the episodes of one process."""

    def __init__(self, environment: Any, file: Path, out: Any, page: mmap.mmap):
        self._environment = environment
        self._file = file
        self._out = out
        self._page = page
        self._running: dict[int, asyncio.Task[None]] = {}
        # by episode and call
        self._answers: dict[tuple[int, int], asyncio.Future[dict[str, Any]]] = {}

    def say(self, **line: Any) -> None:
        end_if_forked()
        print(json.dumps(line, default=str), file=self._out, flush=True)

    def hear(self, line: dict[str, Any]) -> None:
        if "start" in line:
            number = line["start"]
            context = contextvars.copy_context()
            context.run(episode_now.set, number)
            self._running[number] = asyncio.get_running_loop().create_task(
                self._run(number, line), context=context
            )
        elif (
            "answer" in line
            and (waiting := self._answers.pop((line["answer"], line["call"]), None)) is not None
            and not waiting.done()
        ):
            waiting.set_result(line)
        elif "cancel" in line and (task := self._running.get(line["cancel"])) is not None:
            task.cancel()

    async def _run(self, number: int, line: dict[str, Any]) -> None:
        calls = itertools.count()

        async def ask(request: dict[str, Any]) -> dict[str, Any]:
            call = next(calls)
            future = self._answers[number, call] = asyncio.get_running_loop().create_future()
            self.say(id=number, call=call, **request)
            try:
                return await future
            except asyncio.CancelledError:
                self.say(id=number, call=call, drop=True)
                raise
            finally:
                self._answers.pop((number, call), None)

        folder = str(self._file.parent)
        model = Conversation(line["messages"], line["seed"], ask, line["images"], folder, line["own"])
        try:
            try:
                final, whole = await self._environment.rollout(line["task"], model), True
            except LimitReached:
                final = None
                whole = False
            self.say(id=number, rewards=rewards_of(model, final, whole), calls=model.answered)
        except asyncio.CancelledError:
            pass
        except (
            Exception,
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # any error in the user's code makes the attempt fail
            told = self._told(error)
            self.say(id=number, error=shortened(told.text), place=told.place, certain=told.certain)
        finally:
            self._running.pop(number, None)

    def _told(self, error: BaseException) -> UsersError:
        """Describes an error, with its line in the user's code. The user's code is the environment itself, or
        the function that the environment calls and names in `users_function` (None: a command)."""
        called = getattr(self._environment, "users_function", self._environment.rollout)
        if called is None:
            return users_error(error, Path())
        code = getattr(inspect.unwrap(called), "__code__", None)
        return users_error(error, Path(code.co_filename) if code else self._file, called)


def shortened(text: str) -> str:
    """Shortens a string to at most 500 characters. Keeps the end, which contains the line of an error."""
    return text if len(text) <= 500 else f"{text[:250]} ... {text[-245:]}"


def rewards_of(model: Conversation, final: Any, whole: bool) -> list[float]:
    """Returns the reward of each answer; the last one includes the return value of `rollout`. `whole`:
    whether the rollout ended without hitting a limit. Raises ValueError if there is no valid reward."""
    if not model.turns:
        raise ValueError("rollout() ended without an answer of the model")
    if whole and final is None and not model.rewarded:
        raise ValueError("rollout() returned None and gave no reward by model.reward()")
    if final is not None:
        if isinstance(final, str) or (
            not isinstance(final, bool | int | float) and not hasattr(final, "__float__")
        ):
            raise ValueError(f"rollout() returned {final!r:.60}, no number")
        model.reward(float(final))
    if not all(map(math.isfinite, model.rewards)):
        raise ValueError(f"rollout() gave a reward that is not finite: {model.rewards}")
    return model.rewards


async def main(file: str, name: str, options: str, mark: int) -> None:
    """Serves until stdin is closed."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    Thread(target=end_group_with, args=(os.getppid(),), daemon=True).start()
    page = mmap.mmap(mark, PAGE.size)
    loop = asyncio.get_running_loop()

    def marked(loop: Any, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        context = named.get("context") or contextvars.copy_context()
        return asyncio.Task(Marked(coroutine, page, context.get(episode_now, -1)), loop=loop, **named)

    loop.set_task_factory(marked)
    lines = asyncio.StreamReader(limit=2**30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    try:
        environment = load(Path(file), name, json.loads(options))
        episodes = EpisodeRunner(environment, Path(file), out, page)
        episodes.say(ready=True, tools=list(getattr(environment, "tools", [])))
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return
    while line := await lines.readline():
        episodes.hear(json.loads(line))
    os.killpg(0, signal.SIGKILL)  # kills everything it has started, without waiting for its threads


def end_group_with(parent: int) -> None:
    """Ends this process and everything it has started once its parent is gone, even while a step blocks the
    event loop."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
