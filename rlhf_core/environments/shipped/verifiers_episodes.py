"""`environment: {verifiers: NAME}`: plays the tasks of an environment of the package `verifiers`, unmodified.

The environment runs in its own interpreter (see `data/verifiers_driver`), since the package's dependencies
may conflict with alignflow's. Its client calls this process's endpoint (see `agent_endpoint`), and its rubric
computes the reward.
"""

from __future__ import annotations

import asyncio
import builtins
import json
from typing import Any

from rlhf_core.config.generated_data import VERIFIERS
from rlhf_core.environments.agents.agent_endpoint import AgentEndpoint
from rlhf_core.environments.agents.driver_process import DriverProcess
from rlhf_core.environments.agents.users_functions import reward_of
from rlhf_core.environments.conversation import Conversation, LimitReached
from rlhf_core.system.processes import LASTING


class RaisedByEnvironment(ValueError):
    """Raised when an episode fails with an error in the environment's code that would recur in every
    attempt."""


class FailedEnvironment(RuntimeError):
    """Raised when an episode has no reward, for a reason that might not recur in another attempt."""


class VerifiersEpisodes:
    """Runs the environment `name` with `options` in the interpreter `python` (None: this one). Raises
    ValueError with a user-facing message when it cannot be loaded."""

    users_function = None  # errors already name their line

    def __init__(self, name: str, options: dict[str, Any] | None = None, python: str | None = None):
        self._endpoint = AgentEndpoint()
        self._python = python
        self._asked = {
            "name": name,
            "options": options or {},
            "url": self._endpoint.url,
            "key": self._endpoint.shared_key,
        }
        self._driver = DriverProcess(python, self._asked)
        self._attached = False
        self._starting = asyncio.Lock()

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        if VERIFIERS not in task:
            raise ValueError(
                f"the row has no column {VERIFIERS!r}: take the prompts from sources: {{{VERIFIERS}: ...}}"
            )
        driver = await self._ready()
        with self._endpoint.session(model) as (_, session):
            told = await driver.run(json.loads(task[VERIFIERS]), session.name)
            # report the refused request's error, not that of the code that ran after it
            if session.limited and session.limited in told.get("error", ""):
                raise LimitReached(session.limited)
        if "error" in told:
            kind = RaisedByEnvironment if lasts(told["raised"]) else FailedEnvironment
            raise kind(told["error"])
        return reward_of(told.get("reward"), "environment")

    async def _ready(self) -> DriverProcess:
        """Returns the environment's process, restarting it if it has ended."""
        async with self._starting:
            if self._driver.ended:
                self._driver = await asyncio.to_thread(DriverProcess, self._python, self._asked)
                self._attached = False
            if not self._attached:
                await self._driver.attach()
                self._attached = True
            return self._driver


def lasts(name: str) -> bool:
    """Returns whether a built-in error with this name would recur in every attempt."""
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, LASTING) and not issubclass(kind, OSError)
