"""Closes a local vLLM server to everyone without its key. vLLM itself checks the key only on some paths, and
starts listening long after its process starts.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from rlhf_core.system.processes import LISTENER

Application = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class KeyGuard:
    """ASGI middleware (vLLM's --middleware) that applies to every path. It answers 401 to requests that do
    not send the key in VLLM_API_KEY as a bearer token, and 400 to requests for a host other than 127.0.0.1
    (DNS rebinding)."""

    def __init__(self, app: Application):
        self._app = app
        self._key = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").partition(b":")[0]
        right = hmac.compare_digest(headers.get(b"authorization", b""), self._key)
        if right and host == b"127.0.0.1":
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await send(
            {
                "type": "http.response.start",
                "status": 400 if right else 401,
                "headers": [(b"content-length", b"0")],
            }
        )
        await send({"type": "http.response.body"})


def answer_on_given_socket() -> None:
    """Makes uvicorn use the socket given by LISTENER instead of creating one. Does nothing without
    LISTENER."""
    given = os.environ.pop(LISTENER, "")
    if not given:
        return
    import uvicorn

    os.set_inheritable(int(given), False)
    as_before = uvicorn.Server.startup

    async def startup(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        for made in sockets or []:
            made.close()
        await as_before(self, [socket.socket(fileno=int(given))])

    uvicorn.Server.startup = startup  # type: ignore[method-assign]
