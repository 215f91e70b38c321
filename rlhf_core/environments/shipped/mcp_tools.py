"""`environment: {mcp: [...]}`: the model uses the tools of MCP servers (Model Context Protocol).

A server is an address (streamable HTTP) or a command (stdio). Each episode has its own session with each
server, so that state kept by a tool does not leak from one answer into another. The model's template
describes the tools. The model's calls are sent to the tools' servers until the model answers without a call.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import mcp

from rlhf_core.data.pictures.environment_content import Content, count_images, images_that_fit
from rlhf_core.environments.agents.agent_command import adopt_orphans, kill_marked
from rlhf_core.environments.agents.mcp_session import McpSession, Servers
from rlhf_core.environments.agents.own_loop import in_a_loop_of_its_own
from rlhf_core.environments.agents.users_functions import called, function_of, require_arguments, reward_of
from rlhf_core.environments.conversation import Answer, Call, Conversation, LimitReached
from rlhf_core.environments.shipped.tools import is_right
from rlhf_core.system.processes import users_error

START_SECONDS = 60.0  # within which all servers must list their tools
MARK = "ALIGNFLOW_EPISODE"  # the variable that identifies the episode of a server process


class McpTools:
    """Answers the model's calls with the tools of `servers`.

    `checker`: path.py:function, called with the task and the text of the last answer; without it the reward
    is 1 if that answer equals the row's column `answer`. `seconds`: time limit of one tool call. `calls`:
    maximum number of calls in one answer. `longest`: maximum number of characters in a result. `token_env`:
    the variable that holds the bearer token for servers with an address. Raises ValueError when a server does
    not list its tools.
    """

    users_function = None  # errors have no line to point to, except those of the checker

    def __init__(
        self,
        servers: Sequence[str],
        checker: str | None = None,
        answer: str = "answer",
        seconds: float = 30.0,
        calls: int = 8,
        longest: int = 8192,
        token_env: str | None = None,
    ):
        self._servers = Servers(servers, None if token_env is None else _token(token_env))
        self._column = answer
        self._seconds = seconds
        self._calls = calls
        self._longest = longest
        self._check: Callable[..., Any] | None = None
        if checker is not None:
            self._file = Path(checker.rpartition(":")[0])
            self._check = function_of(checker, "checker", dict[str, ModuleType]())
            require_arguments(self._check, checker, ({}, ""), {})
        adopt_orphans()
        listed = in_a_loop_of_its_own(self._list_tools)
        names = [tool.name for tools in listed for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several servers have a tool {twice[0]!r}: leave one of them out")
        self._server_of = {tool.name: place for place, tools in enumerate(listed) for tool in tools}
        self.tools = [_schema(tool) for tools in listed for tool in tools]

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        if self._check is None and self._column not in task:
            raise ValueError(
                f"the prompts have no column {self._column!r}: name it in options.answer, or set checker"
            )
        answer = await self._in_sessions(model)
        if self._check is None:
            return float(is_right(answer.text, str(task[self._column])))
        try:
            return reward_of(await called(self._check, task, answer.text), "checker")
        except Exception as error:
            told = users_error(error, self._file, self._check)
            raise ValueError(told.text) from error

    async def _in_sessions(self, model: Conversation) -> Answer:
        """Returns the last answer. Keeps a session with each server open during the conversation."""
        talked: Answer | LimitReached | None = None
        mark = secrets.token_hex(16)
        try:
            async with AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(self._servers.session(place, {MARK: mark}))
                    for place in range(len(self._servers))
                ]
                try:
                    talked = await self._talk(model, sessions)
                except LimitReached as limit:  # sessions wrap exceptions that pass through them
                    talked = limit
        except BaseExceptionGroup as group:
            if talked is None:  # otherwise a server failed while its session was closing
                raise first_of(group) from group
        finally:
            kill_marked(MARK, mark)
        assert talked is not None, "errors were raised"
        if isinstance(talked, LimitReached):
            raise talked
        return talked

    async def _talk(self, model: Conversation, sessions: Sequence[McpSession]) -> Answer:
        """Returns the first answer without calls."""
        answer = await model.answer()
        while answer.calls and answer.finished:
            contents = list[Content]()
            for number, call in enumerate(answer.calls):
                over = f"error: an answer may have {self._calls} calls"
                images = model.images
                contents.append(await self._result(call, sessions, images) if number < self._calls else over)
            before = sum(count_images(message["content"]) for message in model.messages)
            pairs = zip(answer.calls, images_that_fit(contents, before), strict=True)
            answer = await model.answer(*(_message(call, content) for call, content in pairs))
        return answer

    async def _result(self, call: Call, sessions: Sequence[McpSession], images: bool) -> Content:
        """Returns a call's result as the model sees it: at most `longest` characters of each text and, with
        `images`, images. Raises ServerGone if the server fails."""
        if call.wrong or call.name not in self._server_of:
            return f"error: {call.wrong or f'there is no tool {call.name!r}'}"
        session = sessions[self._server_of[call.name]]
        content = await session.call(call.name, call.arguments, self._seconds, images)
        if isinstance(content, str):
            return self._shortened(content)
        return [
            {**part, "text": self._shortened(part["text"])} if part["type"] == "text" else part
            for part in content
        ]

    def _shortened(self, text: str) -> str:
        cut = "" if len(text) <= self._longest else f"\n[{len(text) - self._longest} more characters]"
        return text[: self._longest] + cut

    async def _list_tools(self) -> list[list[mcp.Tool]]:
        """Returns the tools of each server. Raises ValueError for a server that does not list them in
        time."""
        listed = list[list[mcp.Tool]]()
        mark = secrets.token_hex(16)
        try:
            async with asyncio.timeout(START_SECONDS):
                for place in range(len(self._servers)):
                    async with self._servers.session(place, {MARK: mark}, quiet=False) as session:
                        listed.append(await session.tools())
        except (Exception, BaseExceptionGroup) as error:
            first = first_of(error)
            why = str(first) or type(first).__name__
            raise ValueError(
                f"the MCP server {self._servers.name(len(listed))} lists no tools: {why}"
            ) from None
        finally:
            kill_marked(MARK, mark)
        return listed


def first_of(group: BaseException) -> BaseException:
    """Returns the first error in a group of errors, which may be nested."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _token(variable: str) -> str:
    if not os.environ.get(variable):
        raise ValueError(f"the variable {variable} is empty: set it to the token of the MCP servers")
    return os.environ[variable]


def _schema(tool: mcp.Tool) -> Mapping[str, Any]:
    """Returns a tool in the format that chat templates take."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _message(call: Call, content: Content) -> dict[str, Any]:
    """Returns the message with a call's result."""
    name = call.name.encode(errors="replace").decode()
    return {"role": "tool", "name": name, "tool_call_id": call.id, "content": content}
