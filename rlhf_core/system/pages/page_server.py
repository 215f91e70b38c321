"""Protects the project's servers (labelling, live page, endpoints for feedback and triggers): each request
needs a token, a known host and the server's own origin.

A browser gives the token once, as `/?token=...` or in the form of token_page.py, and gets a cookie; programs
send it as a bearer token. Browsers send a host's cookies to all its ports, so the cookie is a keyed digest:
it does not reveal the token, and an open page survives a restart. A request for another host (DNS rebinding)
or a write from another server's page is rejected. There is no TLS; put a proxy in front for that.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_core.system.pages.token_page import asks_for_page, is_form, read_form, token_page

LOOPBACK = "127.0.0.1"
READS = ("GET", "HEAD")
HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
# pages load nothing from other servers and cannot be framed; addresses with tokens are sent to no other
# server
HEADERS = {
    b"content-security-policy": (
        b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
    ),
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
}


class Protected:
    """An ASGI application that protects another one.

    `hosts`: names of this machine that requests may use besides localhost and 127.0.0.1. `command`: the
    command that serves pages for browsers and prints their address, such as `alignflow dashboard`. If it is
    given, a browser without the token gets a page that asks for it.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str] = (), command: str = ""):
        self._app = app
        self._token = token
        self._command = command
        self._session = hmac.new(token.encode(), b"cookie of a browser", hashlib.sha256).hexdigest()
        self._hosts = {_plain(name) for name in ("localhost", LOOPBACK, *hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._foreign(scope)
        if refusal is None and self._command and is_form(scope):
            refusal = self._answer_form(scope, await read_form(scope, receive))
        if refusal is None:
            refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _foreign(self, scope: Scope) -> Response | None:
        """Returns the answer to a request for another host or to a write from another server's page; None for
        all other requests."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        named = HOST.fullmatch(host)
        if named is None or _plain(named["name"]) not in self._hosts:
            return JSONResponse({"error": "this server does not answer for that host"}, 421)
        origin = headers.get("origin")
        if scope["method"] not in READS and origin is not None and not _is_of(origin, host):
            return JSONResponse({"error": "this request comes from another server's page"}, 403)
        return None

    def _answer_form(self, scope: Scope, form: dict[str, str]) -> Response:
        """Returns the answer to the form of token_page.py."""
        path, _, query = form.get("next", "/").partition("?")
        then = _local(unquote(path), query)
        if not _same(form.get("token", ""), self._token):
            return token_page(self._command, then, wrong=True)
        return self._opened(scope, then)

    def _opened(self, scope: Scope, then: str) -> Response:
        """Returns the answer to a browser that gave the token: a redirect to an address on this server, with
        the cookie."""
        response = RedirectResponse(then, 303)
        response.set_cookie(_cookie(scope), self._session, httponly=True, samesite="strict")
        return response

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns the answer to a request that lacks the token or has it in the address; None if the request
        may pass."""
        headers = Headers(scope=scope)
        query = scope["query_string"].decode("latin-1")
        given = dict(parse_qsl(query, keep_blank_values=True)).get("token", "")
        then = _local(scope["path"], query)
        if given and _same(given, self._token) and scope["method"] in READS:
            return self._opened(scope, then)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if _same(bearer, self._token) or _same(
            cookie_parser(headers.get("cookie", "")).get(_cookie(scope), ""), self._session
        ):
            return None
        if self._command and asks_for_page(scope):
            return token_page(self._command, then, wrong=bool(given))
        told = "give the token: open the address that the command printed, or send it as a bearer token"
        return JSONResponse({"error": told}, 401, {"connection": "close"})


def _cookie(scope: Scope) -> str:
    """Returns the cookie's name, which contains the port because browsers share cookies between a host's
    ports."""
    return f"alignflow-{scope['server'][1] if scope.get('server') else 0}"


def _local(path: str, query: str) -> str:
    """Returns an address on this server, without a token. `path` is decoded, `query` is not."""
    rest = urlencode([pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "token"])
    # browsers read // and /\ as the start of another server's address
    place = quote("/" + path.lstrip("/\\"))
    return f"{place}?{rest}" if rest else place


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _plain(name: str) -> str:
    """Returns a host name in lower case, without the brackets of an IPv6 address and the trailing dot of a
    full name."""
    return name.lower().strip("[]").removesuffix(".")


def _is_of(origin: str, host: str) -> bool:
    """Returns whether a page comes from this server. `host`: the host in the request."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message.get("headers", [])}
            message["headers"] = [
                *message.get("headers", []),
                *((n, v) for n, v in HEADERS.items() if n not in there),
            ]
        await send(message)

    return sent
