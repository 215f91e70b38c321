"""Prefect's temporary server, beside a flow that was given no other: out of reach of Ctrl-C, started again when it ends before the flow.

It only notes what happens, but a run without it tries for minutes to note its end, and then fails. A terminal sends Ctrl-C to all processes
of a command: so the server is started with that signal blocked, which it inherits, and ends when the command does.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
from functools import cache

from prefect.client.base import ServerType, determine_server_type
from prefect.logging import get_logger
from prefect.settings import PREFECT_API_URL

POLL_SECONDS, RESTARTS = 0.5, 3
_turn, _over = threading.Lock(), threading.Event()
_ended: list[int] = []  # exit codes of servers that were replaced


def start_server() -> None:
    """Starts the temporary server that Prefect would start a little later; does nothing where a server is named.

    A server that does not start is left to Prefect, which tries again and says why.
    """
    if determine_server_type() == ServerType.EPHEMERAL:
        _start()


@cache
def watch_server() -> None:
    """Looks after this process's temporary server, if it has one, from now to the process's end."""
    if not PREFECT_API_URL.value():
        atexit.register(_over.set)  # called before what Prefect has registered: that ends the server
        threading.Thread(target=_watch, name="temporary-server", daemon=True).start()


def keep_server() -> None:
    """Starts the temporary server again, at its address and with its database, when it has ended; three times at most. Returns when it
    answers: a client that is made while there is none would fail at once."""
    module = sys.modules.get("prefect.server.api.server")  # seconds to import: it is there once such a server was started
    if PREFECT_API_URL.value() or module is None:
        return
    server = module.SubprocessASGIServer()  # the one of this process, which Prefect starts and ends
    with _turn:
        process = server.server_process
        if process is None or process.poll() is None or len(_ended) == RESTARTS or _over.is_set():
            return
        _ended.append(process.returncode)
        get_logger("alignflow").warning("Prefect's temporary server ended with code %d: it is started again", process.returncode)
        server.running = False
        _start()
        atexit.register(_over.set)  # before what `start` has registered


def _watch() -> None:
    while not _over.wait(POLL_SECONDS):
        keep_server()


def _start() -> None:
    """In a thread: a thread has its own blocked signals, and the main one can still be interrupted while it waits."""
    starter = threading.Thread(target=_start_deaf, daemon=True)
    starter.start()
    starter.join()


def _start_deaf() -> None:
    from prefect.server.api.server import SubprocessASGIServer

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with contextlib.suppress(Exception):
        SubprocessASGIServer().start()
