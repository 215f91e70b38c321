"""Contains the shared parts of the commands that serve pages: host names, the token in their output, and
server limits."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    import uvicorn

MOST_CONNECTIONS = 200
HEADER_SECONDS = 10.0


def host_names(host: str, allow_host: str) -> list[str]:
    """Returns the host names of this machine that requests may use. `allow_host`: more names, separated by
    commas. Raises ValueError for names with invalid characters."""
    if not re.fullmatch(r"[A-Za-z0-9.,_-]*", allow_host):
        raise ValueError(
            f"--allow-host {allow_host}: give names or addresses of hosts, without ports, separated by commas"
        )
    from flows.serving.services import EVERYWHERE

    return [
        host,
        *([socket.gethostname()] if host == EVERYWHERE else []),
        *(name for name in allow_host.split(",") if name),
    ]


def token_shown(console: Console, token: str, file: Path) -> str:
    """Returns the token if the output is a terminal; otherwise (a service manager's log, for example) only
    the path of the file that holds it."""
    return token if console.is_terminal else f"... (the token is in {file})"


def server_config(app: Callable[..., Any], **options: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration. Uses h11, which reads at most 64 KiB of headers, because uvicorn's
    other parser keeps all of them in memory. A connection that does not send its request's headers within
    HEADER_SECONDS is closed; otherwise MOST_CONNECTIONS such connections would lock all other users out."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Timed(H11Protocol):
        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.waiting is not None:
                self.waiting.cancel()

        def _wait_for_headers(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.waiting = self.waiting or self.loop.call_later(HEADER_SECONDS, self.transport.close)
            elif self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

    return uvicorn.Config(app, http=Timed, limit_concurrency=MOST_CONNECTIONS, **options)
