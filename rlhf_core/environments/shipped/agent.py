"""`environment: {agent: ...}`: trains an agent, possibly written by somebody else, by serving the policy as
the agent's model.

The agent is a function `path.py:run`, called as `run(task, base_url, api_key)`, or a command. The agent calls
the policy through an OpenAI-compatible endpoint (see `agent_endpoint`), as often and in as many conversations
as it likes. Its result is the function's return value or the command's output. `checker`, a function
`path.py:check` called as `check(task, result)`, returns the reward; without it the result is the reward.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlhf_core.environments.agents.agent_command import adopt_orphans, run_command
from rlhf_core.environments.agents.agent_endpoint import AgentEndpoint
from rlhf_core.environments.agents.users_functions import called, function_of, require_arguments, reward_of
from rlhf_core.environments.conversation import Conversation, LimitReached


class Agent:
    """Runs agents. `agent`: path.py:function, or a `command`. `checker`: path.py:function, or None.
    `options`: additional arguments of the agent's function. Raises ValueError if either cannot be called."""

    def __init__(
        self, agent: str, command: bool, checker: str | None = None, options: dict[str, Any] | None = None
    ):
        self._options = options or {}
        self._command = agent
        modules = dict[str, ModuleType]()
        self.users_function: Callable[..., Any] | None = None
        if command:
            require_program(agent)
            adopt_orphans()
        else:
            self.users_function = function_of(agent, "agent", modules)
            require_arguments(self.users_function, agent, ({}, "", ""), self._options)
        self._check = None
        if checker is not None:
            self._check = function_of(checker, "checker", modules)
            require_arguments(self._check, checker, ({}, ""), {})
        self._endpoint = AgentEndpoint()

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        with self._endpoint.session(model) as (key, session):
            try:
                result = await self._result(task, key)
            except Exception as error:
                if session.limited:  # the agent failed because of the refusal
                    raise LimitReached(session.limited) from error
                raise
        if self._check is not None:
            result = await called(self._check, task, result)
        return reward_of(result, "agent" if self._check is None else "checker")

    async def _result(self, task: dict[str, Any], key: str) -> Any:
        if self.users_function is None:
            return await run_command(self._command, task, self._endpoint.url, key)
        return await called(self.users_function, task, self._endpoint.url, key, **self._options)


def require_program(command: str) -> None:
    """Raises ValueError when the command's program does not exist."""
    program = shlex.split(command)[0]
    if shutil.which(program) is None:
        raise ValueError(f"the agent {command!r}: there is no program {program!r}; correct the command")
