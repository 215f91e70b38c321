"""Serves the labelling page for `alignflow label`. Browsers receive texts and counts, but never a model's
name, a source, or the information which answer was chosen.

Pages are small HTML files; label.js asks for one pair at a time. The event loop handles one request at a
time, including writing a label, so no two requests see the same state.
`rlhf_core/system/pages/page_server.py` controls access.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from pydantic import Field, ValidationError, field_validator
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from evaluation.labelling.agreement import agreement
from evaluation.labelling.assignment import NAME_LENGTH, Assignment, Stale
from evaluation.labelling.items import whole
from rlhf_core.records import Frozen
from rlhf_core.system.machine import disk_problem

TEMPLATES = Path(__file__).parent / "templates"
STATIC = {"label.js": "text/javascript", "label.css": "text/css"}
LARGEST_REQUEST = 1 << 17
NOTE_LENGTH = 10_000  # LARGEST_REQUEST: bytes; NOTE_LENGTH: characters
SEND_SECONDS = 30.0  # time limit for a browser to send its request
LONGEST = 86_400.0  # most seconds recorded for one label


class Undo(Frozen):
    """A request to withdraw an annotator's last label."""

    annotator: str

    @field_validator("*", mode="before")
    @classmethod
    def _whole_characters(cls, value: Any) -> Any:
        return whole(value) if isinstance(value, str) else value


class SentVerdict(Undo):
    """A verdict sent by the page. `choice`: from 0 (the left answer is much better) to 4 (the right answer is
    much better); None if skipped."""

    task: str
    choice: int | None = Field(ge=0, le=4)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    note: str | None = Field(None, max_length=NOTE_LENGTH)


class WrongRequest(Exception):
    """Raised when a request is rejected, with an HTTP status and an error message."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


Endpoint = Callable[[Request], Awaitable[Response]]


def application(assignment: Assignment) -> Starlette:
    """Returns the application that serves the pages and their API for an open labels file."""

    async def start(request: Request) -> Response:
        known = assignment.annotators
        annotators = [(name, f"label?annotator={quote(name)}", assignment.progress(name)) for name in known]
        return _page(
            "start.html.j2",
            annotators=annotators,
            pairs=len(assignment.pairs),
            finished=assignment.finished,
            length=NAME_LENGTH,
        )

    async def label_page(request: Request) -> Response:
        try:
            name = assignment.known_name(request.query_params.get("annotator", ""))
        except ValueError:
            return RedirectResponse("/", 303)
        return _page("label.html.j2", annotator=name)

    async def agreement_page(request: Request) -> Response:
        found = await run_in_threadpool(agreement, list(assignment.file.labels))
        return _page("agreement.html.j2", found=found)

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise WrongRequest(404, "there is no such file")
        return FileResponse(TEMPLATES / name, media_type=STATIC[name])

    async def following(request: Request) -> Response:
        return JSONResponse(_next(_named(assignment, request.query_params.get("annotator", ""))))

    async def label(request: Request) -> Response:
        given = await _read(request, SentVerdict)
        name = _named(assignment, given.annotator)
        try:
            assignment.label(name, given.task, given.choice, min(given.seconds, LONGEST), given.note)
        except Stale as error:
            return JSONResponse({"error": str(error), **_next(name)}, 409)
        return JSONResponse(_next(name))

    async def undo(request: Request) -> Response:
        name = _named(assignment, (await _read(request, Undo)).annotator)
        taken = assignment.undo(name)
        if taken is None:
            return JSONResponse({"error": "there is nothing to undo", **_next(name)}, 409)
        again = assignment.next(name)
        assert again is not None and again.pair.key == taken.key, "the withdrawn pair comes next"
        place = None
        if taken.verdict is not None:
            place = taken.strength if again.shown_first == "a" else 4 - taken.strength
        return JSONResponse({**_next(name), "before": {"choice": place, "note": taken.note}})

    def _next(annotator: str) -> dict[str, Any]:
        task = assignment.next(annotator)
        progress = assignment.progress(annotator)._asdict()
        if task is None:
            return {"task": None, "progress": progress}
        texts = (task.pair.answer_a, task.pair.answer_b)
        left, right = texts if task.shown_first == "a" else texts[::-1]
        prompt = [{"role": message["role"], "content": message["content"]} for message in task.pair.prompt]
        return {"task": task.id, "prompt": prompt, "left": left, "right": right, "progress": progress}

    routes = [
        Route("/", start),
        Route("/label", label_page),
        Route("/agreement", agreement_page),
        Route("/static/{name}", static),
        Route("/api/next", following),
        Route("/api/label", label, methods=["POST"]),
        Route("/api/undo", undo, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={WrongRequest: _refused, OSError: _unwritten})


def _named(assignment: Assignment, text: str) -> str:
    try:
        return assignment.known_name(text)
    except ValueError as error:
        raise WrongRequest(400, str(error)) from None


async def _read(request: Request, kind: type[Any]) -> Any:
    """Returns the record in a request's body. Raises WrongRequest when the body is too large, late or
    invalid."""
    length = request.headers.get("content-length", "")
    # a chunked request would otherwise pass the check
    if not length.isdigit() or int(length) > LARGEST_REQUEST or "transfer-encoding" in request.headers:
        raise WrongRequest(413, f"the request needs a content-length of at most {LARGEST_REQUEST} bytes")
    try:
        async with asyncio.timeout(SEND_SECONDS):
            body = await request.body()
    except (TimeoutError, ClientDisconnect):
        raise WrongRequest(408, f"the request was not sent within {SEND_SECONDS:g} s") from None
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise WrongRequest(
            400, whole(f"{'.'.join(map(str, fault['loc'])) or 'the request'}: {fault['msg']}")
        ) from None
    except (ValueError, RecursionError):
        raise WrongRequest(400, "the request is not JSON") from None


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, WrongRequest)
    return JSONResponse({"error": str(error)}, error.status)


def _unwritten(request: Request, error: Exception) -> Response:
    reason = disk_problem(error) or str(error)
    return JSONResponse({"error": f"the label was not saved: {reason}"}, 507)


def _page(template: str, **values: object) -> HTMLResponse:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return HTMLResponse(environment.get_template(template).render(**values))
