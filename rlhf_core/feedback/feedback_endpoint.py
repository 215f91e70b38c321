"""Accepts feedback over HTTP: POST /feedback/NAME for the inbox NAME.inbox, with a bearer token
(system/pages/page_server.py).

The body is a JSON object, a list of objects, or JSON lines. Rows are on disk before the response is sent, and
a repeated request adds nothing twice. The response counts the outcomes of the rows. Error codes: 400 if the
body is not JSON, 408 if it was not sent in time, 413 if it is too large or has too many rows, 422 if no row
holds feedback, and 507 if the disk is full.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlhf_core.feedback.inbox import SUFFIX, Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import ReceivedRow, receive
from rlhf_core.system.machine import disk_problem
from rlhf_core.system.pages.page_server import Protected

LARGEST_REQUEST = 16 << 20
MOST_ROWS = 10_000  # maximum numbers of bytes and rows in a request
SEND_SECONDS = 60.0  # time limit for a client to send its request
FIELDS = ("source", "annotator")  # query parameters that apply to all rows of a request


def application(
    inboxes: Mapping[str, tuple[Inbox, Callable[[], Questions]]], token: str, hosts: tuple[str, ...] = ()
) -> ASGIApp:
    """Returns the application. `inboxes`: the inboxes by name, each with the questions that its rows must not
    match."""

    async def post(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in inboxes:
            return JSONResponse({"error": f"there is no inbox {name!r}; known are {', '.join(inboxes)}"}, 404)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                body = await _body(request)
        except (TimeoutError, ClientDisconnect):
            return JSONResponse(
                {"error": f"the request was not sent within {SEND_SECONDS:g} s"}, 408, {"connection": "close"}
            )
        if body is None:
            return JSONResponse(
                {"error": f"the request has more than {LARGEST_REQUEST} bytes"}, 413, {"connection": "close"}
            )
        rows = await run_in_threadpool(rows_of_body, body)
        if rows is None:
            return JSONResponse(
                {"error": "the body must be a JSON object, a list of them, or lines of JSON, in UTF-8"}, 400
            )
        if len(rows) > MOST_ROWS:
            return JSONResponse(
                {"error": f"the request has {len(rows):,} rows: send at most {MOST_ROWS:,} at once"}, 413
            )
        inbox, questions = inboxes[name]
        given = [ReceivedRow(f"row {number}", row) for number, row in enumerate(rows, start=1)]
        about = {field: request.query_params.get(field) for field in FIELDS}
        try:
            receipt = await run_in_threadpool(
                lambda: receive(inbox, given, questions(), about["source"] or "", about["annotator"])
            )
        except OSError as error:
            problem = disk_problem(error)
            if problem is None:
                raise
            return JSONResponse(
                {"error": f"the inbox {name} cannot be written to: {problem}, and send all rows again"}, 507
            )
        useless = not (receipt.new or receipt.duplicate or receipt.leaked)
        told = {**vars(receipt), "unusable": dict(receipt.unusable), "personal": dict(receipt.personal)}
        return JSONResponse(told, 422 if useless else 200)

    async def counts(request: Request) -> Response:
        found = {name: dict(await run_in_threadpool(inbox.kinds)) for name, (inbox, _) in inboxes.items()}
        return JSONResponse(found)

    app = Starlette(
        routes=[
            Route("/feedback/{name}", post, methods=["POST"]),
            Route("/feedback", counts, methods=["GET"]),
        ]
    )
    return Protected(app, token, hosts)


async def _body(request: Request) -> bytes | None:
    """Returns the body; None if it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_REQUEST:
            return None
    return bytes(body)


def rows_of_body(body: bytes) -> list[Any] | None:
    """Returns the rows of a request; None if the body is not JSON."""
    try:
        text = body.decode()
        try:
            whole = json.loads(text)
            rows = whole if isinstance(whole, list) else [whole]
        except ValueError:
            # `splitlines` would also split at U+2028
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        json.dumps(rows, ensure_ascii=False).encode()  # rejects lone surrogates
    except (ValueError, RecursionError):
        return None
    return rows


def by_name(
    folders: list[Path], questions: Callable[[], Questions]
) -> dict[str, tuple[Inbox, Callable[[], Questions]]]:
    """Returns the inboxes in these folders by name, each with `questions`. Raises ValueError when two inboxes
    have the same name."""
    named = {folder.name.removesuffix(SUFFIX): (Inbox(folder), questions) for folder in folders}
    if len(named) < len(folders):
        raise ValueError(
            "two inboxes have the same name, by which rows are sent to them: rename one of"
            f" {', '.join(map(str, folders))}"
        )
    return named
