"""Builds the page that asks a browser for a server's token (page_server.py), and reads the form that the
browser sends. The page reveals nothing about the server."""

from __future__ import annotations

from html import escape
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope

PATH = "/token"  # address that the form is sent to
MAX_BYTES = 8192  # limit for a form
FORM = "application/x-www-form-urlencoded"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Token needed</title><link rel="icon" href="data:,">
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 34em; margin: 4em auto; padding: 0 1em; }}
input, button {{ font: inherit; padding: .4em .6em; }}
input {{ width: 100%; box-sizing: border-box; margin: .4em 0 .8em; }}
</style></head>
<body><h1>Token needed</h1>
{wrong}<p>This page needs its token. <code>{command}</code> prints the address with the token on a terminal,
and elsewhere the name of the file that holds it. Open that address, or enter the token here.</p>
<form method="post" action="{path}"><input type="hidden" name="next" value="{then}">
<label>Token <input type="password" name="token" autocomplete="off" autofocus required></label>
<button>Open the page</button></form>
</body></html>
"""
WRONG = '<p role="alert"><b>That is not the token.</b></p>\n'


def asks_for_page(scope: Scope) -> bool:
    """Returns whether a request comes from a browser that opens a page, rather than from a program or a
    page's script, which get JSON answers."""
    wants_html = "text/html" in Headers(scope=scope).get("accept", "")
    of_program = f"{scope['path']}/".startswith("/api/")
    return wants_html and scope["method"] in ("GET", "HEAD") and not of_program


def is_form(scope: Scope) -> bool:
    """Returns whether a request submits the form of this page."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    return scope["method"] == "POST" and scope["path"] == PATH and kind == FORM


def token_page(command: str, then: str, wrong: bool = False) -> HTMLResponse:
    """Returns the page, with status 401. `command`: the command that prints the address; `then`: the address
    on this server to open once the token is given; `wrong`: whether a wrong token was given.

    Under a no-referrer policy, a browser would send `Origin: null` with the form, which the server rejects,
    so this page has another policy.
    """
    then = "/" if then == PATH else then  # the address of the page itself after a wrong token
    text = PAGE.format(wrong=WRONG if wrong else "", command=escape(command), path=PATH, then=escape(then))
    return HTMLResponse(text, 401, {"referrer-policy": "strict-origin", "connection": "close"})


async def read_form(scope: Scope, receive: Receive) -> dict[str, str]:
    """Returns the fields of the form; {} when the form is too long, truncated or malformed."""
    body = b""
    try:
        async for chunk in Request(scope, receive).stream():
            body += chunk
            if len(body) > MAX_BYTES:
                return {}
    except ClientDisconnect:
        return {}
    try:
        fields = parse_qs(body.decode("latin-1"), keep_blank_values=True, max_num_fields=20)
    except ValueError:  # more fields than the form has
        return {}
    return {name: values[-1] for name, values in fields.items()}
