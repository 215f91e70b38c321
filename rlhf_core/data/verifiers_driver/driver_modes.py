"""Implements the modes of the driver: reads requests and answers them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from .driver_errors import Failure, Problem, failure_of
from .installed_environment import release_of
from .old_environment import OldEnvironment
from .seat_environment import SeatEnvironment
from .supervision import begin_under_supervision

KEY_VARIABLE = "ALIGNFLOW_API_KEY"  # because of this name, verifiers does not pass it to programs it starts
LONGEST_LINE = 2**30  # bytes

Say = Callable[..., None]


def main() -> None:
    if sys.argv[1] == "serve":
        begin_under_supervision(int(sys.argv[2]))
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def say(**line: Any) -> None:
        print(json.dumps(line, default=str), file=out, flush=True)

    asked = json.loads(first_line())
    try:
        MODES[sys.argv[1]](asked, say)
    except Problem as problem:
        say(problem=str(problem))


def first_line() -> bytes:
    """Reads one line, and nothing beyond it."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return bytes(line)


def loaded(asked: Mapping[str, Any]) -> OldEnvironment | SeatEnvironment:
    """Returns the environment. Raises Problem if it cannot be loaded."""
    release_of(asked["name"])
    import verifiers

    kind = OldEnvironment if hasattr(verifiers, "load_environment") else SeatEnvironment
    try:
        return kind(asked["name"], dict(asked["options"]))
    except Problem:
        raise
    except Exception as error:  # the environment's code may raise any error
        traceback.print_exc()
        raise Problem(f"verifiers cannot load it: {failure_of(error)}; correct its options") from error


def release(asked: dict[str, Any], say: Say) -> None:
    say(**release_of(asked["name"]))


def rows(asked: dict[str, Any], say: Say) -> None:
    environment = loaded(asked)
    if environment.is_endless and not asked["sized"]:
        raise Problem(f"the tasks of {asked['name']} do not end: set size, beside environment")
    try:
        for row in itertools.islice(environment.tasks(asked["dataset"]), asked["count"]):
            say(**row)
    except Exception as error:
        traceback.print_exc()
        raise Problem(f"its tasks cannot be loaded: {failure_of(error)}") from error


def serve(asked: dict[str, Any], say: Say) -> None:
    os.environ[KEY_VARIABLE] = asked["key"]
    environment = loaded(asked)
    asyncio.run(environment.serve(asked["url"], KEY_VARIABLE, EpisodeServer(environment, say).serve))


class EpisodeServer:
    """Runs the episodes requested on stdin, many at once."""

    def __init__(self, environment: OldEnvironment | SeatEnvironment, say: Say):
        self._environment = environment
        self._say = say
        self._running = dict[int, asyncio.Task[None]]()

    async def serve(self) -> None:
        """Serves until stdin ends."""
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
        self._say(ready=True)
        while line := await lines.readline():
            asked = json.loads(line)
            if "start" in asked:
                self._running[asked["start"]] = asyncio.create_task(self._episode(asked))
            elif (task := self._running.get(asked["cancel"])) is not None:
                task.cancel()
        os._exit(0)  # the parent process kills what this process has started

    async def _episode(self, asked: Mapping[str, Any]) -> None:
        number = asked["start"]
        try:
            self._say(id=number, **await self._environment.run(asked["task"], asked["model"]))
        except asyncio.CancelledError:
            self._say(id=number, cancelled=True)
        except Failure as failure:
            self._say(id=number, error=str(failure), raised=failure.raised)
        except Exception as error:  # the environment's code may raise any error
            told = failure_of(error)
            self._say(id=number, error=str(told), raised=told.raised)
        finally:
            self._running.pop(number, None)


MODES: dict[str, Callable[[dict[str, Any], Say], None]] = {"release": release, "rows": rows, "serve": serve}
