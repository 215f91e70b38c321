"""Runs the processes of `alignflow serve` for one home folder: a Prefect server and a process worker on this
machine.

A file lock allows one `serve` per home. Server, worker, flows and stages always end with it
(rlhf_core/system/orphan_watcher.py). The server's password (Prefect's auth string) is in a file that only its
owner can read and in the environment of these processes, but never in a log.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.system import orphan_watcher
from rlhf_core.system.files import locked, read_json, write_text
from rlhf_core.system.machine import MachineLacks
from rlhf_core.system.pages.secret_file import kept_secret, make_private
from rlhf_core.system.processes import LISTENER, module_path
from tasks import server_process
from tasks.fresh_database import NAME as DATABASE
from tasks.served import SERVED_ENV
from tasks.slots import LIMIT_ENV

POOL = "alignflow-process"
LIMIT = "alignflow-machine"
# Python's arguments before those of a Prefect module that imports flows
SAFELY = ("-P", "-m", "flows.prefect_process")
START_SECONDS = 120.0
STOP_SECONDS = 20.0
PLACE = "serve.json"
LOCK = "serve.lock"
LOG = "serve.log"
AUTH = "auth-string"
SERVED = "served.json"
FEEDBACK_TOKEN = "feedback-token"  # noqa: S105  (a file's name)
TRIGGER_TOKEN = "trigger-token"  # noqa: S105
ENDPOINTS = {"feedback": "the endpoint for feedback", "triggers": "the endpoint for triggers"}
EVERYWHERE = "0.0.0.0"
PAGE = "live page of"
# on SQLite, Prefect 3.7 logs a traceback at each poll of a worker, ten megabytes an hour
LOG_BYTES = 20_000_000
# of requests to a busy server (503), after pauses of 2, 4, 8 ... s, nine minutes in all; Prefect's 5 take two
RETRIES = 7
ENDPOINT_RETRIES = 2  # an endpoint's client waits for the answer


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Makes a home folder private and holds its lock until the block ends. Raises MachineLacks when another
    `serve` holds it."""
    make_private(home, f"{DATABASE}*", LOG, f"{LOG}.1", PLACE, SERVED)
    with locked(home / LOCK) as ours:
        if not ours:
            there = read_json(home / PLACE)
            where = f"{there['ui']} (process {there['pid']})" if there else "an unknown address"
            raise MachineLacks(
                f"alignflow serve is already running on {home}, at {where}: use that one, stop it, or give"
                " another --home"
            )
        try:
            yield
        finally:
            (home / PLACE).unlink(missing_ok=True)


