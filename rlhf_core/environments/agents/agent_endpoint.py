"""Answers agents' requests with the policy, through an OpenAI-compatible endpoint on a loopback port of an
environment process.

Each episode has its own key, which the agent sends as a bearer token and which identifies the episode's
conversations. Answers come from the stage's engines, and their tokens are kept as sampled; see
`joined_trajectories`.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlhf_core.environments.agents.chat_protocol import (
    POLICY,
    AgentRequest,
    chat_chunks,
    chat_completion,
    read_chat_request,
)
from rlhf_core.environments.agents.responses_protocol import (
    messages_of,
    read_responses_request,
    response_events,
    response_of,
)
from rlhf_core.environments.conversation import Answer, Conversation, LimitReached
from rlhf_core.environments.joined_calls import Message

LOOPBACK = "127.0.0.1"
LARGEST = 2**22  # bytes of a request, which is tokenised in the event loop that serves all episodes
LARGEST_WITH_IMAGES = 2**25  # bytes of a request to a policy that reads images
KEEP_ALIVE_SECONDS = 3600  # how long an agent's tools may work between two requests


class AgentSession:
    """An episode as its agent sees it. `name`: the model name that identifies the episode in requests sent
    with the key shared by all episodes. `limited`: which limit prevented an answer to the last request, and
    why. `images`: whether messages may have images. `responses`: the messages up to each response, keyed by
    response ID."""

    def __init__(self, model: Conversation, name: str):
        self.name = name
        self.limited = ""
        self.images = model.images
        self.responses = dict[str, list[Message]]()
        self._model = model
        self._working = set[asyncio.Task[Answer]]()
        self._closed = False
        self._context = contextvars.copy_context()  # identifies the episode being stepped (`episode_now`)

    async def complete(self, asked: AgentRequest, gone: Coroutine[Any, Any, None]) -> Answer | None:
        """Returns the model's answer, or None if the client is `gone` first. Raises LimitReached, ValueError,
        or CancelledError when the session ends."""
        if self._closed:
            gone.close()
            raise asyncio.CancelledError
        work = self._model.complete(asked.messages, asked.tools, asked.most)
        working = asyncio.get_running_loop().create_task(work, context=self._context)
        leaving = asyncio.create_task(gone)
        self._working.add(working)
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return None
            answer = working.result()
            self.limited = ""
            return answer
        except LimitReached as limit:
            self.limited = str(limit)
            raise
        finally:
            working.cancel()
            leaving.cancel()
            self._working.discard(working)

    def close(self) -> None:
        """Cancels requests that are waiting for an answer, and rejects later requests."""
        self._closed = True
        for task in self._working:
            task.cancel()


class AgentEndpoint:
    """The endpoint of one environment process. `url`: its address, to pass to clients as `base_url`.
    `shared_key`: the key for a program that runs all episodes and identifies each episode by the model name
    in its requests. Must be created while an event loop is running."""

    def __init__(self) -> None:
        self.shared_key = f"episodes-{secrets.token_urlsafe(24)}"
        self._numbers = itertools.count()
        self._named = dict[str, AgentSession]()
        self._sessions = dict[str, AgentSession]()
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/v1"
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    @contextmanager
    def session(self, model: Conversation) -> Iterator[tuple[str, AgentSession]]:
        """Yields a key for the episode of `model`, valid within the block, and the episode's session."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        session = AgentSession(model, f"{POLICY}-{next(self._numbers)}")
        self._sessions[key] = self._named[session.name] = session
        try:
            yield key, session
        finally:
            del self._sessions[key], self._named[session.name]
            session.close()

    async def _models(self, request: Request) -> Response:
        if _key(request) not in (self.shared_key, *self._sessions):
            return _refusal(401, "the key is not one of an episode that runs", "invalid_api_key")
        model = {"id": POLICY, "object": "model", "created": 0, "owned_by": "alignflow"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        def written(asked: AgentRequest, answer: Answer, session: AgentSession) -> Response:
            if asked.stream:
                return _stream(chat_chunks(answer, asked.usage))
            return JSONResponse(chat_completion(answer))

        return await self._answered(request, lambda body, session: read_chat_request(body), written)

    async def _responses(self, request: Request) -> Response:
        def read(body: dict[str, Any], session: AgentSession) -> AgentRequest:
            before = body.get("previous_response_id")
            if before is not None and before not in session.responses:
                raise ValueError(f"previous_response_id: this episode has no response {before!r:.60}")
            earlier = session.responses[before] if before is not None else []
            return read_responses_request(body, earlier)

        def written(asked: AgentRequest, answer: Answer, session: AgentSession) -> Response:
            response = response_of(answer)
            session.responses[response["id"]] = [*asked.messages, *messages_of(response["output"])]
            return _stream(response_events(response)) if asked.stream else JSONResponse(response)

        return await self._answered(request, read, written)

    async def _answered(
        self,
        request: Request,
        read: Callable[[dict[str, Any], AgentSession], AgentRequest],
        written: Callable[[AgentRequest, Answer, AgentSession], Response],
    ) -> Response:
        """Answers a request with the policy, or returns an error that explains why there is no answer. Stops
        waiting for the answer if the client disconnects."""
        key = _key(request)
        session = self._sessions.get(key)
        if session is None and key != self.shared_key:
            return _refusal(401, "the key is not one of an episode that runs", "invalid_api_key")
        try:
            images = any(known.images for known in self._sessions.values())
            body = json.loads(await body_of(request, LARGEST_WITH_IMAGES if images else LARGEST))
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            session = session or self._named.get(str(body.get("model")))
            if session is None:
                return _refusal(404, "the model is not one of an episode that runs", "model_not_found")
            asked = read(body, session)
            answer = await session.complete(asked, gone(request))
            return Response(status_code=499) if answer is None else written(asked, answer, session)
        except LimitReached as limit:
            return _refusal(400, str(limit), "context_length_exceeded")
        except asyncio.CancelledError:
            return _refusal(409, "the episode has ended", "episode_ended")
        except TooLarge as error:
            return _refusal(413, str(error), "invalid_request")
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # whatever is wrong with a request is for the client to fix
            return _refusal(400, str(error) or type(error).__name__, "invalid_request")


class TooLarge(ValueError):
    """Raised when a request is too large."""


async def body_of(request: Request, most: int) -> bytes:
    """Returns the body of a request. Raises TooLarge if it has more than `most` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise TooLarge(f"a request may have {most} bytes")
    return bytes(body)


async def gone(request: Request) -> None:
    """Waits until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _key(request: Request) -> str:
    return str(request.headers.get("authorization", "")).removeprefix("Bearer ")


def _stream(events: Iterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def _refusal(status: int, message: str, code: str) -> Response:
    """Returns an error in OpenAI's format, with a status that its clients do not retry."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, {"x-should-retry": "false"})
