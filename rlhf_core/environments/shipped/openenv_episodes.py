"""`environment: {openenv: URL}`: plays episodes on an OpenEnv server.

Each answer of the model becomes an action, and each observation the next message, until the server reports
that the episode is done. On servers whose actions are MCP tools, the model's calls are sent instead, until it
answers without a call. Each episode has its own session.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlhf_core.environments.agents.openenv_actions import (
    action_of,
    action_problem,
    shown_to,
    takes_tools,
    text_field,
    tool_text,
    tools_of,
)
from rlhf_core.environments.agents.openenv_session import (
    ActionRefused,
    OpenEnvServer,
    OpenEnvSession,
    OpenEnvStep,
    ServerFault,
)
from rlhf_core.environments.agents.own_loop import in_a_loop_of_its_own
from rlhf_core.environments.conversation import Answer, Conversation, LimitReached
from rlhf_core.environments.joined_calls import Message

CALLS = 8  # maximum number of tool calls in one answer
CUT = "a limit of tokens cut the last answer"


class OpenEnvEpisodes:
    """Plays episodes on the server at `url`.

    `field`: the action field that receives the answer's text; by default the only one that the server's
    schema requires. If it requires several, the answer must contain a JSON object. `action`: constant fields
    of every action. `observe`: fields of the observation that the model sees; empty: all. `reward`: whether
    the steps' rewards are summed or only the last one counts. `reset`: arguments of the reset; the arguments
    in a row's column `reset` are added to them. `seconds`: time limit of one answer from the server.
    `longest`: maximum number of characters in an observation. `token_env`: the variable that holds a bearer
    token. Raises ValueError with a user-facing message when the server cannot be used.
    """

    users_function = None  # errors have no line to point to

    def __init__(
        self,
        url: str,
        field: str | None = None,
        action: Mapping[str, Any] | None = None,
        observe: Sequence[str] = (),
        reward: Literal["sum", "last"] = "sum",
        reset: Mapping[str, Any] | None = None,
        seconds: float = 30.0,
        longest: int = 8192,
        token_env: str | None = None,
    ):
        if reward not in ("sum", "last"):
            raise ValueError(f"options.reward must be sum or last, not {reward!r:.40}")
        token = None if token_env is None else os.environ.get(token_env)
        if token_env is not None and not token:
            raise ValueError(f"the variable {token_env} is empty: set it to the token of the OpenEnv server")
        self._server = OpenEnvServer(url, token, seconds)
        self._action = dict(action or {})
        self._observe = tuple(observe)
        self._last_counts = reward == "last"
        self._reset = dict(reset or {})
        self._longest = longest
        try:
            self._schema = self._server.action_schema()
            self.tools = in_a_loop_of_its_own(self._listed) if takes_tools(self._schema) else []
        except ServerFault as fault:
            raise ValueError(str(fault)) from fault
        self._field = field or text_field(self._schema)
        problem = "" if self.tools else action_problem(self._schema, self._field, self._action)
        if problem:
            raise ValueError(f"the OpenEnv server {self._server.name}: {problem}")

    async def _listed(self) -> list[dict[str, Any]]:
        async with self._server.session() as session:
            await session.reset(self._reset)
            try:
                return tools_of((await session.step({"type": "list_tools"})).observation)
            except ValueError as error:
                raise ServerFault(f"the OpenEnv server {self._server.name}: {error}") from error

    async def rollout(self, task: dict[str, Any], model: Conversation) -> None:
        own = task.get("reset") or {}
        if not isinstance(own, dict):
            raise ValueError(f"the column reset must be a mapping of arguments, not {own!r:.60}")
        async with self._server.session() as session:
            first = await session.reset({"seed": model.random.getrandbits(31), **self._reset, **own})
            rewards = RewardsOfSteps(model, self._last_counts)
            try:
                await (self._call_tools if self.tools else self._act)(session, first, model, rewards)
            except LimitReached:
                rewards.give()
                raise
        rewards.give()
        if not model.rewarded:
            raise ValueError(f"the OpenEnv server {self._server.name} gave no reward in {model.turns} steps")

    async def _act(
        self, session: OpenEnvSession, step: OpenEnvStep, model: Conversation, rewards: RewardsOfSteps
    ) -> None:
        """Steps with the text of each answer until the episode is done. Raises LimitReached if a limit is
        reached first."""
        said = self._seen(step, model)
        answer = await model.answer(*[said] if said else [])
        while answer.finished:
            told = await self._stepped(session, answer, model, rewards)
            if told is None:
                return
            answer = await model.answer(told)
        raise LimitReached(CUT)

    async def _stepped(
        self, session: OpenEnvSession, answer: Answer, model: Conversation, rewards: RewardsOfSteps
    ) -> str | Message | None:
        """Returns the next message for the model; None when the episode is done."""
        try:
            action = action_of(answer.text, self._field, self._schema, self._action)
            step = await session.step(action)
        except (ActionRefused, ValueError) as error:
            return f"error: {error}"
        rewards.add(step.reward)
        return None if step.done else self._seen(step, model) or "(nothing)"

    async def _call_tools(
        self, session: OpenEnvSession, step: OpenEnvStep, model: Conversation, rewards: RewardsOfSteps
    ) -> None:
        """Steps with each call until the episode is done, or until an answer has no calls, which gets the
        reward 0. Raises LimitReached if a limit is reached first."""
        said = self._seen(step, model)
        answer = await model.answer(*[said] if said else [])
        while answer.calls and answer.finished:
            results = []
            for number, call in enumerate(answer.calls):
                text = f"error: an answer may have {CALLS} calls" if number >= CALLS else call.wrong
                if not text:
                    action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                    try:
                        step = await session.step(action)
                    except ActionRefused as error:
                        text = f"error: {error}"
                    else:
                        rewards.add(step.reward)
                        text = tool_text(step.observation, self._longest)
                        if step.done:
                            return
                results.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
            answer = await model.answer(*results)
        if not answer.finished:
            raise LimitReached(CUT)
        model.reward(0.0)  # an episode that ends without a step also needs a reward

    def _seen(self, step: OpenEnvStep, model: Conversation) -> str | Message:
        return shown_to(model.images, step.observation, self._observe, self._longest)


class RewardsOfSteps:
    """Adds the rewards of steps to a conversation: either each reward immediately, or only the last reward at
    the end."""

    def __init__(self, model: Conversation, last_counts: bool):
        self._model = model
        self._last_counts = last_counts
        self._last: float | None = None

    def add(self, reward: float | None) -> None:
        if reward is None:
            return
        if self._last_counts:
            self._last = reward
        else:
            self._model.reward(reward)

    def give(self) -> None:
        if self._last is not None:
            self._model.reward(self._last)
