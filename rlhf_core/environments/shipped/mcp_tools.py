"""`environment: {mcp: [...]}`: the model uses the tools of MCP servers (Model Context Protocol).

A server is an address (streamable HTTP) or a command (stdio). Each episode has a session of its own with each
server, so that what a tool keeps does not leak from one answer into another. The model's template describes
the tools; its calls are sent to their server until an answer has none.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any, TypeVar

import httpx2
import mcp
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from rlhf_core.environments.agents.users_functions import called, function_of, require_arguments, reward_of
from rlhf_core.environments.conversation import Answer, Call, Conversation, LimitReached
from rlhf_core.environments.shipped.tools import is_right

R = TypeVar("R")
ADDRESSES = ("http://", "https://")
START_SECONDS = 60.0  # in which all servers must list their tools


class McpTools:
    """Answers the model's calls with the tools of `servers`. `checker`: path.py:function, called with the
    task and the text of the last answer; without it the reward is 1 if that answer equals the row's column
    `answer`. `seconds`: for one call of a tool. `calls`: in one answer. `longest`: characters of a result.
    `token_env`: the variable with the bearer token for servers with an address. Raises ValueError when a
    server cannot be asked for its tools."""

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
        self._servers = list(servers)
        self._column = answer
        self._seconds = seconds
        self._calls = calls
        self._longest = longest
        self._token = None if token_env is None else _token(token_env)
        self._check: Callable[..., Any] | None = None
        self.users_function: Callable[..., Any] | None = None
        if checker is not None:
            modules = dict[str, ModuleType]()
            self._check = self.users_function = function_of(checker, "checker", modules)
            require_arguments(self._check, checker, ({}, ""), {})
        self._errors = sys.stderr  # of commands: once, while they list their tools
        listed = in_a_loop_of_its_own(self._list_tools)
        self._errors = open(os.devnull, "w", encoding="utf-8")
        self._server_of = {tool.name: place for place, tools in enumerate(listed) for tool in tools}
        names = [tool.name for tools in listed for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several servers have a tool {twice[0]!r}: leave one of them out")
        self.tools = [_schema(tool) for tools in listed for tool in tools]

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        if self._check is None and self._column not in task:
            raise ValueError(
                f"the prompts have no column {self._column!r}: name it in options.answer, or set checker"
            )
        talked: Answer | LimitReached | None = None
        try:
            async with AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(self._client(name)) for name in self._servers]
                try:
                    talked = await self._talk(model, clients)
                except LimitReached as limit:  # sessions wrap what leaves them
                    talked = limit
        except BaseExceptionGroup as group:
            raise first_of(group) from group
        assert talked is not None, "errors were raised"
        if isinstance(talked, LimitReached):
            raise talked
        if self._check is not None:
            return reward_of(await called(self._check, task, talked.text), "checker")
        return float(is_right(talked.text, str(task[self._column])))

    async def _talk(self, model: Conversation, clients: Sequence[mcp.Client]) -> Answer:
        """Returns the first answer without calls."""
        answer = await model.answer()
        while answer.calls and answer.finished:
            results = []
            for number, call in enumerate(answer.calls):
                over = f"error: an answer may have {self._calls} calls"
                text = await self._result(call, clients) if number < self._calls else over
                results.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
            answer = await model.answer(*results)
        return answer

    async def _result(self, call: Call, clients: Sequence[mcp.Client]) -> str:
        """Returns what the model sees of a call. Raises RuntimeError when the server is gone."""
        if call.wrong or call.name not in self._server_of:
            return f"error: {call.wrong or f'there is no tool {call.name!r}'}"
        place = self._server_of[call.name]
        asked = clients[place].call_tool(call.name, call.arguments, read_timeout_seconds=self._seconds)
        try:
            found = await asked
        except mcp.MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise RuntimeError(f"the MCP server {self._servers[place]} ended during a call") from error
            stopped = f"stopped after {self._seconds:g} s"
            return f"error: {stopped if error.error.code == REQUEST_TIMEOUT else error.error.message}"
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in found.content]
        text = ("error: " if found.is_error else "") + "\n".join(parts)
        cut = "" if len(text) <= self._longest else f"\n[{len(text) - self._longest} more characters]"
        return text[: self._longest] + cut

    def _client(self, server: str) -> mcp.Client:
        if not server.startswith(ADDRESSES):
            program, *arguments = shlex.split(server)
            started = mcp.StdioServerParameters(command=program, args=arguments)
            return mcp.Client(mcp.stdio_client(started, errlog=self._errors))
        if self._token is None:
            return mcp.Client(server)
        headers = {"Authorization": f"Bearer {self._token}"}
        http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(START_SECONDS, read=None))
        return mcp.Client(streamable_http_client(server, http_client=http))

    async def _list_tools(self) -> list[list[mcp.Tool]]:
        """Returns the tools of each server."""
        listed = []
        for server in self._servers:
            try:
                async with asyncio.timeout(START_SECONDS), self._client(server) as client:
                    listed.append(list((await client.list_tools()).tools))
            except BaseExceptionGroup as group:
                raise ValueError(f"the MCP server {server} lists no tools: {told(first_of(group))}") from None
            except Exception as error:
                raise ValueError(f"the MCP server {server} lists no tools: {told(error)}") from None
        return listed


def in_a_loop_of_its_own(work: Callable[[], Awaitable[R]]) -> R:
    """Runs work while another event loop runs in this thread, which waits for it."""
    results = list[R]()
    errors = list[BaseException]()

    async def worked() -> R:
        return await work()

    def run() -> None:
        try:
            results.append(asyncio.run(worked()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def first_of(group: BaseException) -> BaseException:
    """Returns the first error in a group of errors, which may hold groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def told(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _token(variable: str) -> str:
    if not os.environ.get(variable):
        raise ValueError(f"the variable {variable} is empty: set it to the token of the MCP servers")
    return os.environ[variable]


def _schema(tool: mcp.Tool) -> Mapping[str, Any]:
    """Returns a tool in the form that chat templates describe."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
