"""Protects what this project serves (labelling, live page, endpoints for feedback and triggers): a token for each request, known hosts,
own origin.

A browser gives the token once, as `/?token=...`, which becomes a cookie of this address; programs send it as a bearer token. A request
for another host (DNS rebinding) and a write from another server's page are refused. There is no TLS: put a proxy in front.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
READS = ("GET", "HEAD")
HEADERS = {  # pages load nothing from elsewhere and are in no frame; addresses with tokens reach no other server
    b"content-security-policy": b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
}


class Protected:
    """An ASGI application in front of another one. `hosts`: names of this machine in requests, besides localhost and 127.0.0.1."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str] = ()):
        self._app, self._token = app, token
        self._hosts = {"localhost", LOOPBACK, *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns the answer to a request that may not reach the application, or that brings the token in its address."""
        headers, query = Headers(scope=scope), parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        host = headers.get("host", "")
        if (urlsplit(f"//{host}").hostname or "") not in self._hosts:
            return JSONResponse({"error": "this server does not answer for that host"}, 421)
        origin = headers.get("origin")
        if scope["method"] not in READS and origin is not None and urlsplit(origin).netloc != host:
            return JSONResponse({"error": "this request comes from another server's page"}, 403)
        cookie = f"alignflow-{scope['server'][1] if scope.get('server') else 0}"  # browsers share cookies between the ports of a host
        given = dict(query).get("token", "")
        if given and self._is_token(given) and scope["method"] in READS:
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            response = RedirectResponse(f"{scope['path']}{f'?{rest}' if rest else ''}", 303)
            response.set_cookie(cookie, given, httponly=True, samesite="strict")
            return response
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(cookie_parser(headers.get("cookie", "")).get(cookie, "")):
            return None
        told = "give the token: open the address that the command printed, or send it as a bearer token"
        return JSONResponse({"error": told}, 401, {"connection": "close"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message.get("headers", [])}
            message["headers"] = [*message.get("headers", []), *((n, v) for n, v in HEADERS.items() if n not in there)]
        await send(message)

    return sent
