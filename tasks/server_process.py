"""Runs a Prefect server in its own process, with this file as the script. The process imports its libraries
while the command does other work, and starts the server when the command asks for it.

Prefect's own class for such a server takes two seconds to import, because it imports the whole server;
importing this file imports nothing from Prefect. Until it is asked to start, the process changes nothing, so
it can be killed without harm, and it ends when the command does. It has its own process group, so Ctrl-C in a
terminal does not reach it; the command ends it after printing its own last messages. The API requires an auth
string. A request for another host (DNS rebinding) or from another server's page is rejected before it reaches
Prefect. `alignflow serve` also runs its server with this file.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 1000
STOP_SECONDS = 5.0  # between TERM and KILL, as in Prefect
POLL_SECONDS = 0.05
ANSWER_SECONDS = 5.0
# settings with which Prefect starts a temporary server
MODE = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
AUTH = "PREFECT_API_AUTH_STRING"  # where Prefect's clients look for the auth string


def command(descriptor: int, hosts: Sequence[str] = ()) -> list[str]:
    """Returns the command line of the process. `descriptor`: its bound socket; `hosts`: host names of this
    machine, in addition to localhost and the address of a connection."""
    return [sys.executable, "-P", __file__, str(descriptor), *hosts]


def protected(auth: str, origin: str) -> dict[str, str]:
    """Returns the environment that makes Prefect's server require an auth string and admit only its own
    pages. The string does not appear on a command line."""
    return {"PREFECT_SERVER_API_AUTH_STRING": auth, "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origin}


def tell(process: subprocess.Popen[bytes]) -> None:
    """Tells a loaded process to open its database and serve."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told:
        told.write(b"+")


def answers(process: subprocess.Popen[bytes], api: str, seconds: float) -> bool:
    """Waits until the process answers at `api`; returns False when it ends, or does not answer in time."""
    end = time.monotonic() + seconds
    # the server speaks plain HTTP, and loading certificates would take a while
    no_certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False, verify=no_certificates) as client:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{api}/health").status_code == 200:
                    return True
            time.sleep(POLL_SECONDS)
    return False


class ServerProcess:
    """The process and its address. `running`: whether the process was told to begin and has not been stopped;
    `begun`: whether it was ever told to begin."""

    def __init__(self) -> None:
        self.server_process: subprocess.Popen[bytes] | None = None
        self.running = self.begun = False
        self._port = 0
        self.auth = f"alignflow:{secrets.token_urlsafe(32)}"

    @property
    def api_url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/api"

    def prepare(self) -> None:
        """Starts the process, which loads and waits. It inherits a listening socket, so no other process can
        take the port and receive the auth string. Raises OSError when no port is available."""
        if not self._port:
            atexit.register(self.stop)
        # set by an earlier start of this process
        kept = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", AUTH)}
        with socket.create_server((LOOPBACK, self._port)) as listener:
            self._port = listener.getsockname()[1]
            environment = kept | MODE | protected(self.auth, f"http://{LOOPBACK}:{self._port}")
            self.server_process = subprocess.Popen(
                command(listener.fileno()),
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=[listener.fileno()],
                process_group=0,
            )

    def begin(self) -> None:
        """Tells the process to open its database and serve. Prepares a new process first if none is
        waiting."""
        if self.server_process is None or self.server_process.poll() is not None:
            self.prepare()
        assert self.server_process is not None
        self.running = self.begun = True
        tell(self.server_process)

    def start(self, seconds: float) -> None:
        """Begins, unless already begun, and waits until the process answers. Raises RuntimeError when it
        ends or does not answer in time."""
        if not self.running:
            self.begin()
        assert self.server_process is not None
        if not answers(self.server_process, self.api_url, seconds):
            self.stop()
            raise RuntimeError(
                f"Prefect's temporary server at {self.api_url} ended, or did not answer within"
                f" {seconds:.0f} s"
            )

    def stop(self) -> None:
        """Ends the process: immediately if it has not begun, otherwise in the same way as Prefect."""
        process = self.server_process
        begun = self.running
        self.running = False
        if process is None or process.poll() is not None:
            return
        if begun:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


ours = ServerProcess()


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Prepares this process's temporary server, unless the environment names one. Stops the server after the
    block if the block did not start it."""
    if not os.environ.get("PREFECT_API_URL"):
        with contextlib.suppress(OSError):  # Prefect reports the problem when a flow needs a server
            ours.prepare()
    try:
        yield
    finally:
        if not ours.begun:
            ours.stop()


Application = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


def own_only(application: Application, hosts: Sequence[str]) -> Application:
    """Returns an ASGI application that rejects requests for other hosts (400) and requests from pages of
    another origin (403)."""
    from starlette.responses import PlainTextResponse

    async def checked(scope: dict[str, Any], receive: Any, send: Any) -> None:
        asks = scope["type"] in ("http", "websocket")
        refused = refusal(scope["headers"], (scope["server"][0], "localhost", *hosts)) if asks else None
        if refused:
            status, sentence = refused
            await PlainTextResponse(f"{sentence}\n", status)(scope, receive, send)
        else:
            await application(scope, receive, send)

    return checked


def refusal(headers: Sequence[tuple[bytes, bytes]], hosts: Sequence[str]) -> tuple[int, str] | None:
    """Returns (status, message) for a request that is not for one of `hosts` or comes from a page of another
    host or port; None for other requests."""
    asked = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    if len(asked) != 1 or asked[0].partition(":")[0] not in {host.lower() for host in hosts}:
        return 400, "this server does not answer for that host: give its name to --allow-host"
    if any(origin.partition("://")[2] != asked[0] for origin in origins):
        return 403, "this server answers only its own pages, not those of another origin"
    return None


def main(descriptor: int, hosts: Sequence[str]) -> None:
    """Runs in the server process: loads libraries, waits for a byte on standard input, and serves on the
    given socket. Ends if standard input closes first."""
    gc.disable()  # loading only creates long-lived objects; this saves a fifth of the time
    import uvicorn
    from prefect.server.api.server import create_app

    def app() -> Application:
        return own_only(create_app(), hosts)

    # h11 reads at most 64 KiB of headers; uvicorn's other parser keeps all of them in memory.
    config = uvicorn.Config(
        app, factory=True, log_level="error", lifespan="on", http="h11", limit_concurrency=MOST_CONNECTIONS
    )
    config.load()
    gc.freeze()
    gc.enable()
    if sys.stdin.buffer.read(1):
        server = uvicorn.Server(config)
        server.run([socket.socket(fileno=descriptor)])
        sys.exit(0 if server.started else 3)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
