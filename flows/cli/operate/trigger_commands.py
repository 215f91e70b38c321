"""Command `alignflow serve-triggers`. It imports Prefect only when it runs."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from rich.console import Console

from flows.cli.show import OK, Whole, say
from flows.serving.page_options import server_config
from rlhf_core.system.machine import MachineLacks

STOP_SECONDS = 5  # for requests still being answered
console = Console(soft_wrap=True)


def serve_triggers(
    *deployments: str,
    home: Path = Path(".alignflow"),
    host: str = "127.0.0.1",
    port: Whole = 4301,
    allow_host: str = "",
    starts_an_hour: Whole = 12,
) -> int:
    """Start runs of deployments on request (POST /trigger/FLOW/NAME with a bearer token) until Ctrl-C.

    Args:
        deployments: names of deployments, such as alignment/on-webhook, on the server at PREFECT_API_URL.
        home: folder of the token, `trigger-token`, which only you can read.
        host: 0.0.0.0 also accepts connections from other machines; the token crosses the network unencrypted,
            without TLS.
        port: 0 picks a free one.
        allow_host: more host names that requests may use for this machine, such as a proxy's, separated by
            commas.
        starts_an_hour: maximum number of runs of one deployment that requests may start per hour.
    """
    check_names(deployments, allow_host, starts_an_hour)
    import os

    import uvicorn
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    from flows.serving.services import EVERYWHERE, TRIGGER_TOKEN, listen
    from flows.triggers.runs import ask
    from flows.triggers.trigger_endpoint import application
    from rlhf_core.system.pages.secret_file import kept_secret

    if not os.environ.get("PREFECT_API_URL"):
        raise ValueError(
            "serve-triggers starts runs on a Prefect server: set PREFECT_API_URL, or use alignflow serve"
            " --trigger-port 4301"
        )
    token = kept_secret(home.absolute() / TRIGGER_TOKEN)
    try:
        with get_client(sync_client=True) as client, listen(host, port) as listener:
            fault = client.api_healthcheck()
            if fault is not None:
                raise MachineLacks(
                    f"no Prefect server answers at PREFECT_API_URL ({type(fault).__name__}): start it, or"
                    " correct the address"
                )
            address = f"http://{'127.0.0.1' if host == EVERYWHERE else host}:{listener.getsockname()[1]}"
            for name in deployments:
                say(f"a run of {name}: POST {address}/trigger/{name}", console)
            say(f"the bearer token is in {home.absolute() / TRIGGER_TOKEN} (press Ctrl-C to stop)", console)
            hosts = (host, socket.gethostname(), *(name for name in allow_host.split(",") if name))
            app = application(
                lambda name: ask(client, name, "webhook", starts_an_hour), deployments, token, hosts
            )
            server = uvicorn.Server(
                server_config(
                    app,
                    log_level="warning",
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=STOP_SECONDS,
                )
            )
            server.run(sockets=[listener])
    except MachineLacks:
        raise
    except (PrefectException, RuntimeError) as error:
        raise MachineLacks(f"Prefect's server (PREFECT_API_URL) did not answer: {error}") from None
    return OK


def check_names(deployments: tuple[str, ...], allow_host: str, starts_an_hour: int) -> None:
    """Raises ValueError for invalid arguments."""
    wrong = [name for name in deployments if not re.fullmatch(r"[^/]+/[^/]+", name)]
    if wrong or not deployments:
        raise ValueError(
            f"{wrong[0] if wrong else 'serve-triggers'}: give deployments as FLOW/NAME, such as"
            " alignment/on-webhook"
        )
    if not re.fullmatch(r"[A-Za-z0-9.,_-]*", allow_host):
        raise ValueError(
            f"--allow-host {allow_host}: give names or addresses of hosts, without ports, separated by commas"
        )
    if starts_an_hour < 1:
        raise ValueError(f"--starts-an-hour {starts_an_hour}: give 1 or more")
