"""Opens sessions with MCP servers, lists and calls their tools, and distinguishes a failing tool from a
failing server."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import mcp
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from rlhf_core.data.pictures.message_parts import source_of
from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_source import PictureFault
from rlhf_core.environments.joined_calls import check_depth

ADDRESSES = ("http://", "https://")
LARGEST_RESULT = 2**26  # bytes
PAGES = 100  # most pages in a list of tools
OUTAGES = {401, 403, 404, 429, *range(500, 600)}  # statuses that say nothing about the model's tool call
# Starts a command that ends together with its parent process although it has its own session.
ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


class ServerGone(RuntimeError):
    """Raised when a server has ended, or when its answer says nothing about the tool call."""


class Servers:
    """Opens sessions with servers. Each server is given as an address or a command. `token`: the bearer token
    for servers with an address."""

    def __init__(self, servers: Sequence[str], token: str | None):
        self._servers = list(servers)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._nowhere = open(os.devnull, "w", encoding="utf-8")

    def __len__(self) -> int:
        return len(self._servers)

    def name(self, place: int) -> str:
        """Returns a server's name for use in messages, with nothing that may be secret: its program, or its
        address without the query."""
        server = self._servers[place]
        if not server.startswith(ADDRESSES):
            return shlex.split(server)[0]
        parts = urlsplit(server)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @asynccontextmanager
    async def session(
        self, place: int, mark: Mapping[str, str], quiet: bool = True
    ) -> AsyncIterator[McpSession]:
        """Opens a session. `mark`: variables added to the environment of a server command. The command's
        error output is shown unless `quiet`."""
        server = self._servers[place]
        outages = list[int]()
        if not server.startswith(ADDRESSES):
            command = [sys.executable, "-S", "-E", "-c", ENDS_WITH_PARENT, *shlex.split(server)]
            started = mcp.StdioServerParameters(
                command=command[0], args=command[1:], env={**os.environ, **mark}
            )
            transport = mcp.stdio_client(started, errlog=self._nowhere if quiet else sys.stderr)
            async with mcp.Client(transport) as client:
                yield McpSession(client, self.name(place), outages)
            return

        async def watch(response: httpx2.Response) -> None:
            if response.request.method == "POST" and response.status_code in OUTAGES:
                outages.append(response.status_code)

        async with httpx2.AsyncClient(
            headers=self._headers, timeout=httpx2.Timeout(60.0, read=None), event_hooks={"response": [watch]}
        ) as http:
            transport = streamable_http_client(server, http_client=http, max_sse_event_size=LARGEST_RESULT)
            async with mcp.Client(transport) as client:
                outages.clear()  # caused by the first requests, which try protocol versions
                yield McpSession(client, self.name(place), outages)


class McpSession:
    """An open session. `outages`: statuses of the requests that have failed so far."""

    def __init__(self, client: mcp.Client, name: str, outages: list[int]):
        self._client = client
        self._name = name
        self._outages = outages

    async def tools(self) -> list[mcp.Tool]:
        """Returns all tools of the server."""
        found = list[mcp.Tool]()
        cursor: str | None = None
        for _ in range(PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    async def call(
        self, name: str, arguments: dict[str, Any], seconds: float, images: bool = False
    ) -> str | list[dict[str, Any]]:
        """Calls a tool. Returns its result as text, or as texts and images if the result has images and
        `images` is set. Returns an error message if the tool fails. Raises ServerGone if the server fails."""
        try:
            check_depth(arguments)
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:
            return f"error: the arguments cannot be sent: {error}"
        try:
            found = await self._client.call_tool(name, arguments, read_timeout_seconds=seconds)
        except mcp.MCPError as error:
            if self._outages:
                raise ServerGone(
                    f"the MCP server {self._name} answered with status {self._outages[-1]}"
                ) from error
            if error.error.code == CONNECTION_CLOSED:
                raise ServerGone(f"the MCP server {self._name} ended during a call") from error
            stopped = f"stopped after {seconds:g} s"
            return f"error: {stopped if error.error.code == REQUEST_TIMEOUT else error.error.message}"
        except Exception as error:  # the result does not have the form that the tool declares
            return f"error: {error or type(error).__name__}"
        if images and not found.is_error and any(part.type == "image" for part in found.content):
            return [part_of(part) for part in found.content]
        text = "\n".join(map(text_of, found.content))
        if not text and found.structured_content:
            text = json.dumps(found.structured_content)
        return f"error: {text}" if found.is_error else text


def text_of(part: Any) -> str:
    """Returns part of a result as text; for a part that has no text, its type."""
    inner = part.resource if part.type == "resource" else part
    text = getattr(inner, "text", None)
    return f"[{part.type}]" if text is None else str(text)


def part_of(part: Any) -> dict[str, Any]:
    """Returns part of a result as part of a message. An image that cannot be decoded becomes a text that says
    why, because the model chose the call and may continue."""
    if part.type != "image":
        return {"type": "text", "text": text_of(part)}
    try:
        decoded(source_of(f"data:,{part.data}", "the result", None))
    except PictureFault as fault:
        return {"type": "text", "text": f"error: {fault}"}
    return {"type": "image", "base64": part.data}
