"""The page that asks a browser for the token of a server (page_server.py), and the form that it sends. It shows nothing of the server."""

from __future__ import annotations

from html import escape
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope

PATH, MAX_BYTES = "/token", 8192  # of the form, and how long what it sends may be
FORM = "application/x-www-form-urlencoded"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Token needed</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 32em; margin: 4em auto; padding: 0 1em; }}
input, button {{ font: inherit; padding: .4em .6em; }} input {{ width: 100%; box-sizing: border-box; margin: .6em 0; }}</style></head>
<body><h1>Token needed</h1>
<p role="status">{told}</p>
<form method="post" action="{path}"><input type="hidden" name="next" value="{then}">
<label>Token <input type="password" name="token" autocomplete="off" autofocus required></label>
<button>Open</button></form>
</body></html>
"""
ASK = "Give the token: it is in the address that the command printed, and in the file that it named."
WRONG = "That is not the token. " + ASK


def asks_for_page(scope: Scope) -> bool:
    """Whether a request comes from a browser that opens a page; programs get an answer in JSON."""
    return scope["method"] in ("GET", "HEAD") and "text/html" in Headers(scope=scope).get("accept", "")


def is_form(scope: Scope) -> bool:
    """Whether a request is the form of this page."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    return scope["method"] == "POST" and scope["path"] == PATH and kind == FORM


def token_page(then: str, wrong: bool = False) -> HTMLResponse:
    """Returns the page, with status 401. `then`: the address on this server that is opened after the token was given.

    A browser sends `Origin: null` with the form of a page without a referrer, which the server refuses, so this one has its own policy.
    """
    text = PAGE.format(told=WRONG if wrong else ASK, path=PATH, then=escape(then))
    return HTMLResponse(text, 401, {"referrer-policy": "same-origin", "connection": "close"})


async def read_form(scope: Scope, receive: Receive) -> dict[str, str]:
    """Returns the fields of the form; {} when it is too long or cut off."""
    body = b""
    try:
        async for chunk in Request(scope, receive).stream():
            body += chunk
            if len(body) > MAX_BYTES:
                return {}
    except ClientDisconnect:
        return {}
    fields = parse_qs(body.decode("latin-1"), keep_blank_values=True)
    return {name: values[-1] for name, values in fields.items()}
