"""Command `alignflow dashboard`: a live page of an artifacts folder, for a browser. Imports neither Prefect
nor torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console

from flows.cli.results.artifacts import Artifacts
from flows.cli.show import OK, Whole, say
from flows.serving.page_options import host_names, server_config, token_shown
from rlhf_core.system.pages.secret_file import kept_secret

TOKEN = "dashboard-token"  # noqa: S105 (the name of the file in the home folder)


def dashboard(
    artifacts: Artifacts = Path("artifacts"),
    *,
    host: str = "127.0.0.1",
    port: Whole = 0,
    allow_host: str = "",
    home: Path = Path(".alignflow"),
) -> int:
    """Show the runs in an artifacts folder as live pages in a browser. Read-only; stop it with Ctrl-C.

    Args:
        host: 0.0.0.0 also accepts connections from other machines; the token crosses the network unencrypted,
            without TLS.
        port: 0 picks a free one and prints it.
        allow_host: more host names that requests may use for this machine, such as a proxy's, separated by
            commas.
        home: folder of the file dashboard-token, which holds the token that requests need.
    """
    if not artifacts.is_dir():
        raise ValueError(
            f"{artifacts}: this folder does not exist: give the `artifacts` folder of recipes, or a copy of"
            " it"
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is not a port: give 1 to 65535, or 0 for a free one")
    names = host_names(host, allow_host)
    import uvicorn

    from evaluation.dashboard.dashboard_app import dashboard as application
    from flows.serving.services import EVERYWHERE, listen
    from rlhf_core.system.pages.page_server import LOOPBACK, Protected

    file = home.absolute() / TOKEN
    with listen(host, port) as listener:
        token = kept_secret(file)
        address = f"http://{LOOPBACK if host == EVERYWHERE else host}:{listener.getsockname()[1]}/"
        console = Console(soft_wrap=True)
        show_address(console, artifacts, address, token, file)
        console.print("press Ctrl-C to stop")
        app = Protected(application(artifacts), token, names, command="alignflow dashboard")
        config = server_config(app, log_level="error", timeout_graceful_shutdown=4)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run([listener])
    return OK


def show_address(console: Console, artifacts: Path, address: str, token: str, file: Path) -> None:
    """Prints the address with its token if the output is a terminal; otherwise (a service manager's log, for
    example) prints only the path of the file that holds the token."""
    say(f"{artifacts} is shown at {address}?token={token_shown(console, token, file)}", console)
