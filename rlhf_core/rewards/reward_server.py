"""Serves a reward model over HTTP according to `rewards/reward_contract.py`: `alignflow serve-reward
CHECKPOINT --port PORT`.

POST to any path accepts `prompts`, `responses` and, optionally, `finished`; other lists are ignored. GET
describes the model being served. One request is scored at a time. Invalid input gets 400 with an error
message; a failure of the model gets 500, which clients retry. If a key is set, requests without it as a
bearer token get 401. There is no TLS: put a proxy in front.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Message
from rlhf_core.data.rows.columns import Located, prompt_of, text_of
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.rewards.own_tokens import document

LARGEST_REQUEST = 64 << 20  # bytes
SEND_SECONDS = 60.0  # for a client to send its request


class AnswerToScore(NamedTuple):
    """One answer to score."""

    prompt: list[Message]
    response: str
    finished: bool


def read_request(text: bytes) -> list[AnswerToScore]:
    """Returns the answers in a request. Raises ValueError with the reason if the request is invalid."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("the request is not JSON") from None
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("prompts"), list)
        or not isinstance(body.get("responses"), list)
    ):
        raise ValueError("the request needs the lists prompts and responses")
    prompts = body["prompts"]
    responses = body["responses"]
    finished = body.get("finished", [True] * len(prompts))
    if not isinstance(finished, list) or not len(prompts) == len(responses) == len(finished):
        raise ValueError("prompts, responses and finished must be lists of one length")
    where = "the request"
    lists = zip(prompts, responses, finished, strict=True)
    return [
        AnswerToScore(prompt_of(Located(where, {"prompt": p})), text_of(r, where, "responses"), bool(f))
        for p, r, f in lists
    ]


def reward_application(
    checkpoint: str,
    template: str = "chat",
    micro_batch_size: int = 8,
    key: str | None = None,
    template_args: Mapping[str, Any] = MappingProxyType({}),
) -> Starlette:
    """Returns the application that serves a reward model. `template_args`: arguments of its chat template, by
    name. Raises ValueError when the checkpoint or its tokenizer cannot be used."""
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
    renderer = Renderer(tokenizer, template, template_args=template_args)
    scorer = RewardScorer(checkpoint, "auto", micro_batch_size, trust_remote_code=False)
    lock = Lock()

    def score(answers: Sequence[AnswerToScore]) -> list[float]:
        with lock:
            return scorer.score([document(renderer, answer) for answer in answers])

    about: dict[str, Any] = {"model": checkpoint, "template": template}
    if template_args:
        about["template_args"] = dict(template_args)
    return application(score, about, key)


def application(
    score: Callable[[Sequence[AnswerToScore]], list[float]], about: dict[str, Any], key: str | None = None
) -> Starlette:
    """Returns the HTTP application around a scoring function, which is called in a thread. `key`: the bearer
    token that requests must send."""

    async def reply(request: Request) -> JSONResponse:
        given = request.headers.get("authorization", "").encode("latin-1")
        if key and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            return _error(
                401,
                "this server needs its key as a bearer token: name its variable in api_key_env",
                {"connection": "close"},
            )
        if request.method != "POST":
            return JSONResponse(about)
        length = request.headers.get("content-length", "")
        # chunked bodies would bypass the limit
        if not length.isdigit() or int(length) > LARGEST_REQUEST or "transfer-encoding" in request.headers:
            return _error(
                413,
                f"the request needs a content-length of at most {LARGEST_REQUEST} bytes",
                {"connection": "close"},
            )
        try:
            async with asyncio.timeout(SEND_SECONDS):
                body = await request.body()
        except (TimeoutError, ClientDisconnect):
            return _error(408, f"the request was not sent within {SEND_SECONDS:g} s", {"connection": "close"})
        try:
            rewards = await run_in_threadpool(lambda: score(read_request(body)))
        except ValueError as error:
            return _error(400, str(error))
        except Exception:
            traceback.print_exc()
            return _error(500, "the model failed; see the server's log")
        return JSONResponse({"rewards": [reward if math.isfinite(reward) else None for reward in rewards]})

    return Starlette(routes=[Route("/{path:path}", reply, methods=["GET", "POST"])])


def _error(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status, headers)
