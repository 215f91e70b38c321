"""Serves the dashboard: pages, their script and style, and a stream of changed parts. It only answers GET
requests and writes nothing.

Put `Protected` (rlhf_core/system/pages/page_server.py) in front, because this application does not check a
token. An open page has one stream of server-sent events. Once a second, the stream checks the sizes and times
of the page's files, and rebuilds and sends the page's parts only if these have changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from evaluation.dashboard.artifacts_folder import Folder, Missing
from evaluation.dashboard.pages import digest, fill, page_of, whole
from rlhf_core.runs.run_dir import VALIDATION

STATIC = Path(__file__).parent / "templates"
FILES = {"live.js": "text/javascript", "dashboard.css": "text/css"}
LOOK_SECONDS = 1.0
SLOW_SECONDS = 15.0  # LOOK_SECONDS: between checks of the files; SLOW_SECONDS: between rebuilds of all parts
GRACE_SECONDS = 2.0  # time for streams to end when the server stops
MAX_STREAMS = 64
MAX_REPORT = 64 << 20  # MAX_STREAMS: open pages; MAX_REPORT: bytes


def dashboard(artifacts: Path) -> Starlette:
    """Returns the application for an artifacts folder, which need not exist yet."""
    folder = Folder(artifacts)
    streams: set[object] = set()

    def page(request: Request) -> Response:
        try:
            return HTMLResponse(whole(page_of(folder, request.scope["path"], dict(request.query_params))))
        except Missing:
            told = "This artifacts folder has no such run or stage: it was removed, or the address is wrong."
            return HTMLResponse(fill("page.missing", told=told), 404)

    def report(request: Request) -> Response:
        found = folder.report(request.path_params["recipe"], request.path_params.get("identity", ""))
        if found is None:
            return HTMLResponse(
                fill("page.missing", told="There is no report: a run writes it at its end."), 404
            )
        with found.open("rb") as file:
            content = file.read(MAX_REPORT + 1)
        if len(content) > MAX_REPORT:
            return HTMLResponse(
                fill(
                    "page.missing", told=f"The report is larger than {MAX_REPORT >> 20} MiB: open its file."
                ),
                413,
            )
        return HTMLResponse(content)

    def of_report(request: Request) -> Response:
        """Returns a redirect from a report to the recorded answers of one of its stages."""
        page = request.path_params["page"]
        name = page.removesuffix(f".{VALIDATION}")
        query = "" if name == page else f"?of={VALIDATION}"
        return RedirectResponse(f"/rollouts/{quote(name)}{query}")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        return (
            FileResponse(STATIC / name, media_type=FILES[name])
            if name in FILES
            else PlainTextResponse("there is no such file", 404)
        )

    async def events(request: Request) -> Response:
        if len(streams) >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} pages are open already", 503)
        query = dict(request.query_params)
        known = dict(pair.split(":", 1) for pair in query.pop("have", "").split(",") if ":" in pair)
        ended = anyio.Event()
        found = changes(folder, f"/{request.path_params['path']}", query, known, streams, ended)
        return EventSourceResponse(found, ping=15, shutdown_event=ended, shutdown_grace_period=GRACE_SECONDS)

    of_pages = ("/", "/run/{recipe}/{identity}", "/stage/{name}", "/rollouts/{name}", "/compare")
    return Starlette(
        routes=[
            *(Route(path, page) for path in of_pages),
            Route("/report/rollouts/{page}.html", of_report),
            Route("/report/{recipe}", report),
            Route("/report/{recipe}/{identity}", report),
            Route("/static/{name}", static),
            Route("/events/{path:path}", events),
        ]
    )


async def changes(
    folder: Folder,
    path: str,
    query: dict[str, str],
    known: dict[str, str],
    streams: set[object],
    ended: anyio.Event,
) -> AsyncIterator[dict[str, str]]:
    """Yields events `parts`, {part: {digest, html}} as JSON: first with the parts of a page that differ from
    `known` (digests by part), then after each change. Yields an event `gone` if the page does not exist or
    ceases to exist. Ends when `ended` is set."""
    this = object()
    before = None
    made = 0.0
    streams.add(this)

    def look(every: bool) -> tuple[object, dict[str, str]]:
        page = page_of(folder, path, query)
        seen = page.watched()
        if seen == before and not every:
            return seen, {}
        return seen, {name: page.make(name) for name in page.parts if every or name not in page.slow}

    try:
        while True:
            every = time.monotonic() - made > SLOW_SECONDS or not made
            try:
                before, parts = await run_in_threadpool(look, every)
            except Missing:
                yield {"event": "gone", "data": ""}
                return
            made = time.monotonic() if every else made
            new = {
                name: {"digest": digest(html), "html": html}
                for name, html in parts.items()
                if digest(html) != known.get(name)
            }
            if new:
                known.update({name: part["digest"] for name, part in new.items()})
                yield {"event": "parts", "data": json.dumps(new)}
            with anyio.move_on_after(LOOK_SECONDS):
                await ended.wait()
                return
    finally:
        streams.discard(this)
