"""Opens sessions with an OpenEnv server, with reset and step over a WebSocket, and reads the schema of its
actions.

Source: https://github.com/meta-pytorch/OpenEnv, package openenv-core 0.3.0, file `env_server/types.py`. On
the server, each session has its own environment, which ends with the session.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

LARGEST = 2**24  # bytes of a message from the server
OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOO_LARGE = 1009  # WebSocket status for a message that is too big
TOLD = 200  # characters of a server's text shown in a message


class ServerFault(RuntimeError):
    """Raised when a server cannot be reached, or when its answer says nothing about the action."""


class ActionRefused(ValueError):
    """Raised when an action does not match the server's schema."""


class OpenEnvStep(NamedTuple):
    """The environment's reply to a reset or an action."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class OpenEnvServer:
    """A server at an address, http(s):// or ws(s)://. `token`: sent as a bearer token. `seconds`: time limit
    for one answer."""

    def __init__(self, url: str, token: str | None, seconds: float):
        self._parts = urlsplit(url)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._seconds = seconds
        self.name = f"{self._parts.scheme}://{self._parts.netloc}{self._parts.path}"  # without the query

    def _address(self, scheme: str, place: str) -> str:
        secure = "s" if self._parts.scheme in ("https", "wss") else ""
        path = f"{self._parts.path.rstrip('/')}/{place}"
        return urlunsplit((scheme + secure, self._parts.netloc, path, self._parts.query, ""))

    def action_schema(self) -> dict[str, Any]:
        """Returns the JSON schema of actions; empty if the server does not publish it. Raises ServerFault
        when the server cannot be reached."""
        body = b""
        end = time.monotonic() + OPEN_SECONDS
        try:
            trusted = self._parts.hostname not in LOOPBACK
            with httpx.stream(
                "GET",
                self._address("http", "schema"),
                headers=self._headers,
                timeout=OPEN_SECONDS,
                trust_env=trusted,
            ) as response:
                for part in response.iter_bytes():
                    body += part
                    if time.monotonic() > end:  # the client's timeout applies to each part separately
                        raise ServerFault(
                            f"the OpenEnv server {self.name} did not send its schema in {OPEN_SECONDS:g} s"
                        )
                    if len(body) > LARGEST:
                        raise ServerFault(
                            f"the OpenEnv server {self.name} sent a schema of over {LARGEST} bytes"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerFault(
                f"the OpenEnv server {self.name} cannot be reached: {str(error) or type(error).__name__}"
            ) from error
        with suppress(ValueError, RecursionError):
            schema = json.loads(body)["action"] if response.status_code == httpx.codes.OK else None
            if isinstance(schema, dict):
                return schema
        return {}

    @asynccontextmanager
    async def session(self) -> AsyncIterator[OpenEnvSession]:
        """Opens a session. Raises ServerFault if the server does not open one."""
        try:
            connection = await connect(
                self._address("ws", "ws"),
                additional_headers=self._headers,
                open_timeout=OPEN_SECONDS,
                close_timeout=CLOSE_SECONDS,
                max_size=LARGEST,
                ping_timeout=None,  # a server may not respond during a step; each answer has its own limit
                proxy=None if self._parts.hostname in LOOPBACK else True,
            )
        except (OSError, WebSocketException, ValueError) as error:  # TimeoutError is an OSError
            told = str(error) or type(error).__name__
            raise ServerFault(f"the OpenEnv server {self.name} opens no session: {told:.{TOLD}}") from error
        try:
            yield OpenEnvSession(connection, self.name, self._seconds)
        finally:
            await connection.close()


def openenv_problem(url: str, token_env: str | None) -> str:
    """Returns why a server cannot be used; "" if the server publishes its schema, or replies that it has
    none."""
    token = None if token_env is None else os.environ.get(token_env)
    if token_env is not None and not token:
        return f"the variable {token_env} is empty: set it to the token of the OpenEnv server"
    try:
        OpenEnvServer(url, token, OPEN_SECONDS).action_schema()
    except ServerFault as fault:
        return f"{fault}: start it, or correct the address"
    return ""


class OpenEnvSession:
    """An open session."""

    def __init__(self, connection: ClientConnection, name: str, seconds: float):
        self._connection = connection
        self._name = name
        self._seconds = seconds

    async def reset(self, arguments: Mapping[str, Any]) -> OpenEnvStep:
        """Starts an episode and returns the first observation. Raises ServerFault if the server fails."""
        try:
            return await self._asked("reset", arguments)
        except ActionRefused as error:
            raise ServerFault(f"the OpenEnv server {self._name} refuses the reset: {error}") from error

    async def step(self, action: Mapping[str, Any]) -> OpenEnvStep:
        """Takes an action and returns the environment's reply. Raises ActionRefused if the action does not
        match the schema, and ServerFault if the server fails."""
        return await self._asked("step", action)

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> OpenEnvStep:
        try:
            async with asyncio.timeout(self._seconds):
                await self._connection.send(json.dumps({"type": kind, "data": dict(data)}))
                text = await self._connection.recv()
        except TimeoutError:
            raise ServerFault(
                f"the OpenEnv server {self._name} did not answer a {kind} in {self._seconds:g} s"
            ) from None
        except ConnectionClosed as error:
            large = error.sent is not None and error.sent.code == TOO_LARGE
            why = f"sent a message of over {LARGEST} bytes" if large else f"closed the session in a {kind}"
            raise ServerFault(f"the OpenEnv server {self._name} {why}") from error
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise ServerFault(f"the OpenEnv server {self._name} answered a {kind} with no message of OpenEnv")
        if answer.get("type") == "error":
            self._raise(kind, content)
        return self._step(kind, content)

    def _raise(self, kind: str, content: Mapping[str, Any]) -> None:
        told = f"{content.get('message', 'no message')!s:.{TOLD}}"
        if content.get("code") == "VALIDATION_ERROR":
            errors = content.get("errors")
            raise ActionRefused(f"{told}: {errors!s:.{TOLD}}" if errors else told)
        code = f"{content.get('code', 'no code')!s:.40}"
        raise ServerFault(f"the OpenEnv server {self._name} failed in a {kind}: {told} ({code})")

    def _step(self, kind: str, content: Mapping[str, Any]) -> OpenEnvStep:
        observation = content.get("observation")
        reward = content.get("reward")
        done = content.get("done", False)
        number = reward is None or (isinstance(reward, int | float) and math.isfinite(reward))
        if not isinstance(observation, dict) or not number or not isinstance(done, bool):
            raise ServerFault(
                f"the OpenEnv server {self._name} answered a {kind} without an observation, a reward that is"
                " a number or null, and done"
            )
        return OpenEnvStep(observation, None if reward is None else float(reward), done)
