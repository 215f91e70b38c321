"""Starts an environment's process (see `environment_worker.py`), and detects which episode crashed it or
blocked all the others."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlhf_core.data.pictures.environment_content import in_base64
from rlhf_core.environments.environment_worker import PAGE
from rlhf_core.system.processes import child_environment, how_ended, kill_group

LOOK_SECONDS = 0.25
LONGEST_LINE = 2**26  # bytes
START_SECONDS = 120.0
ENDING_SECONDS = 5.0  # how long a process may take to end once it has closed its output


class Failed(Exception):
    """Raised when an attempt at an episode fails; the message says why. `guilty`: whether the episode itself
    is known to have caused the failure. `late`: whether the attempt exceeded its time limit. `place`,
    `certain`: as in `UsersError`."""

    def __init__(
        self, reason: str, guilty: bool = True, late: bool = False, place: str = "", certain: bool = False
    ):
        super().__init__(reason)
        self.guilty = guilty
        self.late = late
        self.place = place
        self.certain = certain


class Process:
    """A process of an environment. `seconds`: how long one step of an episode may block the others.

    Created by `start`. `tools`: JSON schemas of the environment's tools. `episodes`: the mailbox of each
    running episode. `episodes_at_end`: the number of episodes that were running when the process ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        page: mmap.mmap,
        seconds: float,
        tools: Sequence[dict[str, Any]],
    ):
        self._process = process
        self._page = page
        self._seconds = seconds
        self.tools = list(tools)
        self.episodes: dict[int, asyncio.Queue[dict[str, Any] | Failed]] = {}
        self.ended = False
        self.episodes_at_end = 0
        self._blocked = False
        self._held = (-1, 0.0)  # the episode being stepped, and since when
        self._work = [asyncio.create_task(self._read()), asyncio.create_task(self._look())]

    @classmethod
    async def start(
        cls, file: str, name: str, options: dict[str, Any], seconds: float, sandbox: str
    ) -> Process:
        """Starts a process and returns it. Raises ValueError when the process cannot create the
        environment."""
        descriptor = os.memfd_create("alignflow-episode")
        try:
            os.ftruncate(descriptor, PAGE.size)
            page = mmap.mmap(descriptor, PAGE.size)
            environment = {
                key: value for key, value in child_environment().items() if key != "PYTHONSAFEPATH"
            }
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "rlhf_core.environments.environment_worker",
                    file,
                    name,
                    json.dumps(options),
                    str(descriptor),
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment | {"ALIGNFLOW_SANDBOX": sandbox},
                pass_fds=(descriptor,),
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        finally:
            os.close(descriptor)
        assert process.stdout is not None
        try:
            ready = json.loads(await asyncio.wait_for(process.stdout.readline(), START_SECONDS) or b"{}")
        except (TimeoutError, ValueError):
            ready = {
                "error": f"{file}: {name} is not made after {START_SECONDS:.0f} s; correct the environment"
            }
        if "ready" not in ready:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 0 if ready else ENDING_SECONDS)
            ending = "wrote no more" if process.returncode is None else how_ended(process.returncode)
            kill_group(process.pid)
            await process.communicate()
            raise ValueError(
                ready.get("error") or f"{file}: the process that makes {name} {ending}; look at the log above"
            )
        return cls(process, page, seconds, ready["tools"])

    def send(self, **line: Any) -> None:
        """Sends a line. Drops it if the process has ended, in which case the mailboxes of its episodes hold
        `Failed`."""
        assert self._process.stdin is not None
        if not self.ended:
            self._process.stdin.write(json.dumps(line, default=_as_json).encode() + b"\n")

    def _running(self) -> tuple[int, int]:
        """Returns the episode being stepped (-1: none), and the step counter."""
        episode, steps = PAGE.unpack_from(self._page, 0)
        return episode - 1, steps

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
                told = json.loads(line) if line.endswith(b"\n") else None
            except (
                ValueError,
                RecursionError,
            ):  # a line that never ends, or not JSON: something else writes to the descriptor
                told = None
            if told is None:
                break
            mailbox = self.episodes.get(told.get("id"))
            if mailbox is not None:
                mailbox.put_nowait(told)
        self.ended, self.episodes_at_end = True, len(self.episodes)
        ending = f"ended its process, which {await self._ending()}"
        guilty, _ = self._running()
        what = f"kept its process busy for {self._seconds:g} s" if self._blocked else ending
        for episode, mailbox in self.episodes.items():
            own = episode == guilty
            reason = what if own else f"another episode {ending}"
            mailbox.put_nowait(Failed(reason, own or guilty < 0, late=own and self._blocked))

    async def _ending(self) -> str:
        """Waits for a process that has stopped writing to end, kills everything it has started, and returns a
        description of how it ended."""
        try:
            ending = how_ended(await asyncio.wait_for(self._process.wait(), ENDING_SECONDS))
        except TimeoutError:
            ending = "closed its output"
        kill_group(self._process.pid)
        await self._process.wait()
        return ending

    def held(self) -> bool:
        """Returns whether one step has blocked all episodes for more than LOOK_SECONDS. `_look` enforces the
        limit."""
        episode, since = self._held
        return episode >= 0 and time.monotonic() - since > LOOK_SECONDS

    async def _look(self) -> None:
        """Kills the process when one step takes longer than its limit."""
        last = (-1, 0)
        since = time.monotonic()
        while not self.ended:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._running()
            if now != last or now[0] < 0:
                last = now
                since = time.monotonic()
                self._held = now[0], since
            elif time.monotonic() - since > self._seconds:
                self._blocked = True
                kill_group(self._process.pid)
                return

    async def close(self) -> None:
        for work in self._work:
            work.cancel()
        self.ended = True
        kill_group(self._process.pid)
        await self._process.wait()


def _as_json(value: Any) -> str:
    """Converts a value that JSON cannot represent to text. Bytes, such as a row's image, become base64."""
    return in_base64(value) if isinstance(value, bytes) else str(value)
