"""The processes of `alignflow serve`: a Prefect server and a process worker on this machine, for one home.

One home, one `serve`: a file lock says so. Whatever way it ends, its server, worker, flows and stages end with it (rlhf_core/watch.py).
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from filelock import FileLock, Timeout

from rlhf_core import watch
from rlhf_core.check import MachineLacks
from rlhf_core.launch import ROOT
from rlhf_core.stage import write_text
from tasks.slots import LIMIT_ENV

POOL, LIMIT = "alignflow-process", "alignflow-machine"
START_SECONDS, STOP_SECONDS = 120.0, 20.0
PLACE, LOCK, LOG = "serve.json", "serve.lock", "serve.log"
LOG_BYTES = 20_000_000  # on SQLite Prefect 3.7 logs a traceback at each poll of a worker, ten megabytes an hour


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Holds a home. MachineLacks when another `serve` has it."""
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        try:
            there = json.loads((home / PLACE).read_text())
            where = f"{there['ui']} (process {there['pid']})"
        except (OSError, ValueError, KeyError):
            where = "an address it has not said yet"
        raise MachineLacks(f"alignflow serve is running on {home} already, at {where}: use that, stop it, or give another --home") from None
    try:
        yield
    finally:
        (home / PLACE).unlink(missing_ok=True)
        lock.release()


class Servants:
    """The server and the worker, in sessions of their own: Ctrl-C in the terminal reaches only `serve`, which ends them in order."""

    def __init__(self, home: Path, host: str, port: int):
        self.home, self.ui = home, f"http://{host}:{port}"
        self.api = f"{self.ui}/api"
        self._address = (host, port)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_server(self) -> None:
        """Starts the server and waits until it answers. MachineLacks when the port is taken or it does not."""
        host, port = self._address
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise MachineLacks(f"nothing can be served on {host}:{port} ({error.strerror}): give another --port or --host") from None
        watch.start()
        self._start("server", "server", "start", "--host", host, "--port", str(port))
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.api):
            self.check()
            if time.monotonic() > deadline:
                raise MachineLacks(f"Prefect's server did not answer at {self.api} for {START_SECONDS:.0f} s: see {self.home / LOG}")
            time.sleep(0.2)
        write_text(self.home / PLACE, json.dumps({"ui": self.ui, "api": self.api, "pid": os.getpid()}) + "\n")

    def start_worker(self) -> None:
        self._start("worker", "worker", "start", "--pool", POOL, "--type", "process", "--name", "serve")

    def check(self) -> None:
        """Raises MachineLacks when one of them has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise MachineLacks(
                    f"Prefect's {name} ended with code {process.returncode}, so serve ends too (log: {self.home / LOG}): start it again, "
                    "finished stages stay finished"
                )

    def bound_log(self) -> None:
        """Empties a log that has grown too long, and keeps one copy of it. Server and worker append, so it may be emptied under them."""
        log = self.home / LOG
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, self.home / f"{LOG}.1")
            os.truncate(log, 0)

    def stop(self) -> None:
        """Ends the worker, then the flows and their stages, while the server still notes how; then the server."""
        server = self._running.pop("server", None)
        for process in self._running.values():
            process.terminate()
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # 0 is no signal: flows end with their worker, and what does not is told to
            for pid in self._others(server):
                _signal(pid, number)
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
        """What lives of all that was started here, without the server."""
        for process in self._running.values():
            process.poll()  # a process that ended and is not asked for its code seems to live
        return [pid for pid in watch.marked(os.environ.get(watch.MARK, "-")) if server is None or not _is_of(pid, server.pid)]

    def _start(self, name: str, *command: str) -> None:
        with (self.home / LOG).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "prefect", *command],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """Of server, worker and flows."""
        paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        paths += [str(ROOT)] if ROOT.name not in ("site-packages", "dist-packages") else []
        ours = {"PREFECT_HOME": str(self.home), "PREFECT_API_URL": self.api, LIMIT_ENV: LIMIT}
        ours |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        theirs = {"PREFECT_WORKER_QUERY_SECONDS": "3"}
        return theirs | {key: value for key, value in os.environ.items() if key != "PREFECT_API_AUTH_STRING"} | ours


def free_port(host: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise MachineLacks(f"nothing can be served on {host} ({error.strerror}): give another --host") from None
        return int(probe.getsockname()[1])


def _answers(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _is_of(pid: int, leader: int) -> bool:
    try:
        return os.getsid(pid) == leader
    except OSError:
        return True


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass
