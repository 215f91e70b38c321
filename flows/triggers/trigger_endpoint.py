"""Starts runs on request: POST /trigger/FLOW/NAME for the deployment FLOW/NAME, with a bearer token
(rlhf_core/system/pages/page_server.py).

202: a run was started; 200: a run exists already, and the answer names it; 429: too many runs were started in
the last hour, or too many requests are waiting; 503: Prefect's server did not answer. A request's body and
query are ignored, because a run has its deployment's own parameters. The Hub's webhooks send their secret in
`X-Webhook-Secret`, which is accepted as the token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from httpx import HTTPError
from prefect.exceptions import ObjectNotFound, PrefectException
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.triggers.runs import TriggerOutcome
from rlhf_core.system.pages.page_server import Protected

MOST_WAITING = 20  # requests for one deployment
LATER = {"retry-after": "60"}
HUB_SECRET = b"x-webhook-secret"


def application(
    ask: Callable[[str], TriggerOutcome],
    deployments: Collection[str],
    token: str,
    hosts: tuple[str, ...] = (),
) -> ASGIApp:
    """Returns the application. `ask` starts a run of one of the deployments (FLOW/NAME), or finds an
    existing one."""
    locks = {name: asyncio.Lock() for name in deployments}
    waiting: Counter[str] = Counter()

    async def post(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in locks:
            return JSONResponse(
                {"error": f"there is no deployment {name!r}; known are {', '.join(locks)}"}, 404
            )
        if waiting[name] >= MOST_WAITING:
            return JSONResponse(
                {"error": (f"{MOST_WAITING} requests for {name} are waiting: send the request again later")},
                429,
                LATER,
            )
        waiting[name] += 1
        try:
            async with locks[name]:  # otherwise two simultaneous requests would both find no run
                asked = await run_in_threadpool(ask, name)
        except ObjectNotFound:
            return JSONResponse(
                {"error": f"Prefect's server has no deployment {name}: deploy it"}, 503, LATER
            )
        except (PrefectException, HTTPError, RuntimeError) as error:
            return JSONResponse(
                {"error": f"Prefect's server did not answer ({type(error).__name__})"}, 503, LATER
            )
        finally:
            waiting[name] -= 1
        if asked.run is None:
            return JSONResponse(
                {"error": f"too many runs of {name} were started in the last hour"}, 429, LATER
            )
        return JSONResponse(told(asked), 202 if asked.new else 200)

    app = Starlette(routes=[Route("/trigger/{name:path}", post, methods=["POST"])])
    return HubSecret(Protected(app, token, hosts))


def told(asked: TriggerOutcome) -> dict[str, Any]:
    """Returns the JSON answer about a run."""
    assert asked.run is not None
    state = asked.run.state.name if asked.run.state else None
    return {"run": str(asked.run.id), "name": asked.run.name, "state": state, "started": asked.new}


class HubSecret:
    """An ASGI wrapper that turns the secret of a Hub webhook into a bearer token if the request has no bearer
    token."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"])
            if HUB_SECRET in given and b"authorization" not in given:
                scope = {
                    **scope,
                    "headers": [*scope["headers"], (b"authorization", b"Bearer " + given[HUB_SECRET])],
                }
        await self._app(scope, receive, send)