class Services:
    """Prefect's server and worker in their own sessions. Ctrl-C in the terminal reaches only `serve`, which
    ends them in order."""

    def __init__(self, home: Path, host: str, port: int, allowed: Sequence[str] = ()):
        """Prepares the services. `allowed`: more host names of this machine, accepted in the Host header of
        requests."""
        self.home = home
        self.ui = f"http://{server_process.LOOPBACK if host == EVERYWHERE else host}:{port}"
        self.api = f"{self.ui}/api"
        self.auth = kept_secret(home / AUTH, "alignflow:")
        self._address = (host, port)
        self._hosts = (host, *([socket.gethostname()] if host == EVERYWHERE else []), *allowed)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_server(self) -> None:
        """Starts the server and waits until it answers. Raises MachineLacks when the port is taken or the
        server does not answer."""
        host, port = self._address
        # the server inherits the socket, so no other process can answer on this port and receive the auth
        # string
        with listen(host, port) as listener:
            orphan_watcher.start()
            own = {"PREFECT__SERVER_FINAL": "1", "PREFECT_UI_API_URL": "/api"} | server_process.protected(
                self.auth, self.ui
            )
            command = server_process.command(listener.fileno(), self._hosts)
            server = self._start("server", command, self.environment() | own, [listener.fileno()])
        server_process.tell(server)
        if not server_process.answers(server, self.api, START_SECONDS):
            self.check()
            raise MachineLacks(
                f"Prefect's server did not answer at {self.api} for {START_SECONDS:.0f} s: see"
                f" {self.home / LOG}"
            )
        write_text(self.home / PLACE, json.dumps({"ui": self.ui, "api": self.api, "pid": os.getpid()}) + "\n")

    def start_worker(self) -> None:
        command = [
            sys.executable,
            *SAFELY,
            "prefect",
            "worker",
            "start",
            "--pool",
            POOL,
            "--type",
            "process",
            "--name",
            "serve",
        ]
        self._start("worker", command, self.environment())

    def start_feedback(self, recipes: Sequence[str], inboxes: Sequence[Path], port: int) -> str:
        """Starts the endpoint that accepts feedback for inboxes, on the server's host.
        Returns its address."""
        places = [part for inbox in inboxes for part in ("--inbox", str(inbox))]
        command = ["feedback", "serve", *recipes, *places, "--allow-host", ",".join(self._hosts)]
        return self._start_endpoint("feedback", command, port) + "/feedback"

    def start_triggers(self, deployments: Sequence[str], port: int, starts_an_hour: int) -> str:
        """Starts the endpoint that starts runs of deployments on request, on the server's host. Returns its
        address."""
        command = [
            "serve-triggers",
            *deployments,
            "--allow-host",
            ",".join(self._hosts),
            "--starts-an-hour",
            str(starts_an_hour),
        ]
        return self._start_endpoint("triggers", command, port) + "/trigger"

    def _start_endpoint(self, name: str, command: list[str], port: int) -> str:
        host = self._address[0]
        # inherited, like the server's socket, so that a browser sends its token to no other process
        with listen(host, port) as listener:
            port = listener.getsockname()[1]
            place = ["--home", str(self.home), "--host", host, "--port", str(port)]
            environment = self.environment() | {
                LISTENER: str(listener.fileno()),
                "PREFECT_CLIENT_MAX_RETRIES": str(ENDPOINT_RETRIES),
            }
            self._start(
                name,
                [sys.executable, "-P", "-m", "flows.cli", *command, *place],
                environment,
                [listener.fileno()],
            )
        return f"{self.ui.rpartition(':')[0]}:{port}"

    def start_dashboard(self, artifacts: Path, port: int) -> str:
        """Starts the live page of an artifacts folder, on the server's host. Returns its address. `serve`
        continues even if the page's process ends."""
        artifacts.mkdir(parents=True, exist_ok=True)
        command = ["dashboard", str(artifacts), "--allow-host", ",".join(self._hosts)]
        return self._start_endpoint(f"{PAGE} {artifacts}", command, port) + "/"

    def record(self, deployments: Mapping[Any, Mapping[str, Any]]) -> None:
        """Saves the parameters of deployments by id; tasks/served.py compares the runs' parameters with
        them."""
        known = read_json(self.home / SERVED) | {
            str(identity): dict(own) for identity, own in deployments.items()
        }
        write_text(self.home / SERVED, json.dumps(known, indent=1) + "\n")

    def check(self) -> None:
        """Raises MachineLacks when one of the processes has ended."""
        for name, process in self._running.items():
            if process.poll() is not None and not name.startswith(PAGE):
                whose = ENDPOINTS.get(name, f"Prefect's {name}")
                raise MachineLacks(
                    f"{whose} ended with code {process.returncode}, so serve ends too (log:"
                    f" {self.home / LOG}): start it again, finished stages stay finished"
                )

    def bound_log(self) -> None:
        """Empties a log larger than LOG_BYTES and keeps one copy. Server and worker open it for appending, so
        they need not reopen it."""
        log = self.home / LOG
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, self.home / f"{LOG}.1")
            os.truncate(log, 0)

    def stop(self) -> None:
        """Ends the worker, then the flows and their stages, and finally the server, which records how the
        flows ended."""
        server = self._running.pop("server", None)
        for process in self._running.values():
            process.terminate()
        # 0 sends nothing, because flows end with their worker; processes that remain get a signal
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            for pid in self._others(server):
                orphan_watcher.send(pid, number)
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and self._others(server):
                time.sleep(0.2)
        if server is not None:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()

    def _others(self, server: subprocess.Popen[bytes] | None) -> list[int]:
        """Returns the PIDs of all living processes started from here, except the server's."""
        for process in self._running.values():
            process.poll()  # a dead process counts as alive until its exit code is read
        return [
            pid
            for pid in orphan_watcher.marked(os.environ.get(orphan_watcher.MARK, "-"))
            if server is None or not _is_of(pid, server.pid)
        ]

    def _start(
        self, name: str, command: list[str], environment: dict[str, str], descriptors: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        with (self.home / LOG).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if name == "server" else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=descriptors,
                umask=0o077 if name == "server" else -1,  # for its database
            )
        return self._running[name]

    def environment(self) -> dict[str, str]:
        """Returns the environment of server, worker and flows."""
        ours = {"PREFECT_HOME": str(self.home), "PREFECT_API_URL": self.api, server_process.AUTH: self.auth}
        ours |= {LIMIT_ENV: LIMIT, SERVED_ENV: str(self.home / SERVED)}
        theirs = {"PREFECT_WORKER_QUERY_SECONDS": "3", "PREFECT_CLIENT_MAX_RETRIES": str(RETRIES)}
        return theirs | dict(os.environ) | ours | module_path()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket: the one that `serve` passed to this process, or else a new one. Port 0
    picks a free port. Raises MachineLacks when the port is not available."""
    given = os.environ.pop(LISTENER, "")
    if given:
        os.set_inheritable(int(given), False)
        return socket.socket(fileno=int(given))
    try:
        return socket.create_server((host, port))
    except OSError as error:
        why = str(error.strerror).partition(" (while ")[0]
        raise MachineLacks(
            f"nothing can be served on {host}:{port} ({why}): give another --port or --host"
        ) from None


def _is_of(pid: int, leader: int) -> bool:
    try:
        return os.getsid(pid) == leader
    except OSError:
        return True
