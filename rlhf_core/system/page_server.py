"""Protects what this project serves (labelling, live page, endpoints for feedback and triggers): a token for each request, known hosts,
own origin.

A browser gives the token once, as `/?token=...`, and gets a cookie; programs send it as a bearer token. Browsers send cookies of a host
to all its ports, so the cookie is a keyed digest: who gets it does not know the token, and an open page survives a restart. A request for
another host (DNS rebinding) and a write from another server's page are refused. There is no TLS: put a proxy in front.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
READS = ("GET", "HEAD")
HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
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
        self._session = hmac.new(token.encode(), b"cookie of a browser", hashlib.sha256).hexdigest()
        self._hosts = {_plain(name) for name in ("localhost", LOOPBACK, *hosts)}

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
        named = HOST.fullmatch(host)
        if named is None or _plain(named["name"]) not in self._hosts:
            return JSONResponse({"error": "this server does not answer for that host"}, 421)
        origin = headers.get("origin")
        if scope["method"] not in READS and origin is not None and not _is_of(origin, host):
            return JSONResponse({"error": "this request comes from another server's page"}, 403)
        cookie = f"alignflow-{scope['server'][1] if scope.get('server') else 0}"  # browsers share cookies between the ports of a host
        given = dict(query).get("token", "")
        if given and _same(given, self._token) and scope["method"] in READS:
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            path = quote("/" + scope["path"].lstrip("/\\"))  # browsers read // and /\ as the start of another server's address
            response = RedirectResponse(f"{path}{f'?{rest}' if rest else ''}", 303)
            response.set_cookie(cookie, self._session, httponly=True, samesite="strict")
            return response
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if _same(bearer, self._token) or _same(cookie_parser(headers.get("cookie", "")).get(cookie, ""), self._session):
            return None
        told = "give the token: open the address that the command printed, or send it as a bearer token"
        return JSONResponse({"error": told}, 401, {"connection": "close"})


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _plain(name: str) -> str:
    """Returns a host's name in lower case, without the brackets of an IPv6 address and the dot of a full name."""
    return name.lower().strip("[]").removesuffix(".")


def _is_of(origin: str, host: str) -> bool:
    """Whether a page comes from this server, `host` as in the request."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message.get("headers", [])}
            message["headers"] = [*message.get("headers", []), *((n, v) for n, v in HEADERS.items() if n not in there)]
        await send(message)

    return sent
