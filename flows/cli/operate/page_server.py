"""What the commands that serve pages have in common: names of the machine, the token in their output, and limits of the server."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

MOST_CONNECTIONS = 200


def host_names(host: str, allow_host: str) -> list[str]:
    """Returns the names of this machine that requests may have. `allow_host`: more names, with commas. Raises ValueError for other text."""
    if not re.fullmatch(r"[A-Za-z0-9.,_-]*", allow_host):
        raise ValueError(f"--allow-host {allow_host}: give names or addresses of hosts, without ports, separated by commas")
    from flows.serve import EVERYWHERE

    return [host, *([socket.gethostname()] if host == EVERYWHERE else []), *(name for name in allow_host.split(",") if name)]


def token_shown(console: Console, token: str, file: Path) -> str:
    """Returns the token for a terminal, and elsewhere, where a service manager keeps a log, only the file that holds it."""
    return token if console.is_terminal else f"... (the token: what is in {file})"


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration. h11 reads at most 64 KiB of headers; uvicorn's other parser keeps all of them in memory."""
    import uvicorn

    return uvicorn.Config(app, http="h11", limit_concurrency=MOST_CONNECTIONS, **options)
