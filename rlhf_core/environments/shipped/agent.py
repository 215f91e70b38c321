"""`environment: {agent: ...}`: trains an agent that one did not write, by the address of its model.

The agent is a function `path.py:run`, called as `run(task, base_url, api_key)`, or a command. It asks the
policy through an OpenAI-compatible endpoint (`agent_endpoint`), as often and in as many conversations as it
likes. Its result is the function's return value, or the command's output. `checker`, a function
`path.py:check`, called as `check(task, result)`, returns the reward; without it the result is the reward.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_core.environments.agents.agent_command import adopt_orphans, run_command
from rlhf_core.environments.agents.agent_endpoint import AgentEndpoint
from rlhf_core.environments.conversation import Conversation, LimitReached
from rlhf_core.system.processes import users_module


class Agent:
    """Runs agents. `agent`: path.py:function, or a command. `checker`: path.py:function, or None. `options`:
    further arguments of the agent's function. `threads`: how many functions that are not async run at
    once."""

    def __init__(
        self,
        agent: str,
        checker: str | None = None,
        options: dict[str, Any] | None = None,
        threads: int = 256,
    ):
        self._run = function_of(agent, "agent") if ".py:" in agent else None
        self._command = agent
        self._check = function_of(checker, "checker") if checker is not None else None
        self._options = options or {}
        if self._run is None and self._options:
            raise ValueError(
                "options are arguments of a function: leave them out, or write them in the command"
            )
        self.users_function = self._run
        if self._run is None:
            adopt_orphans()
        self._threads = ThreadPoolExecutor(threads)
        self._endpoint = AgentEndpoint()

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        with self._endpoint.session(model) as (key, session):
            try:
                result = await self._result(task, key)
            except Exception as error:
                if session.limited:  # the agent did not survive the refusal
                    raise LimitReached(session.limited) from error
                raise
        if self._check is not None:
            result = await self._called(self._check, task, result)
        if not isinstance(result, bool | int | float) and not hasattr(result, "__float__"):
            what = "checker" if self._check is not None else "agent"
            raise ValueError(f"the {what} returned {result!r:.60}, no number: return the reward")
        return float(result)

    async def _result(self, task: dict[str, Any], key: str) -> Any:
        if self._run is None:
            return await run_command(self._command, task, self._endpoint.url, key)
        return await self._called(self._run, task, self._endpoint.url, key, **self._options)

    async def _called(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Calls a function of the user; one that is not async in a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **named)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **named))


def function_of(place: str, what: str) -> Callable[..., Any]:
    """Imports `path.py:function`. Raises ValueError."""
    path, _, name = place.rpartition(":")
    found = getattr(users_module(Path(path), what), name, None)
    if not callable(found):
        raise ValueError(f"{path} has no function {name!r}; correct the {what}")
    return found
